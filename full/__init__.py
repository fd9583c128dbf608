"""The full edition: what a run of real size needs, one subject a file, built on the five files.

Start it from the repository's root: `python -m full --help`. The folder has seven rooms: ranks,
attention, model, tree, learn, run, audit. Each imports only from those before it, and its
`__init__.py` says what it adds to which of the five, and in which order to read it. Beside the
rooms stand the commands (__main__, api, evaluate, check), and the tiny runs of check and of tests
(equivalence, tiny). Public names, by file:

Attention:
    full/attention/masks.py: Mask
    full/attention/attend.py: attend, attend_short, Attention
    full/attention/ring.py: ring_attention, shard, unshard, indices
    ring_attention.py: merge

Trees:
    full/tree/trie.py: TokenTrie, partition, redistribute
    full/tree/chunks.py: tree_scores, tree_backward
    tree_attention.py: definition

Models:
    full/model/config.py: ModelConfig
    full/model/transformer.py: Transformer, causal_attention
    full/model/deltanet.py: Documents
    full/model/logprobs.py: token_logprobs
    full/model/cache.py: KVCache, prefill
    full/learn/generate.py: generate
    full/model/exact.py: make_exact
    full/learn/engine.py: Engine
    models.py: Row
    full/model/hf.py: load_hf, save_hf, full_definition
    full/model/lora.py: add_factors, merge
    full/model/experts.py: Routing, RoutingCounts, update_router_bias

Parallel:
    full/ranks/plans.py: Plan, Grid
    full/model/parallelize.py: parallelize, materialise, copy_weights
    full/ranks/optimizer.py: reduce_gradients, clip_grad_norm, LocalOptimizer, training_tensors,
        lr_factor, name_suspects
    full/learn/packing.py: PackedBatches, Micro, states_like, run_micro_batches, run_forwards
    full/ranks/joining.py: connect, agree
    full/ranks/places.py: full
    full/ranks/checkpoint.py: write_checkpoint, read_checkpoint, checkpoints

Training:
    full/run/config.py: Config
    full/run/flags.py: parse_config
    full/run/tasks.py: Task, make_task
    full/learn/trainer.py: Trainer
    full/learn/objectives.py: grpo_loss, LossSettings, OtherScores
    full/learn/advantages.py: advantages
    full/__main__.py: main

From Python:
    full/api.py: run, audit, Result
"""
