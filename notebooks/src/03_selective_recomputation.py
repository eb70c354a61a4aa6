# %% [markdown]
# # 03 Selective recomputation
#
# <!-- colab -->
#
# Full checkpointing gives nearly everything back and pays most of a forward for it. Between that and keeping everything
# lie many trades. Find them here: by blocks, and then inside the block.
#
# **After these 30 minutes, and 33 of exercises, you can**
#
# - predict memory and FLOPs of `checkpoint_every=k`, and read a trade-off curve;
# - tell three meanings of the word "selective" apart;
# - choose what to recompute by bytes per FLOP.

# %% tags=["nbval-ignore-output"]
# <setup>

# %% tags=["parameters"]
seq_len = 512
checkpoint_every = 2
n_layers = 6
hidden = 256
batch_size = 2
steps = 3
device = "auto"

# %%
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memsave_lib as ms
from memsave_lib import formulas, labs
from memsave_lib.course import costs, puzzle_checks, puzzles, selection_checks
from memsave_lib.course.env import setup
from memsave_lib.course.predictions import Ledger
from memsave_lib.course.questions import selective
from memsave_lib.units import human_bytes

here = setup(seq_len, checkpoint_every, n_layers, hidden, batch_size, steps, device)
ledger = Ledger()
print(here)

# %% [markdown]
# ## 1. Every k-th block
#
# In this course `checkpoint_every=k` means: block *i* is **kept** when *i* is a multiple of *k*, all others are
# recomputed. With k=1 all are kept. (Beware: a block that notebook 02 called checkpointed was a *recomputed* one.)
#
# *How many bytes are saved for each k?* A kept block costs about sixteen inputs, a recomputed one costs one. Take pencil
# and paper; then let the formula do it for every k, and measure three of them.

# %%
shape = formulas.BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
stack = ms.BlockStack(here.n_layers, here.hidden, here.heads).to(here.device)
x = torch.randn(here.batch_size, here.seq_len, here.hidden, device=here.device)


def step(model: nn.Module = stack) -> Tensor:
    loss = model(x).sum()
    loss.backward()
    return loss


k = here.checkpoint_every
print(ms.Selective(k).plan(here.n_layers).describe())
every = range(1, max(here.n_layers, k) + 1)
predicted = {n: formulas.stack_saved_bytes(ms.Selective(n).plan(here.n_layers), shape) for n in every}
measured = {n: ms.measure(step, stack, ms.Selective(n), repeats=0).saved_bytes for n in {1, k, every[-1]}}
print("given back, k=1, 2, ...:", ", ".join(f"{1 - predicted[n] / predicted[1]:.0%}" for n in every))
print(f"largest difference to the measurement: {max(abs(predicted[n] - measured[n]) for n in measured)} bytes")
ms.plots.bytes_against("checkpoint_every", {"saved": predicted}, {"saved": measured}, mark=k)

# %% [markdown]
# k keeps *L/k* of *L* blocks, rounded up: from k=1 to k=2 half of them change sides, later few.
#
# ### The experiment from the explainer
#
# Explainers on the web set this homework: six blocks of width 512, batch 8, 128 tokens, synthetic data; no checkpointing,
# full, k=2, k=3. Two claims go with it, numbered as in notebook 06. B4: *recomputing 6 of 12 layers makes backward about
# 50 % more expensive*. B5: *k=2 saves about half of the memory for about 10 % of time*. *Which is right, and which run is
# a bad trade?*


# %% tags=["nbval-ignore-output"]
from torch.nn import functional as F


def homework() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = ms.BlockStack(6, 512, heads=8).to(here.device)
    data, target = torch.randn(2, 8, 128, 512, device=here.device)

    def step() -> Tensor:
        loss = F.mse_loss(model(data), target)
        loss.backward()
        return loss

    return model, step


strategies = {"none": ms.KeepAll(), "full": ms.FullCheckpoint(), "k=2": ms.Selective(2), "k=3": ms.Selective(3)}
experiment = ms.compare(homework, strategies, repeats=1)
for one in experiment.measurements:
    print(f"{one.label:<5}{one.step_seconds:.2f} s a step, on this machine")

# %%
from IPython.display import display

table = experiment.frame()[["equal", "saved_bytes", "saved_ratio", "peak_bytes", "peak_at", "flops_ratio"]]
formats = {
    "saved_bytes": human_bytes,
    "saved_ratio": "{:.3f}".format,
    "peak_bytes": human_bytes,
    "flops_ratio": "{:.4f}".format,
}
display(table.assign(**{column: table[column].map(form) for column, form in formats.items()}))
experiment.plot()

# %% [markdown]
# `equal` comes first: loss, every gradient and the random state are those of keep-all. None is a bad trade:
# in order of FLOPs (none, k=2, k=3, full) each gives back more. (In each the loss saves 4 MiB of its own.)
#
# *And the two claims?*

