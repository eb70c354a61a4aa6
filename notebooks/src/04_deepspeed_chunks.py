# %% [markdown]
# # 04 DeepSpeed chunks
#
# <!-- colab -->
#
# So far you recomputed blocks one by one. Explainers cut the model into a few *chunks*, and let DeepSpeed checkpoint
# them. How many? And what does DeepSpeed really do?
#
# **After these 30 minutes, and 32 of exercises, you can**
#
# - predict the peak of a model in chunks, and compute the right number of them;
# - read timelines, and say what recomputing in logarithmic memory costs;
# - say what DeepSpeed's configuration keys do, and notice a gradient that is silently zero.

# %% tags=["nbval-ignore-output"]
# <setup>

# %% tags=["parameters"]
seq_len = 256
checkpoint_every = 2
n_layers = 12
hidden = 128
batch_size = 2
steps = 5
device = "auto"

# %%
import math

import pandas as pd
import torch
from IPython.display import display
from torch import Tensor, nn

import memsave_lib as ms
from memsave_lib import formulas, labs
from memsave_lib.course import chunk_checks, chunk_outcomes, deepspeed_peer, experiments, outline_puzzle, records
from memsave_lib.course.env import setup
from memsave_lib.course.predictions import Ledger
from memsave_lib.course.questions import chunks as questions
from memsave_lib.units import human_bytes

here = setup(seq_len, checkpoint_every, n_layers, hidden, batch_size, steps, device)
ledger = Ledger()
print(here)

# %% [markdown]
# ## 1. How many chunks?
#
# A **chunk** is *m* blocks that are recomputed as one. Forward keeps the input of each chunk: *L/m* checkpoints for
# *L* blocks. Backward brings one chunk back to life: *m* blocks with *A'* checkpoints' worth of saved bytes each. The
# operation in progress needs a working set *W*: gradients of the wide layer and its weight. Together: **peak = L/m +
# m·A' + W**, in checkpoints.
#
# *Which number of chunks has the lowest peak for 12 blocks?* The textbooks' answer is √L. **Predict**, then **measure**.
# (Gradients exist before; they and the parameters are not counted.)

# %%
shape = formulas.BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
stack = ms.BlockStack(here.n_layers, here.hidden, here.heads).to(here.device)
x = torch.randn(here.batch_size, here.seq_len, here.hidden, device=here.device, requires_grad=True)


def step() -> None:
    stack(x).square().mean().backward()


def metered(strategy: ms.Strategy) -> ms.Trace:
    with ms.apply(stack, strategy), ms.MemoryMeter(stack) as meter:
        step()
    return meter.trace


step()  # from now on gradients are there
stays = sum(2 * p.nbytes for p in stack.parameters()) + x.nbytes  # with their gradients; and that of x
counts = range(1, here.n_layers + 1)
predicted = {n: formulas.stack_peak_bytes(ms.Chunked(n).plan(here.n_layers), shape) for n in counts}
some = [n for n in counts if here.n_layers % n == 0 or n == 5]  # equal chunks, and one number of unequal ones

# %%
# Exercise: difficulty 1 of 3, 2 minutes. For: choosing a number of chunks.
# <exercise>
# <stub>
chunks_of_twelve = None  # your number
# <solution>
chunks_of_twelve = 12
# </exercise>
print(ledger.check(questions.best_of_twelve(here), chunks_of_twelve, questions.chunks_of_twelve(here)))
measured = {n: metered(ms.Chunked(n)).peak_bytes - stays for n in some}
unit, block, W = shape.checkpoint_bytes, formulas.block_saved_bytes(shape), formulas.working_set_bytes(shape)
for n in (n for n in some if here.n_layers % n == 0):
    m, peak = here.n_layers // n, formulas.chunked_peak_bytes(here.n_layers, here.n_layers // n, shape)
    terms = f"{n:>2} + {m:>2} x {block / unit:.2f} + {W / unit:.2f} = {peak / unit:6.2f} checkpoints"
    print(f"m = {m:>2}: {terms}; measured: {measured[n] - peak:+} bytes")
print(f"with unequal chunks too, the largest difference is {max(abs(measured[n] - predicted[n]) for n in some)} bytes")
root, best = round(math.sqrt(here.n_layers)), min(reversed(predicted), key=predicted.get)
print(f"lowest peak: {best} chunks; the root of L says {root}")
marks = {root: "root of L", best: "lowest"}
ms.plots.bytes_against("number of chunks", {"peak": predicted}, {"peak": measured}, marks, what="peak bytes")

