"""The full edition: what a run of real size needs, one subject a file, built on the five files.

Start it from the repository's root: `python -m full --help`. Public names, by file:

Attention:
    full/masks.py: Mask
    full/attend.py: attend
    full/ring.py: ring_attention, shard, unshard, indices
    ring_attention.py: merge

Trees:
    full/trie.py: TokenTrie
    full/tree.py: attend_short
    full/chunks.py: tree_scores, tree_backward, partition, redistribute
    tree_attention.py: definition

Models:
    full/model_config.py: ModelConfig
    full/transformer.py: Transformer, causal_attention
    full/deltanet.py: Documents
    full/logprobs.py: token_logprobs
    full/cache.py: KVCache, prefill
    full/generate.py: generate
    full/exact.py: make_exact
    full/engine.py: Engine
    models.py: Row
    full/hf.py: load_hf, save_hf, full_definition
    full/lora.py: add_factors, merge
    full/experts.py: RoutingCounts, update_router_bias

Parallel:
    full/plans.py: Plan, Grid
    full/parallelize.py: parallelize, materialise
    full/optimizer.py: reduce_gradients, clip_grad_norm, LocalOptimizer, training_tensors,
        lr_factor, name_suspects
    full/packing.py: PackedBatches, Micro, states_like, run_micro_batches, run_forwards
    full/weights.py: copy_weights
    full/ranks.py: connect, agree
    full/places.py: full
    full/checkpoint.py: write_checkpoint, read_checkpoint, checkpoints

Training:
    full/config.py: Config
    full/flags.py: parse_config
    full/tasks.py: Task
    full/questions.py: make_task
    full/trainer.py: Trainer
    full/objectives.py: grpo_loss
    full/advantages.py: advantages
    full/__main__.py: main

From Python:
    full/api.py: run, audit, Result
"""