# %%
cost = ms.flops.profile_blocks(stack, step)[0]
half = ms.Selective(2).plan(12)
for early_stop in (False, True):
    extra = half.extra_flops([cost] * 12, early_stop) / (12 * cost.forward)
    print(f"6 of 12 blocks, early stop {early_stop!s:<5}: +{extra / 2:.1%} of backward, +{extra / 3:.1%} of the step")
none, _, two, _ = experiment.measurements
saved, peak = 1 - two.saved_bytes / none.saved_bytes, 1 - two.peak_bytes / none.peak_bytes
work = two.step_flops / none.step_flops - 1
verdict = {True: "fair", False: "wrong"}
print(f"B4, +50 % of backward: {verdict[abs(extra / 2 - 0.5) < 0.1]}")
print(f"B5, +10 % of time: {verdict[abs(work - 0.1) < 0.05]}, by FLOPs it is +{work:.1%}")
print(
    f"B5, -50 % of memory: {verdict[abs(saved - 0.5) < 0.1]} for saved bytes ({saved:.0%}), "
    f"{verdict[abs(peak - 0.5) < 0.1]} for the peak ({peak:.0%})"
)

# %% [markdown]
# B4 forgets that half of the blocks is half a forward, and that backward is two forwards already. B5 is fair about saved
# bytes, and, as far as time follows FLOPs, fair about time thanks to early stop alone. The peak, which is what has to
# fit, falls less: parameters, gradients and a live block are in it too.
#
# ### Your turn: the lab
#
# *Some k more than halves the saved bytes. Does some k halve the peak, too: at every `seq_len`, or from which one
# on?* Then move the sliders. *Run* trains a real step, whose memory fills the outline; earlier runs stay, in grey. (Its
# FLOPs count fused attention, too.)

# %%
lab = labs.selective_lab(
    here.n_layers, here.hidden, here.heads, here.batch_size, here.seq_len, here.checkpoint_every, here.device
)
lab.still()

# %%
lab

# %% [markdown]
# Saved bytes are proportional to `seq_len`; the peak is not. Keep-all peaks before there are gradients: 12*h*² + 16*sbh*
# numbers a block. Any k ends with weights and gradients, 24*h*². Half takes *s·b* > 2.25*h*, and with few blocks more:
# one of them is alive. (With the default parameters: from 1,024 on, with k = 5 and 6.)
#
# ## 2. Three meanings of one word
#
# *Two people tell their tools "3". How many blocks does each recompute?* Our k **keeps** every k-th block. Hugging Face's
# `every_n_layers=n` and an older torchtitan's layer frequency **recompute** every n-th: the first has blocks 0, n, 2n, ...,
# the second the last block of each group, n-1, 2n-1, .... And what Korthikanti et al. and Megatron call *selective* looks
# **inside**: every block is kept, but its attention core, softmax(QKᵀ)V, is recomputed.


# %%
from memsave_lib.plan import Segment


def one_by_one(recompute: Sequence[bool]) -> ms.Plan:
    return ms.Plan(len(recompute), tuple(Segment(i, i + 1, again) for i, again in enumerate(recompute)))


n, blocks = max(3, here.checkpoint_every), range(here.n_layers)
meanings = {
    f"here: checkpoint_every={n}": ms.Selective(n).plan(here.n_layers),
    f"Hugging Face: every_n_layers={n}": one_by_one([i % n == 0 for i in blocks]),
    f"torchtitan: frequency {n}": one_by_one([(i + 1) % n == 0 for i in blocks]),
    "Korthikanti, Megatron: selective": ms.SelectiveOps("attention").plan(here.n_layers),
}
for name, plan in meanings.items():
    saved = human_bytes(formulas.stack_saved_bytes(plan, shape))
    print(f"{name:<33} recomputes {plan.actions.count('recompute')} of {here.n_layers} blocks, {saved} saved")
ms.plots.plan_picture(meanings)

# %% [markdown]
# One number, often other blocks and other bytes. Before you compare two tools, count their recomputed blocks.
# (Why Megatron's gives so little back here is the question of section 4.)
#
# ### Exercise: one word, many meanings
#
# Write the loop that runs a list of blocks as each tool would. `"attention core"` is Korthikanti's:
# `ms.run(blocks, x, strategy)` runs it with the strategy above, whatever `n`. For the others PyTorch's `checkpoint` is enough.