# %% [markdown]
# <details><summary>Hint</summary>
#
# Write down *L/m + 16·m* for *m* = 1, 2, 3, 4, 6 and 12.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# One block a chunk: 12 + 16 checkpoints. Two blocks save 6 checkpoints and cost 16.
#
# </details>
#
# The difference is 0 bytes, and the best number of chunks is not √12 but 12: one block a chunk. √L is right where a
# layer saves no more than its input, *A'* = 1, as in its paper. A transformer block saves **sixteen** times its
# input. The minimum is at *m* = √(L/A'): **√(L·A') chunks**, at most *L*.
#
# *And for 80 blocks?* **Predict** it for Llama-70B's depth and width, 4,096 tokens, half precision. (Our blocks, by
# formula, without *W*.)

# %%
deep = formulas.BlockShape(1, 4096, 8192, 64, dtype="bfloat16")
block80, unit80 = formulas.block_saved_bytes(deep), deep.checkpoint_bytes
W80 = formulas.working_set_bytes(deep)
best = ms.Chunked.best(80, block80, unit80).num_checkpoints
for n in (1, 8, 9, 20, 40, best, 80):
    plan = ms.Chunked(n).plan(80)
    peak = formulas.stack_peak_bytes(plan, deep) - W80
    sizes = sorted({part.n_blocks for part in plan.segments}, reverse=True)
    mark = {9: "  <- root of L", 40: "  <- best of equal chunks", best: "  <- best"}.get(n, "")
    print(
        f"{n:>2} chunks of {' or '.join(map(str, sizes)):<7} {peak / unit80:7.1f} checkpoints, {human_bytes(peak)}{mark}"
    )
print(f"root of L*A': {formulas.best_chunk_count(80, block80, unit80):.1f} chunks")

# %% [markdown]
# √80 chunks need more than twice the best. "2 to 8 chunks for 30 to 100 layers" is advice for other layers.
#
# √(L·A') means 2 to 3 blocks a chunk. Of *equal* chunks 40 are best, of unequal ones 48: the first 32 have two
# blocks, and when backward reaches those, 16 checkpoints are gone already.
#
# ## 2. Waves
#
# *How often does memory surge in backward (a **wave**), and which surge is the highest?* The first belongs to the
# *last* chunk: forward has just thrown it away, and backward wants it at once. *Does the peak rise if you keep it?*
# `recompute_last=False` keeps it, like PyTorch's `checkpoint_sequential`.

# %%
three, flops = min(3, here.n_layers), {}
traces = {ms.Chunked(n).label: metered(ms.Chunked(n)) for n in sorted({three, here.n_layers})}
for label, trace in traces.items():
    waves = sum(phase == "recompute" for phase, _, _ in trace.phases)
    print(f"{label}: waves in backward: {waves}; peak in {trace.peak_at}")
for again in (True, False):
    strategy = ms.Chunked(three, recompute_last=again)
    with ms.apply(stack, strategy):
        flops[again] = ms.flops.count_flops(step)
    print(f"{strategy.label:<25} peak {metered(strategy).peak_bytes - stays:,} bytes, {flops[again]:,} FLOPs")
plain = ms.flops.count_flops(step)
costs = ms.flops.profile_blocks(stack, step)
share = (flops[True] - flops[False]) / (flops[True] - plain)
print(f"extra FLOPs fall by {share:.0%}; one bias: {4 * here.hidden} bytes")
ms.plots.memory_timeline(traces, x="events")

# %% [markdown]
# One wave a chunk, the first the highest: all checkpoints are still there, and each wave ends one lower.
#
# With the last chunk kept the peak is the same, up to the gradient of one bias, and one chunk less runs again: a
# third of the price.
#
# ### Your turn: the lab
#
# *These steps began with gradients in place; the lab begins without. Which wave is the highest now, and which
# `chunks` and `seq_len` move the peak to an earlier one?* **Predict**: a wave of *m* blocks leaves gradients,
# 12*mh*² numbers, and takes one checkpoint, *sbh*.

# %%
lab = labs.chunks_lab(here.n_layers, here.hidden, here.heads, here.batch_size, here.seq_len, three, here.device)
lab.still()

# %%
lab

# %% [markdown]
# The last one, while *s·b* < 12*mh*. By default only 12 chunks of 1,024 tokens move it.
#
# ## 3. Bisection
#
# Recompute the left half of the blocks as one region, treat the right half likewise, and so inside each region.
# *How many checkpoints survive forward? How often is a block run again?*


