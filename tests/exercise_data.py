"""The exercises and the bugs of exercise.py: tasks, hints, answers."""

from dataclasses import dataclass


@dataclass
class Exercise:
    """Functions of a file that the student writes again."""

    file: str
    functions: tuple[str, ...]
    equation: str  # where the file states what is asked for
    minutes: int
    task: str
    hints: tuple[str, str]
    comments: tuple[str, ...] = ()  # beginnings of comments elsewhere that give the answer away
    # Wrong answers that exercise_judge.py sees and the file's own check does not: right, wrong.
    slips: tuple[tuple[str, str], ...] = ()


EXERCISES = {
    "advantages": Exercise(
        "train_grpo.py", ("advantages",), "equation (1)", 5,
        "Turn the rewards of a group into advantages.",
        ("Subtract the mean of the group. (1) has no standard deviation.",
         "Equal rewards must give exact zeros, and the mean of .1 .1 .1 is not .1 in floats."),
        slips=(("if (rewards_G == rewards_G[0]).all():", "if False:"),)),
    "norm": Exercise(
        "models.py", ("RMSNorm.forward",), "equation (4)", 10,
        "Divide each vector by its root mean square, and scale it by the weight.",
        ("The mean is over the last dimension, and eps is added before the root. Gemma's weight is "
         "1 + w: self.offset is that 1, or 0.",
         "`widen` the input and the weight first, and return the dtype of the input. A mean of "
         "squares in bfloat16 has two to three digits."),
        slips=(("wide = widen(x)", "wide = x"),)),
    "rope": Exercise(
        "models.py", ("apply_rope",), "equation (5)", 15,
        "Turn each pair (x_n, x_(n + D/2)) of every head by its angle.",
        ("A rotation takes (a, b) to (a cos - b sin, b cos + a sin). What is multiplied by the "
         "sine is x with its halves swapped.",
         "`cos_and_sin` returns (cos, cos) and (-sin, sin). So one roll by D / 2 along the last "
         "dimension, two products and a sum are enough. Return the dtype of x."),
        slips=(("sin_BS1D).to(x_BSXD.dtype)", "sin_BS1D)"),)),
    "clip": Exercise(
        "parallel.py", ("clip_grad_norm",), "equations (6) and (7)", 15,
        "Scale all gradients by the factor of (7), with the norm of (6) over all ranks of all "
        "stages. AdamW is done elsewhere.",
        ("Count each distinct entry once: what n ranks hold in common counts 1 / n on each.",
         "`layout(name, grid)` names the group of replicas. One `all_reduce_sum` of the sum of "
         "squares, over all ranks (the group None), is enough."),
        comments=("# All ranks must scale by the same factor",),
        slips=((".clamp(max=1.0)", ""),
               ("widen(next(model.parameters()).new_zeros(()))",
                "next(model.parameters()).new_zeros(())"))),
    "merge": Exercise(
        "ring_attention.py", ("merge",), "equation (2)", 20,
        "Merge attention over two disjoint sets of keys into attention over both. The docstring is "
        "the contract: -inf, the dtype, gradients.",
        ("exp(lse) is the softmax mass of a set of keys. The merged out is the mean of both, "
         "weighted by mass.",
         "`torch.logaddexp` gives the lse of both sets. Where both are -inf, -inf - -inf is NaN: "
         "put 0 in their place first, and -inf back at the end."),
        slips=(("(lse1 == -math.inf) & (lse2 == -math.inf)", "lse1 != lse1"),
               ("lse1.masked_fill(blind, 0.0), lse2.masked_fill(blind, 0.0))",
                "lse1, lse2).masked_fill(blind, 0.0)"),
               ("out.to(out1.dtype)", "out"))),
    "loss": Exercise(
        "train_grpo.py", ("grpo_loss",), "equations (2), (3), (4) and (5)", 20,
        "Compute this rank's part of the loss from log-probs, old log-probs and advantages.",
        ("exp(lp - old) is the ratio. The loss is minus the smaller of two gains.",
         "Divide the sum by Z, which counts the tokens of all ranks: a mean over the tokens here "
         "would weight a token by its neighbors.")),
    "logprobs": Exercise(
        "models.py", ("Transformer.logprobs", "token_logprobs"), "equations (8) and (9)", 20,
        "Score targets, with the logits of one chunk of tokens in memory at a time. So also in the "
        "backward.",
        ("Divide the logits by the temperature before the softmax. The entropy is of the same "
         "distribution. Split states and targets into chunks of self.chunk tokens.",
         "Call `token_logprobs` through torch's `checkpoint`, which stores a chunk's input and "
         "computes its logits again in the backward. Concatenate the results of the chunks."),
        slips=(("(widen(F.linear(hidden_NM, weight_VM)) /", "(F.linear(hidden_NM, weight_VM) /"),)),
    "f-and-g": Exercise(
        "parallel.py", ("copy_to_tp_region", "reduce_from_tp_region"), "equations (2) and (3)", 20,
        "Say which collective runs forward, and which one backward.",
        ("Each is one `Communicate.apply` with a pair of functions. The table above `Communicate` "
         "has the pairs.",
         "Without sequence parallelism f is (nothing, all-reduce) and g is (all-reduce, nothing). "
         "With it, they are all-gather and reduce-scatter of tokens, in opposite order."),
        comments=("# The first two lines of the table are f and g", "# (2)", "# (3)")),
    "sampler": Exercise(
        "models.py", ("sample",), "equation (8)", 25,
        "Draw a token from each row of logits, given one uniform number a row.",
        ("Inverse-CDF sampling: take the first token at which the running sum of probabilities "
         "exceeds the draw. At temperature 0, take the likeliest token.",
         "Work in float64. `torch.searchsorted(.., right=True)` finds the first larger entry. "
         "Multiply the draw by the last running sum, which is 1 up to rounding."),
        slips=(("right=True", "right=False"),)),
    "ring-backward": Exercise(
        "ring_attention.py", ("block_backward",), "equation (3)", 25,
        "Compute a block's part of all gradients, from the final out and lse.",
        ("P is exp(s - lse) with the final lse, whichever block it is. No second softmax.",
         "sum_j P_ij dout_i . v_j over all keys equals dout_i . out_i, which is known here. The "
         "scale belongs to dq and dk, and not to dv.")),
    "cache": Exercise(
        "models.py", ("KVCache.attention",), "equation (2)", 30,
        "Write S new keys and values of each row into its slots, and attend to all so far.",
        ("The token at position p of a row is in slot p. Rows have different lengths, so the "
         "slots of the new tokens are a table (B, S): self.positions_BS. Make the tensor of a "
         "layer, (2, B, G, C, D), when it is first called.",
         "`visible_keys(slots of queries, all slots, window)` is the whole mask: slots are "
         "positions, so it hides the empty slots and leftovers of padding too.")),
    "radix": Exercise(
        "tree_attention.py", ("radix_tree",), "the picture of radix_tree", 30,
        "Build the tree of all prefixes of some sequences. A `Node` has two lists of integers: "
        "tokens, and in ends the numbers of the sequences that end with it.",
        ("Group the sequences that run through a node by their next token. Each group is a child.",
         "A child is as long as all of its sequences agree and none of them ends. Let a generator "
         "yield the recursive calls to `depth_first`: a deep tree needs no deep recursion."),
        slips=(("stop < end + max_tokens and all(", "all("),)),
    "z": Exercise(
        "train_grpo.py", ("Trainer.total", "Trainer.loss_denominator", "train"), "equation (5)", 30,
        "Write the loop, with the Z of (5): one number for all ranks. After each step, call "
        "log(step, batch, metrics, updates, solved). solved is None where no evaluation is due.",
        ("Collect, prepare, then for each minibatch: Z, `forward_backward`, `optim_step` with the "
         "learning rate of the step. Evaluate every `eval_every` steps and after the last one.",
         "Z is the sum of `loss_denominator` over the d ranks: c and t ranks have the same "
         "episodes. `total` sums a number over the group of some axes. Count where mask is true, "
         "and skip a minibatch without such tokens."),
        comments=("# There is no division by the number of ranks",),
        slips=(("self.grid.group[axes]).item()", "None).item()"),)),
    "vocabulary": Exercise(
        "parallel.py", ("vocab_parallel_logprobs",), "equations (4) and (5)", 35,
        "Score targets when each rank has some rows of the head, without gathering logits.",
        ("Three numbers a token are enough: s, u and the target's logit. All ranks subtract the "
         "same m, which needs no gradient: detach it.",
         "The states go through f first, as each rank's gradient of them is a part. One rank has "
         "the target's row, and the others add 0 for it."),
        slips=(("m_N = z_Nv.detach().amax(-1)", "m_N = 0 * z_Nv.detach()[:, 0]"),)),
    "ring": Exercise(
        "ring_attention.py", ("RingAttention.forward",), "equations (1) and (2)", 40,
        "Attend to one block of keys a hop, while the next block travels.",
        ("`traveling_blocks` yields (owner, block), and `visible_pairs` the pairs of chunks to "
         "compute. Begin with out 0 and lse -inf, and merge.",
         "Widen what you compute with, repeat key heads only after they have traveled, round out "
         "once at the end, and save what the backward unpacks in its first lines.")),
    "tree-backward": Exercise(
        "tree_attention.py", ("TreeAttention.backward",), "equation (5)", 40,
        "Compute the gradients of q and of all keys and values of the path above.",
        ("It is the softmax's backward: P from `path_weights`, then dS, then three products.",
         "Every segment of the path gets its own dk and dv, in float32 or better. Autograd adds "
         "them to the leaves, where the gradients of all segments below add up.")),
    "experts": Exercise(
        "parallel.py", ("dispatch_experts",), "the docstring of dispatch_experts", 40,
        "Send rows to the ranks of their experts, run these, and send the rows back.",
        ("Exchange the counts first, with `dist.all_to_all_single`. Then both sides know the size "
         "of the messages. `Communicate` sends the gradients back.",
         "Rows arrive sorted by rank, then by expert, and experts want them sorted by expert: a "
         "stable argsort of the expert of each row. Undo it before you send them back.")),
    "pipeline": Exercise(
        "parallel.py", ("run_1f1b",), "the schedule above run_1f1b", 45,
        "Run the schedule 1F1B: one forward, one backward.",
        ("Stage i of p starts with p - 1 - i forwards, then alternates, then finishes the "
         "backwards that are pending.",
         "Send and receive in one batch, or two stages wait for each other. A stage's input needs "
         "requires_grad, and its gradient is what the stage before waits for."),
        slips=(("warm_up = min(stages - 1 - stage, number)", "warm_up = number"),)),
}  # fmt: skip