# %%
# Exercise: difficulty 1 of 3, 10 minutes. For: reading other tools' settings.
def run_as(meaning: str, blocks: Sequence[nn.Module], x: Tensor, n: int) -> Tensor:
    """Run all blocks; ``meaning`` is "course", "hugging face", "torchtitan" or "attention core"."""
    # <exercise>
    # <stub>
    raise NotImplementedError("your turn")
    # <solution>
    if meaning == "attention core":
        return ms.run(blocks, x, ms.SelectiveOps("attention"))
    for i, block in enumerate(blocks):
        again = {"course": i % n > 0, "hugging face": i % n == 0, "torchtitan": i % n == n - 1}[meaning]
        x = checkpoint(block, x, use_reentrant=False) if again else block(x)
    return x
    # </exercise>


print(selection_checks.check_meanings(run_as, here))

# %% [markdown]
# <details><summary>Hint</summary>
#
# Look at the picture above. Which remainder of `i` by `n` does each tool pick? And hand `block` to `checkpoint`, not a
# `lambda` that mentions it.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# </details>
#
# ## 3. Bytes per FLOP
#
# A block saves about sixteen units of one hidden state. *Which of them are nearly free to make again?* Ask of each tensor
# how many FLOPs of matrix products lie between it and its neighbors. A LayerNorm or a GELU contains none. **Predict**: how
# many per cent of a block's saved bytes are their outputs?

# %%
# Exercise: difficulty 1 of 3, 3 minutes. For: choosing what to recompute first.
# <exercise>
# <stub>
free_per_cent = None  # your number
# <solution>
free_per_cent = 37.5
# </exercise>
prices = costs.prices_to_recompute(shape)  # name, saved bytes, FLOPs of matrix products to make it again
free = sum(size for _, size, flops in prices if flops == 0)
print(ledger.check(selective.free_share(here), free_per_cent, 100 * free / formulas.block_saved_bytes(shape)))
ms.plots.bytes_per_flop(prices)

# %% [markdown]
# Six of the sixteen units. (The sixteenth, not in the picture, is the block's input.) Almost nobody uses this.
# `SelectiveOps(("activation", "norm"))` does: it makes small regions, GELU with the down-projection, LayerNorm with the
# projection behind it, which would save the output. A region keeps its input; early stop ends its second run just
# before the matrix product.
#
# <details><summary>Hint</summary>
#
# Both LayerNorms put out one hidden state, GELU puts out the four that the feed-forward layer is wide. Divide by sixteen.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# 1 + 1 + 4 of 16. LayerNorm statistics and log-sum-exp, the crumbs, take a little off the share.
#
# </details>
#
# *And the additional FLOPs?*

# %%
keep = ms.measure(step, stack, ms.KeepAll(), repeats=0)
cheap = ms.measure(step, stack, ms.SelectiveOps(("activation", "norm")), repeats=0)
for one in (keep, cheap):
    units = one.saved_bytes / here.n_layers / shape.checkpoint_bytes
    print(f"{one.label}: {units:.2f} units a block, {one.step_flops:,} FLOPs, equal: {one.equal_gradients}")
print(f"given back: {1 - cheap.saved_bytes / keep.saved_bytes:.1%}, for {cheap.step_flops - keep.step_flops} FLOPs")

# %% [markdown]
# More than a third of the saved bytes, for nothing that a FLOP counter can see. What it costs are a few passes over
# memory; you find the seconds at the end. Megatron offers this as `--recompute-modules`.
#
# ## 4. The attention core
#
# *How much of GPT-3's saved bytes are attention scores?* Written out, attention keeps matrices of *s* × *s* for each head.
# Korthikanti et al. recompute just this core. **Predict** its share of GPT-3's block: 2,048 tokens, width 12,288, 96 heads.
# In half precision with dropout each score costs 2 + 1 + 2 bytes, 5*as*²*b* together; all the rest takes 34*sbh*, with masks of two more dropouts. And what is
# left of it with fused attention (`sdpa`)?

# %%
# Exercise: difficulty 2 of 3, 5 minutes. For: telling whether the core is worth recomputing.
# <exercise>
# <stub>
core_per_cent = None  # your number
# <solution>
core_per_cent = 100 * 80 / (80 + 34)
# </exercise>
shares = {}
for attention in ("math", "sdpa"):
    gpt3 = formulas.BlockShape(1, 2048, 12288, 96, attention=attention, dtype="bfloat16", dropout=0.1, device="cuda")
    whole, rest = formulas.block_saved_bytes(gpt3), formulas.block_saved_bytes(gpt3, ("attention",))
    shares[attention] = 100 * (1 - rest / whole)
print(ledger.check(selective.core_share(), core_per_cent, shares["math"]))
print("GPT-3's core keeps of a block:", ", ".join(f"{name} {share:.1f} %" for name, share in shares.items()))
written_out = ms.BlockStack(here.n_layers, here.hidden, here.heads, attention="math").to(here.device)
for name, model in {"math": written_out, "sdpa": stack}.items():
    for strategy in (ms.KeepAll(), ms.SelectiveOps("attention")):
        one = ms.measure(lambda: step(model), model, strategy, repeats=0)
        units = one.saved_bytes / here.n_layers / shape.checkpoint_bytes
        print(f"here, {name}, {strategy.label:<20} {units:6.3f} units a block")