# %%
strategies = ms.FullCheckpoint(), ms.Chunked(min(4, here.n_layers)), ms.Chunked(three), ms.Recursive()
for strategy in {one.label: one for one in strategies}.values():
    trace = metered(strategy)
    with ms.apply(stack, strategy):
        extra = (ms.flops.count_flops(step) - plain) / costs[0].forward
    saved, peak = trace.saved_bytes / unit, (trace.peak_bytes - stays) / unit
    print(
        f"{strategy.label:<15} saves {saved:5.2f}, peaks at {peak:6.2f} checkpoints, {extra:6.3f} more block forwards"
    )
for n in (8, 16, 64, 256):
    plan = ms.Recursive().plan(n)
    again, stopped = (plan.extra_flops([costs[0]] * n, early_stop=early) / costs[0].forward for early in (False, True))
    price = f"{again:4.0f} block forwards, +{again / n / 3:.0%} of a step ({stopped:.3f} with early stop)"
    print(f"{n:>3} blocks: {plan.n_regions} checkpoints and one live block; {price}")
ms.plots.plan_picture({one.label: one.plan(here.n_layers) for one in strategies[1:]})

# %% [markdown]
# (The loss keeps one checkpoint more.) For *L* a power of two, bisection has *log₂L* checkpoints and one live block,
# for *(L/2)·log₂L* block forwards. "O(√L) or O(log L) memory for 30 % of time" names the price of *one*
# recomputation. With 12 blocks bisection takes a quarter off the peak of one block a chunk, for 2.5 times its
# recomputation: checkpoints were cheap already.
#
# ## 4. The real DeepSpeed
#
# DeepSpeed's `deepspeed.checkpointing.checkpoint(function, x)` is like PyTorch's. *Called for each chunk, does it
# keep the same bytes as ours? What do saved-tensor hooks see of them?* With dropout, so that the dice count.
# (DeepSpeed is an extra: the cell says how to install it.)