@dataclass
class Bug:
    """A statement that a review should find."""

    file: str
    right: str  # occurs once in the file
    wrong: str
    symptom: str  # what somebody has noticed
    why: str
    plan: str = ""  # of parallel.py's check: the plan that shows it
    judge: str = ""  # the exercise whose judge sees it, if the file's own check does not


BUGS = dict(enumerate((
    Bug("models.py",
        "/ temperature).log_softmax(-1)", ").log_softmax(-1) / temperature",
        "At temperature 0.7, log-probs are not those that sampled the tokens.",
        "The temperature divides logits, (8). A log-prob divided by it is of no distribution: its "
        "probabilities do not add up to 1."),
    Bug("train_grpo.py",
        "l_N.sum() / Z", "l_N.mean()",
        "The logged loss and the gradient norm depend on --rows.",
        "A mean of means. A part of a minibatch, and a rank, has its own number of tokens, and a "
        "token counts more where there are few. Z is one number for all."),
    Bug("ring_attention.py",
        "(distance_qk < window)", "(distance_qk <= window)",
        "With a window, out is not SDPA's.",
        "A window of 3 would let the query at position 5 see keys 2, 3, 4 and 5. The window counts "
        "the token itself."),
    Bug("train_grpo.py",
        "tokens[:, positions_s], tokens[:, positions_s + 1]",
        "tokens[:, positions_s], tokens[:, positions_s]",
        "A step's first ratios are far from 1, but not with --tree.",
        "The state of token t predicts token t + 1. This scores the token that the model reads."),
    Bug("models.py",
        "(mean_square + self.eps).sqrt()", "(mean_square.sqrt() + self.eps)",
        "Log-probs differ a little from transformers', in float64 too.",
        "eps stands under the root, (4). Outside of it, 1e-6 shrinks a vector with a root mean "
        "square of 1 by a part in a million, and under it by half of that."),
    Bug("train_grpo.py",
        "optim_step(trainer.learning_rate(step))", "optim_step(trainer.config.lr)",
        "Runs of 10 and of 1000 steps log the same first ten steps.",
        "The schedule is never called: no warm-up, and no decay to the end of the run."),
    Bug("parallel.py",
        "square().sum() / dist.get_world_size(replicas)", "square().sum()",
        "On d2 the gradients are right, and their logged norm is 1.41 times too large.",
        "What n ranks hold in common counts n times. So the clip is stricter on more ranks, and "
        "the run depends on the plan.", plan="d2"),
    Bug("train_grpo.py",
        "old_N = logprobs_N.new_tensor([episodes[b].old[t] for b, t in sampled])",
        "old_N = logprobs_N.detach()",
        "However many minibatches a step has, no token is ever clipped.",
        "old is the log-prob when the token was sampled. From the policy of now, the ratio is "
        "1 after any number of updates, and the clip does nothing."),
    Bug("tree_attention.py",
        "(index_N[:, None] < end_N)", "(index_N[:, None] <= end_N)",
        "After a fork, a sequence gets a log-prob too many.",
        "end is the index after the last descendant: this token is the first one that does not "
        "see j. In 5 6 7 / 5 6 8 token 8 would see 7."),
    Bug("parallel.py",
        'p.grad = all_reduce_sum(p.grad, grid.group[layout(name, grid)["partial"]])  # (1)',
        'partial = grid.group[layout(name, grid)["partial"]]\n'
        "            p.grad = all_reduce_sum(p.grad, partial) / partial.size()  # (1)",
        "On d2 the loss is right, and the gradient norm a half.",
        "A gradient averaged over ranks. Z counted the tokens of all ranks already, so partial "
        "gradients are added up.", plan="d2"),
    Bug("models.py",
        "length + count for length, count in zip(cache.lengths, counts)",
        "length + tokens_BS.shape[1] for length in cache.lengths",
        "A prompt is continued well alone, and badly next to a longer one.",
        "Rows are padded to the longest one. A row's next token goes after its own last token, and "
        "not after its padding, whose keys it would see."),
    Bug("train_grpo.py",
        "self.turn = len(self.tokens) + len(reply)", "self.turn = len(self.tokens)",
        "In `guess`, every second answer is called malformed, and ends the game.",
        "The reply is still in the queue. The turn would begin with the reply, so the task reads "
        "its own words as a part of the answer."),
    Bug("ring_attention.py",
        "full_like(out_2BHnD[..., 0], -math.inf)", "full_like(q_2BHnD[..., 0], -math.inf)",
        "In float64 it is exact. In bfloat16 it is much worse than SDPA.",
        "lse gets the dtype of q. Every merge then rounds it to 8 bits: exp(lse) is wrong by a "
        "percent, and the backward's P with it. dq, dk and dv take the dtype of lse, so they add "
        "up in bfloat16 too."),
    Bug("models.py",
        "ended = row.append(token, logprob) and row.tokens[-1] in end",
        "row.append(token, logprob)\n            ended = row.tokens[-1] in end",
        "Some conversations end in the middle of the user's turn.",
        "A queued end token does not end the turn: the model has not sampled it. In a reply of "
        "several sentences it may be the first period."),
    Bug("parallel.py",
        "z_Nv.detach().amax(-1)\n    dist.all_reduce(m_N, dist.ReduceOp.MAX, group)\n",
        "z_Nv.detach().amax(-1)\n",
        "With t2 all log-probs and entropies are wrong.",
        "A line is missing: the all-reduce of m. Each rank subtracts its own largest logit, and "
        "the sums of (4) and (5) add up what has different units.", plan="t2"),
    Bug("tree_attention.py",
        "model.logprobs(hidden_NM[parent_N]", "model.logprobs(hidden_NM[index_N - 1]",
        "At a fork, the first tokens of all branches but the first are scored wrongly.",
        "The token before it in preorder is in another branch. A token is predicted by its parent: "
        "in 5 6 7 / 5 6 8 token 8 by 6, and not by 7."),
    Bug("train_grpo.py",
        "Z = trainer.total(trainer.loss_denominator(minibatch))",
        "Z = trainer.loss_denominator(minibatch)",
        "With c2 and t2 it trains as one process does, and not with d2.",
        "Z counts the tokens of this rank alone. The sum over ranks is a sum of means, near twice "
        "the mean, and a token of a rank with few tokens counts more.", judge="z"),
    Bug("ring_attention.py",
        "finite_BHq = lse_BHq.masked_fill(lse_BHq == -math.inf, 0.0)", "finite_BHq = lse_BHq",
        "With a short window, out is NaN.",
        "A query that sees no key of a block has the lse -inf. -inf - -inf is NaN, and one NaN "
        "stays in every later merge."),
    Bug("parallel.py",
        'differ = grid.sequence or module in ("q_norm", "k_norm")', "differ = grid.sequence",
        "With t2, Llama trains as on one process, and Qwen3 does not quite.",
        "All t ranks hold the norms of q and k, and each uses them on its own heads. So their "
        "gradients are partial and must be added up, as transformers 5.24 with a tp_plan does "
        "not.", plan="t2"),
    Bug("models.py",
        "checkpoint(token_logprobs, *pair, **rest, use_reentrant=False) for",
        "token_logprobs(*pair, **rest) for",
        "All numbers are right, but chunks of tokens save no memory.",
        "Autograd keeps the logits of each chunk until the backward, so all of them are in memory "
        "at its beginning.", judge="logprobs"),
    Bug("parallel.py",
        "out_nM[order_n.argsort()]", "out_nM[order_n]",
        "e2 is right with two experts, and wrong with four.",
        "Sorting is undone by the inverse of a permutation, the argsort of it. To sort twice is "
        "to mix.", plan="d2e2"),
    Bug("ring_attention.py",
        ".unflatten(2, (-1, copies)).sum(3)", ".unflatten(2, (copies, -1)).sum(2)",
        "dk and dv are right with one key head, and wrong with two for four query heads.",
        "Query heads that read one key head are neighbors: 0 1 read key head 0, and 2 3 key head "
        "1. This adds up 0 and 2, and 1 and 3."),
    Bug("parallel.py",
        "pending.pop(0)", "pending.pop()",
        "p2 is right with one micro-batch. With two, gradients are wrong.",
        "The first micro-batch that went in comes back first. From the other end of the list, a "
        "gradient meets the activations of another micro-batch.", plan="p2"),
    Bug("parallel.py",
        "all_gather_tokens, own_tokens)", "all_gather_tokens, reduce_scatter_tokens)",
        "With t2 sp the loss is right, and all gradients but the head's are doubled.",
        "The usual backward of an all-gather sums over ranks. Here f of the head has done so "
        "already, and each rank has the whole gradient.", plan="t2 sp"),
), 1))  # fmt: skip