# %% [markdown]
# In GPT-3's block with the scores written out, the core is most of it. Fused attention never writes the scores down: it
# has recomputed its core all along, inside the kernel, and one number a row is left to give back. (GPT-3's
# figures are formulas, for a GPU.)
#
# <details><summary>Hint</summary>
#
# Divide both by *sbh*: 5*as*/*h* against 34. The batch does not matter.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# 5 · 96 · 2,048 / 12,288 is 80.
#
# </details>
#
# PyTorch has a tool of its own for choosing inside a block: *op-level selective checkpointing*, a policy that says of each
# operation whether its result is saved. *Save every result but the attention core's: how many units?* Fewer than
# keep-all?


# %%
def all_but_attention(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE if "scaled_dot_product" in str(op) else CheckpointPolicy.MUST_SAVE


def op_level(x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, all_but_attention)
    for block in stack.blocks:
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return x


for name, run in {"keep all": stack, "op-level, all but attention": op_level}.items():
    with ms.MemoryMeter(stack) as meter:
        before = meter.live_bytes
        loss = run(x).sum()
        held = meter.live_bytes - before
    units, seen = held / here.n_layers / shape.checkpoint_bytes, meter.trace.saved_bytes / held
    print(f"{name:<28} holds {units:.2f} units a block; saved-tensor hooks see {seen:.0%} of it")
    del loss

# %% [markdown]
# More, not less. The policy saves the *results* of operations, also those that backward never asks for, such as the
# down-projection's output before the addition. And saved-tensor hooks, on which many tools build, do not see them.
#
# ## 5. All of them on one stack
#
# *Which of all these would you take?* Attention is written out here, so that the counter sees every product.


# %%
options = {
    "keep all": ms.KeepAll(),
    "attention": ms.SelectiveOps("attention"),
    "activation + norm": ms.SelectiveOps(("activation", "norm")),
    "all three": ms.SelectiveOps(),
    "k=2": ms.Selective(2),
    "k=3": ms.Selective(3),
    "full": ms.FullCheckpoint(),
}
pareto = ms.compare(lambda: (written_out, lambda: step(written_out)), options, repeats=0)
print("equal loss, gradients and random state:", all(one.equal_gradients for one in pareto.measurements))
pareto.plot()

# %% [markdown]
# Read it from the left, where nothing is paid: activation and norm come for free. To the right, further bytes cost FLOPs.
# A filled point is worth having; for a hollow one, another point is at least as small and as cheap. (Attention is
# counted here, so full checkpointing costs more than in notebook 02.)
#
# *And in seconds?* Passes over memory are not free for a clock.

# %% tags=["nbval-ignore-output"]
import time

for name in ("keep all", "activation + norm", "all three", "k=2", "full"):
    with ms.apply(written_out, options[name]):
        times = []
        for _ in range(2):
            begin = time.perf_counter()
            step(written_out).item()  # a GPU answers only when it is done
            times.append(time.perf_counter() - begin)
    print(f"{name:<18} {min(times):.3f} s")

# %% [markdown]
# On two idle cores the free option may come between keep-all and full. On a busy machine count FLOPs.
#
# ### Exercise: checkpoints under a budget
#
# Six blocks, no two alike. Say for each whether it is kept or recomputed, so that the stack meets the budget of saved
# bytes and the target of additional FLOPs. The check runs your choice on the real stack, on the CPU.

# %%
# Exercise: difficulty 2 of 3, 15 minutes. For: placing checkpoints in a model whose blocks differ.
puzzle = puzzles.checkpoint_puzzle(here)
print(puzzle)
# <exercise>
# <stub>
actions = None  # ("keep", "recompute", ...), one word for each block
# <solution>
actions = ("keep", "recompute", "keep", "keep", "recompute", "keep")
# </exercise>
print(puzzle_checks.check_placed(actions, puzzle))

# %% [markdown]
# <details><summary>Hint</summary>
#
# Recomputing a block gives back what it keeps less its input. Divide that by its FLOPs: which blocks give back most for
# each? Then see how many of them the budget takes.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# With many heads the scores take many bytes, and few FLOPs make them again. With two heads they do not pay.
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
# - `checkpoint_every` walks along one line: half of the blocks, half of the bytes, half of the price.
# - The same number means other blocks in other tools. Count the recomputed blocks.
# - LayerNorm and GELU give back more than a third of a block (fused attention) without one additional matrix product.
# - Fused attention has recomputed its core already. Choosing by operation can even cost memory.
#
# ## Next
#
# [04 DeepSpeed chunks](04_deepspeed_chunks.ipynb): cut a model into chunks. How many?