# %% tags=["nbval-ignore-output"]
missing = deepspeed_peer.why_not()
print(
    missing or "After forward: bytes alive, and bytes that hooks see. Equal: all gradients are those of plain training."
)
dropping = ms.BlockStack(here.n_layers, here.hidden, here.heads, dropout=0.1).to(here.device)
short = x[:, : here.seq_len // 4].detach().clone().requires_grad_()
untouched = chunk_outcomes.outcome(dropping, short)
for n in [] if missing else sorted({1, three, here.n_layers}):
    theirs, run = deepspeed_peer.load(here.device.type).checkpointing.checkpoint, deepspeed_peer.run_in_chunks
    results = {"DeepSpeed": chunk_outcomes.outcome(dropping, short, lambda v: run(dropping.blocks, v, n, theirs))}
    with ms.apply(dropping, ms.Chunked(n)):
        results["ours"] = chunk_outcomes.outcome(dropping, short)
    for name, one in results.items():
        held, seen = human_bytes(one.held_bytes), human_bytes(one.hooked_bytes)
        print(f"chunks: {n:<3} {name:<9} {held:>9} alive, hooks see {seen:>9}; equal: {one.equals(untouched)}")

# %% [markdown]
# The same bytes, and every gradient equal. But hooks see nothing of DeepSpeed's: its checkpoints are attributes of an
# autograd function. Only live memory counts them.
#
# Those were *calls in the model's code*. Explainers write a key into the configuration. *Does `gradient_checkpointing`
# checkpoint a GPT-2? Does `activation_checkpointing`?* One step each, after `deepspeed.initialize`.
#
# The option `partition_activations` splits checkpoints among model-parallel ranks. *And in one process?* Three chunks of
# blocks; then with a `Linear` at the end of each.

# %% tags=["nbval-ignore-output"]
for effect in [] if missing else deepspeed_peer.config_keys(here):
    print(f"{effect.label:<45}{human_bytes(effect.held_bytes):>10} alive, equal gradients: {effect.equal}")
print(missing or "The first line is training without any key.")
for run in [] if missing else deepspeed_peer.partitioned_activations():
    print(f"{run.label}: equal loss {run.equal_loss}, equal gradients {run.equal_gradients}")
    print(f"    parameters with nothing but zeros, by chunk: {run.zero_gradients} of {run.parameters}")

# %% [markdown]
# No key does. `gradient_checkpointing` is ignored like a misspelt one, without a word. `activation_checkpointing` holds
# options for calls: without a call nothing changes, and its `number_checkpoints` only sizes a buffer. Measure before
# you believe a switch.
#
# ### A silent zero
#
# With a `Linear` at the end the loss is right, the last chunk learns, and all before it get zeros: no error, no
# warning. Its output is a *view*, made under `no_grad`; in backward DeepSpeed finds that a view of that needs no
# gradient, and skips it. **How to notice:** compare gradients with a plain step's, or look for zeros (exercise 3). (Not
# yet run on a GPU.)
#
# ## 5. GPT-2 in three chunks
#
# The explainers' homework: GPT-2, 12 layers, 10 steps of 4 × 128 tokens, without and with 3 chunks. Claim C9 of the
# ledger in notebook 06: *2.5 GB fall to 1.8 GB*. **Predict**: how much lower is the peak with 3 chunks? With 12?
#
# First a small GPT-2 with the real one's proportions (vocabulary 65 times the width, tokens two thirds of it): the
# whole model, and its blocks alone. Then training, five ways to the same last loss, to the bit, and the real size,
# recorded by `make record`.

# %%
config = {"n_layer": here.n_layers, "n_embd": here.hidden, "n_head": here.heads, "vocab_size": 65 * here.hidden}
sizes = experiments.Sizes(4, here.hidden // 6, here.steps, "mini", device=here.device, config=tuple(config.items()))
model, tokens = sizes.build(), sizes.batches()[0]
states = torch.randn(*tokens.shape, here.hidden, device=here.device)


def whole(strategy: ms.Strategy) -> ms.Trace:
    with ms.apply(model, strategy), ms.MemoryMeter(model) as meter:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    return meter.trace


def alone(strategy: ms.Strategy) -> ms.Trace:
    with ms.MemoryMeter(model.transformer.h) as meter:
        ms.run(list(model.transformer.h), states, strategy).square().mean().backward()
    return meter.trace


# %%
whole(ms.KeepAll())  # from now on gradients are there
chosen = {one.label: one for one in (ms.KeepAll(), *(ms.Chunked(n) for n in (1, three, here.n_layers)))}
both = {"whole model": whole, "blocks alone": alone}
found = {(part, label): run(one) for part, run in both.items() for label, one in chosen.items()}
for part in both:
    above = [found[part, label].peak_bytes - found[part, label].start_bytes for label in chosen]
    print(f"{part}, peak above what stays: {', '.join(map(human_bytes, above))}")
print("peaks of the whole model:", "; ".join(str(found["whole model", label].peak_at) for label in chosen))
ms.plots.bytes_by_category({f"{part}, {label}": trace.at_peak for (part, label), trace in found.items()})


# %% tags=["nbval-ignore-output"]
def table(rows: list[dict]) -> pd.DataFrame:
    run = pd.DataFrame([row for row in rows if "skipped" not in row]).set_index("variant")
    return run[["step_seconds"]].round(3).join(run.filter(like="bytes").map(human_bytes))


display(table(experiments.gpt2_chunks(sizes, three)))
try:
    record = records.load("gpt2_chunks")
    print(record.origin)
    display(table(record.rows))
    points = [ms.plots.Option(row.variant, row.peak_bytes, row.step_seconds) for row in record.frame().itertuples()]
    display(ms.plots.trade_off(points, memory="peak", cost="seconds"))
except records.NoRecord as error:
    print(error)

# %% [markdown]
# Blocks alone: every number of chunks has its own peak. The whole model: 3 and 12 chunks peak at the same byte, in
# `wte`, the embedding that is also GPT-2's head: the gradients from both uses, and their sum, are alive at once
# (*temporary*). No chunk touches them: **the peak is elsewhere**.
#
# The tables' bytes are beyond parameters and Adam's averages; in the last column, beyond gradients too. Three chunks,
# one block a chunk, Hugging Face, DeepSpeed: one peak. C9's 1.8 GB is less than parameters, gradients and Adam alone:
# 124 M × 16 bytes = 2.0 GB. At 512 tokens, activations are the smaller part.
#
# ## Exercises
#
# ### 1. The right number
#
# Return the number of chunks with the lowest peak; of equal peaks, that with more chunks. Sizes differ by one block at
# most, the larger first. While chunk *j* (from 1) is alive, the checkpoints of chunks 1 to *j* are. Leave *W* out.


# %%
# Exercise: difficulty 2 of 3, 10 minutes. For: planning chunks of any model.
def best_chunks(n_blocks: int, block_bytes: int, checkpoint_bytes: int) -> int:
    """``block_bytes`` are a block's saved bytes, its input included."""
    # <exercise>
    # <stub>
    raise NotImplementedError("your turn")
    # <solution>
    peaks = {}
    for chunks in range(n_blocks, 0, -1):  # min() takes the first of equal ones: the most chunks
        small, larger = divmod(n_blocks, chunks)
        blocks_in = [small + 1] * larger + [small] * (chunks - larger)
        peaks[chunks] = max(j * checkpoint_bytes + m * block_bytes for j, m in enumerate(blocks_in, start=1))
    return min(peaks, key=peaks.get)
    # </exercise>


print(chunk_checks.check_best_chunks(best_chunks, here))

# %% [markdown]
# <details><summary>Hint</summary>
#
# There are only `n_blocks` candidates: compute the peak of each. `divmod(n_blocks, chunks)` gives the smaller size, and how
# many chunks are one block larger.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# </details>
#
# ### 2. Make the chunks
#
# Run a list of blocks in chunks with PyTorch's `checkpoint`. Mind the loop variable.


# %%
from torch.utils.checkpoint import checkpoint


# Exercise: difficulty 2 of 3, 10 minutes. For: checkpointing a model of your own.
def run_chunks(blocks: list[nn.Module], x: Tensor, num_checkpoints: int) -> Tensor:
    """The output of the last block; the larger chunks come first."""
    # <exercise>
    # <stub>
    raise NotImplementedError("your turn")
    # <solution>
    start = 0
    for left in range(num_checkpoints, 0, -1):
        stop = start + math.ceil((len(blocks) - start) / left)
        x = checkpoint(nn.Sequential(*blocks[start:stop]), x, use_reentrant=False)
        start = stop
    return x
    # </exercise>


print(chunk_checks.check_chunks(run_chunks, here))

# %% [markdown]
# <details><summary>Hint</summary>
#
# `checkpoint(function, x, use_reentrant=False)` wants one function: `nn.Sequential(*blocks[start:stop])` is one.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# </details>
#
# ### 3. Notice the silence
#
# After backward: which trainable parameters have no gradient, or one of nothing but zeros?


# %%
# Exercise: difficulty 1 of 3, 5 minutes. For: noticing a chunk that stopped learning.
def silent_parameters(model: nn.Module) -> list[str]:
    """Their names, as in ``model.named_parameters()``."""
    # <exercise>
    # <stub>
    raise NotImplementedError("your turn")
    # <solution>
    names = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter.grad is None or not parameter.grad.any()):
            names.append(name)
    return names
    # </exercise>


print(chunk_checks.check_silent(silent_parameters, here))

# %% [markdown]
# <details><summary>Hint</summary>
#
# A sum can cancel out, and a tiny gradient is no zero. `tensor.any()` asks whether any element is not zero.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# </details>
#
# ### 4. Read a timeline
#
# Run the cell: four steps of twelve blocks, by formula, and their names in no order. Which is which? Return a dict from
# letters to names, and run it again.


# %%
puzzle = outline_puzzle.Puzzle.of(here)
display(puzzle.picture())
print("The names:", ", ".join(puzzle.names))


# Exercise: difficulty 2 of 3, 5 minutes. For: recognizing a strategy in anyone's memory profile.
def name_outlines() -> dict[str, str]:
    """The name behind each letter, once each."""
    # <exercise>
    # <stub>
    raise NotImplementedError("your turn")
    # <solution>
    by_surges = {0: "keep all", 3: "3 chunks", 11: "recursive", 12: "full checkpoint"}
    return {letter: by_surges[outline.surges] for letter, outline in puzzle.outlines.items()}
    # </exercise>


print(outline_puzzle.check_outlines(name_outlines, puzzle))

# %% [markdown]
# <details><summary>Hint</summary>
#
# Three questions: how often does memory surge behind the dots? How high is it there, and how high at the dots? How
# much work does the step take, where a plain step takes 1?
#
# </details>
#
# <details><summary>Solution</summary>
#
# You may write the dict by eye. This counts surges in backward:
#
# <!-- solution -->
#
# Nothing surges where all is kept. Three broad surges are three chunks. Two are left with narrow ones: full
# checkpointing piles up a checkpoint a block in forward, and is done first; recursion keeps its last block, and runs
# blocks again and again.
#
# </details>
#
# ## Your predictions

# %%
print(ledger)
ledger.plot()

# %% [markdown]
# ## What you should have noticed
#
# - Peak = L/m + m·A' + W, to the byte. A transformer block has A' = 16: use √(L·A') chunks, not √L.
# - The last chunk need not be recomputed. Bisection saves few checkpoints for many forwards.
# - DeepSpeed's checkpoint is a call. Keys alone change nothing; one of its options can silence gradients.
# - Look where the peak is before you turn a knob.
#
# ## Next
#
# Checkpoints are few and small. Notebook 05 sends them away, and asks when a copy hides.
