# %% [markdown]
# # 02 Full checkpointing
#
# <!-- colab -->
#
# Notebook 01 counted what a block keeps for backward. Now you keep one tensor a block, and compute the others again
# in backward: time for memory.
#
# **After these 25 minutes, and 33 of exercises, you can**
#
# - write a checkpoint by hand, and say what PyTorch's own does better;
# - predict the bytes and the FLOPs of a checkpointed stack;
# - say when it does not lower the peak, and what holds it then;
# - name two ways to get wrong gradients from it that no shape check notices.

# %% tags=["nbval-ignore-output"]
# <setup>

# %% tags=["parameters"]
seq_len = 512
checkpoint_every = 2
n_layers = 6
hidden = 256
batch_size = 2
steps = 2
device = "auto"

# %%
import copy

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import memsave_lib as ms
from memsave_lib import formulas, labs
from memsave_lib.course import peak_checks, recompute_checks, texts
from memsave_lib.course.env import setup
from memsave_lib.course.predictions import Ledger
from memsave_lib.course.questions import checkpointing
from memsave_lib.units import human_bytes

here = setup(seq_len, checkpoint_every, n_layers, hidden, batch_size, steps, device)
ledger = Ledger()
print(here)

# %% [markdown]
# ## 1. Keep only the input
#
# *A block saves about sixteen times its input. How many times its input does it save if backward may run it again?*
#
# Here is a checkpoint in fifteen lines. Inside an `autograd.Function` PyTorch records nothing: what the block computes in
# `forward` dies at once. Only `x` is kept. `backward` runs the block again, now recording, and goes back through this graph.
#
# *Guess it for each of the three ways below.* **Measure**: are gradients equal, bit by bit, and does it train the block
# when the input needs no gradient?


# %%
class HandCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)  # recorded by nobody

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()  # a new graph begins here
        with torch.enable_grad():
            output = ctx.block(x)
        output.backward(gradient)  # the weights get theirs by the way
        return None, x.grad  # one for each argument of forward; a block has none


# %%
shape = formulas.BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
x = torch.randn(here.batch_size, here.seq_len, here.hidden, device=here.device)
block = ms.TransformerBlock(here.hidden, here.heads).to(here.device)
ways = {"keep all": block, "by hand": lambda x: HandCheckpoint.apply(block, x)}
ways["torch"] = lambda x: checkpoint(block, x, use_reentrant=False)
gradients = {}
for name, run in ways.items():
    block.zero_grad()
    with ms.MemoryMeter(block) as meter:
        run(x.clone().requires_grad_()).sum().backward()
    gradients[name] = [parameter.grad for parameter in block.parameters()]
    equal = all(map(torch.equal, gradients[name], gradients["keep all"]))
    inputs, anyway = meter.trace.saved_bytes / x.nbytes, run(x).requires_grad
    print(f"{name:<8} saves {inputs:5.2f} inputs; equal gradients: {equal}; trains if x needs no gradient: {anyway}")

# %% [markdown]
# Both checkpoints keep the input and nothing else. By hand there is a trap: autograd sees only `x` go in, no weights.
# If `x` needs no gradient, as a first block's input often does not, nobody calls `backward`, and no error says so.
# PyTorch's with `use_reentrant=False` has no such trap.
#
# ## 2. The saw-tooth
#
# *A stack of such blocks: how many bytes of activations are alive at most, when backward runs?* Write it as a
# function. `shape.checkpoint_bytes` are the bytes of a block's input, `formulas.block_saved_bytes(shape)` of all
# that a kept block saves, its input among them.
#
# The peak is these, plus gradients and what the operation in progress needs; the library's arithmetic has both.
# **Measure**: `ms.apply` makes the stack follow a strategy until its `with` ends.


# %%
# Exercise: difficulty 2 of 3, 10 minutes. For: sizing a checkpointed run on paper.
def checkpointed_peak(n_layers: int, shape: formulas.BlockShape) -> int:
    """The most bytes of saved activations that are alive at once, with every block of a stack checkpointed."""
    # <exercise>
    # <stub>
    raise NotImplementedError("your turn")
    # <solution>
    return (n_layers - 1) * shape.checkpoint_bytes + formulas.block_saved_bytes(shape)
    # </exercise>


print(peak_checks.check_checkpointed_peak(checkpointed_peak, here))
stack = ms.BlockStack(here.n_layers, here.hidden, here.heads).to(here.device)
weights = sum(parameter.nbytes for parameter in stack.parameters())
strategies = ms.KeepAll(), ms.FullCheckpoint()
how = {"loss": "sum", "input_requires_grad": False, "new_gradients": True}
for strategy in strategies:
    plan = strategy.plan(here.n_layers)
    saved = formulas.stack_saved_bytes(plan, shape)
    peak = weights + formulas.stack_peak_bytes(plan, shape, **how)
    print(f"{strategy.label}: saved {saved:,} bytes, peak {peak:,} bytes ({human_bytes(peak)})")


# %%
def metered(model: nn.Module, x: Tensor, strategy: ms.Strategy, blocks: list | None = None) -> ms.Trace:
    """Memory of one forward and backward, starting without gradients."""
    model.zero_grad()
    with ms.apply(model, strategy, blocks=blocks), ms.MemoryMeter(model) as meter:
        model(x).sum().backward()
    return meter.trace


traces = {strategy.label: metered(stack, x, strategy) for strategy in strategies}
for label, trace in traces.items():
    print(f"{label}: saved {trace.saved_bytes:,} bytes, peak {trace.peak_bytes:,}, in {trace.peak_at}")
all_kept, full = traces.values()
ratios = all_kept.saved_bytes / full.saved_bytes, all_kept.peak_bytes / full.peak_bytes
print(f"Saved bytes fell to 1/{ratios[0]:.1f}, the peak to 1/{ratios[1]:.1f}.")
alive = full.frame()[["activation", "recomputed"]].sum(axis=1).max()
print(f"Under full checkpointing at most {alive:,} bytes of activations were alive, recomputed ones included.")
ms.plots.memory_timeline(traces, x="events")

# %% [markdown]
# On a CPU the difference to the prediction is 0 bytes. Keep-all climbs through forward. Under checkpointing forward
# leaves one input a block (blue spikes are *temporary*: a block at work), and backward draws teeth, with orange ticks:
# each block comes back to life, is used, and goes. The peak falls less: gradients stay.
#
# <details><summary>Hint</summary>
#
# Gradients left out, the highest tooth is the first: the last block is back, and no input has gone yet. Of how many blocks is the input
# held, and which of these inputs does the live block count as its own?
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# The live block saves its own input, so the checkpoints of the other *L* - 1 blocks come on top.
#
# </details>
#
# ## 3. What it costs
#
# *One more forward: how much longer is the step?* Backward takes twice the FLOPs of forward, so a step is three forwards.
# **Predict**: how many times the FLOPs of keep-all does a step take now?
#
# (On a CPU the counter sees no fused attention.)


# %% tags=["nbval-ignore-output"]
# Exercise: difficulty 1 of 3, 3 minutes. For: pricing a checkpoint before you pay for it.
# <exercise>
# <stub>
flops_ratio = None  # your number
# <solution>
flops_ratio = 1 + 2 / 9
# </exercise>


def step(x: Tensor = x) -> Tensor:
    loss = stack(x).sum()
    loss.backward()
    return loss.detach()


plain = ms.flops.count_flops(step)
with ms.apply(stack, ms.FullCheckpoint()):
    checkpointed = ms.flops.count_flops(step)
print(ledger.check(checkpointing.flops_ratio(here), flops_ratio, checkpointed / plain))
print(f"keep all {plain:,} FLOPs, full checkpoint {checkpointed:,}: {checkpointed / plain:.4f} times")
seconds = [ms.measure(step, stack, strategy, repeats=1).step_seconds for strategy in strategies]
print(f"In seconds, on this machine: {seconds[0]:.2f} and {seconds[1]:.2f}, {seconds[1] / seconds[0]:.2f} times.")

# %% [markdown]
# Less than 4/3. *Where did the rest go?* Ask what one block costs, and how much of it lies behind the last tensor that
# backward needs. *And if a dropout at the very end needs a tensor?*
#
# <details><summary>Hint</summary>
#
# Running a block again has one purpose: the tensors that it saves. After the last of them PyTorch stops. A block's matrix
# products take 6, 2, 8 and 8 times *h*² for queries, keys and values, the attention's projection, up and down.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# The down-projection, 8 of 24, is not run again: 16 of 72 come on top.
#
# </details>

# %%
costs = ms.flops.profile_blocks(stack, step)
plan = ms.FullCheckpoint().plan(here.n_layers)
print(f"one block forward: {costs[0].forward:,} FLOPs, behind its last saved tensor: {costs[0].tail:,}")
print(f"forecast {plain + plan.extra_flops(costs):,}, counted {checkpointed:,}")
with ms.apply(stack, ms.FullCheckpoint()), set_checkpoint_early_stop(False):
    print(f"recomputing to the very end: {ms.flops.count_flops(step) / plain:.4f} times")
dropping = ms.BlockStack(here.n_layers, here.hidden, here.heads, dropout=0.1).to(here.device)
short = x[:, : here.seq_len // 4]
flops = []
for strategy in strategies:
    with ms.apply(dropping, strategy):
        flops.append(ms.flops.count_flops(lambda: dropping(short).sum().backward()))
print(f"with dropout at the end of each block: {flops[1] / flops[0]:.4f} times")

# %% [markdown]
# The last tensor of a block that backward needs is the down-projection's input; nobody needs its output. PyTorch
# notices and stops there: **early stop**. The down-projection is a third of the counted matrix products, so
# recomputing costs 2/9 of a step and not 3/9. Ours by hand does not know this trick. And dropout keeps a mask, made
# last: nothing is left to skip.
#
# Seconds follow only roughly: a clock sees more than products.
#
# ## 4. Nothing may change
#
# The second run of a block must compute what the first one did. *Dropout throws dice. Which dice does the second run
# throw?* PyTorch puts the random state back before it recomputes. *Switch that care off: how many parameters' gradients change?
# Does any shape?*


# %%
def gradients_of(model: nn.Module, run: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    run(short).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def rerun(x: Tensor, care: bool) -> Tensor:
    for block in dropping.blocks:
        x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=care)
    return x


expected = gradients_of(dropping, dropping)
for care in (True, False):
    found = gradients_of(dropping, lambda x: rerun(x, care))
    shapes = all(a.shape == b.shape for a, b in zip(found, expected))
    wrong = sum(not torch.equal(a, b) for a, b in zip(found, expected))
    print(f"preserve_rng_state={care}: equal shapes {shapes}, {wrong} of {len(found)} gradients wrong")

# %% [markdown]
# Forward is untouched, every shape is right, training runs, and gradients are wrong: forward dropped some units, backward
# others. So in this course equal gradients come before saved bytes.
#
# ### Exercise: the same dice twice
#
# `HandCheckpoint` throws new dice in backward, too. Mend it from outside, with a wrapper for a block: its first call runs
# the block as always, every later one draws the same random numbers, and leaves the program's random state as it found
# it. Then `HandCheckpoint.apply(SameDice(block), x)` is right with dropout. Each step makes a new `SameDice`. (The check
# runs on the CPU.)


# %%
# Exercise: difficulty 2 of 3, 15 minutes. For: recomputing blocks with dropout.
class SameDice:
    """Calls a block; later calls draw the random numbers of the first, and leave the generator alone."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.start: Tensor | None = None  # the random state before the first call

    def __call__(self, x: Tensor) -> Tensor:
        # <exercise>
        # <stub>
        raise NotImplementedError("your turn")
        # <solution>
        if self.start is None:
            self.start = torch.get_rng_state()
            return self.block(x)
        with torch.random.fork_rng():  # puts the state back at its end
            torch.set_rng_state(self.start)
            return self.block(x)
        # </exercise>


print(recompute_checks.check_same_dice(SameDice, here))

# %% [markdown]
# <details><summary>Hint</summary>
#
# `torch.get_rng_state()` gives the state as a tensor, `torch.set_rng_state(state)` brings it back. Which state is there
# when backward begins, and who else will need it afterwards?
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# </details>
#
# *A second classic.* This loop checkpoints each block through a `lambda`. What is wrong with it?


# %%
def closing_over(x: Tensor) -> Tensor:
    for block in stack.blocks:
        x = checkpoint(lambda v: block(v), x, use_reentrant=False)
    return x


expected, found = gradients_of(stack, stack), gradients_of(stack, closing_over)
each = len(expected) // here.n_layers
right = []
for i in range(here.n_layers):
    mine = slice(i * each, (i + 1) * each)
    right += [i] * all(map(torch.equal, found[mine], expected[mine]))
print(f"blocks with right gradients: {right}, of {here.n_layers}")

# %% [markdown]
# A `lambda` looks its variables up when it runs. In backward the loop is over and `block` is the last one: that is
# recomputed every time. Shapes are equal: nothing complains. Pass the block itself: `checkpoint(block, x)`, or
# `ms.run(blocks, x, strategy)`.
#
# ## 5. When the peak does not move
#
# *A chain of plain `Linear` layers, each checkpointed: how much is saved? And the stack of blocks with a few tokens
# and the same weights: does the peak fall, and what is alive then?*

# %%
chain = nn.Sequential(*(nn.Linear(here.hidden, here.hidden) for _ in range(here.n_layers))).to(here.device)
for strategy in strategies:
    trace = metered(chain, x, strategy, blocks=list(chain))
    print(f"{strategy.label:<15} saved {trace.saved_bytes:,} bytes, peak {trace.peak_bytes:,} bytes")

few = torch.randn(1, here.hidden // 8, here.hidden, device=here.device)
brief = {strategy.label: metered(stack, few, strategy) for strategy in strategies}
fewer = [trace.saved_bytes for trace in brief.values()]
lower = [trace.peak_bytes for trace in brief.values()]
print(f"Saved bytes fall to 1/{fewer[0] / fewer[1]:.1f}, the peak by {1 - lower[1] / lower[0]:.1%}.")
for label, trace in brief.items():
    held = trace.at_peak["gradient"] / weights
    print(f"{label}: the peak is in {trace.peak_at}, with {held:.0%} of all gradients there.")
ms.plots.bytes_by_category({label: trace.at_peak for label, trace in brief.items()})

# %% [markdown]
# The chain gains nothing: a `Linear` keeps its input and no more, and that is the checkpoint. Only what lies *inside*
# a region can be given back.
#
# In the stack, gradients are alive: backward gives activations back and piles gradients up. With few tokens that pile
# is the higher one, and checkpointing cannot touch it. **The peak has moved**: look at its place too.
#
# *From how many tokens s·b on does checkpointing help?* **Predict**: a block's activations take 16·4·*sbh* bytes, its
# gradients 4·12*h*² (3, 1, 4 and 4 times *h*²). When are the two equal? The dotted line is the answer.


# %%
# Exercise: difficulty 2 of 3, 5 minutes. For: knowing when not to checkpoint.
# <exercise>
# <stub>
fewest_tokens = None  # your number, for your parameters
# <solution>
fewest_tokens = 12 * here.hidden / 16
# </exercise>


def predicted_peak(strategy: ms.Strategy, tokens: int) -> int:
    one = formulas.BlockShape(1, tokens, here.hidden, here.heads)
    return weights + formulas.stack_peak_bytes(strategy.plan(here.n_layers), one, **how)


h, more = here.hidden, torch.randn(1, 2 * here.hidden, here.hidden, device=here.device)
curves, measured, line = {}, {}, checkpointing.line_at(here)
for one in strategies:
    curves[one.label] = {n: predicted_peak(one, n) for n in range(h // 8, 2 * h + 1, h // 8)}
    points = h // 8, line, 2 * h
    measured[one.label] = {n: metered(stack, more[:, :n].clone(), one).peak_bytes for n in points}
measured_tokens = weights / (all_kept.saved_bytes / (here.batch_size * here.seq_len))
print(ledger.check(checkpointing.moving_tokens(here), fewest_tokens, measured_tokens))
ms.plots.bytes_against("tokens in a step (s·b)", curves, measured, mark=line, what="peak bytes")

# %% [markdown]
# The line is at *s·b* = 12/16·*h*. (The number found includes biases and crumbs.) Left of it gradients hold the peak,
# and the curves lie on each other. Right of it each token adds sixteen units a block to keep-all, but to full
# checkpointing one a block, and sixteen for the live one.
#
# <details><summary>Hint</summary>
#
# Both sides are bytes of one block; the 4 is in both. Solve for *s·b*, in numbers of your `hidden`.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# 16·*sbh* = 12*h*² gives *s·b* = 0.75*h*, whatever the number of blocks.
#
# </details>
#
# ### Your turn: the lab
#
# *Between which two steps of the `seq_len` slider does checkpointing begin to lower the peak, by more than a few KiB?
# Does `n_layers` move that place?* Then switch strategies on either side, and *Run* both: earlier runs stay, in grey.
# (The lab's FLOPs count fused attention, too.)

# %%
lab = labs.checkpointing_lab(here.n_layers, here.hidden, here.heads, here.batch_size, here.seq_len, here.device)
lab.still()

# %%
lab

# %% [markdown]
# It is where *s* passes 0.75*h*/*b* (by default between 64 and 128), with any `n_layers` above 1: each block brings
# activations and gradients. Below, the teeth stand on a staircase of gradients.
#
# ## 6. A real model: Hugging Face's GPT-2
#
# Hugging Face has its own switch. *Does ours keep the same bytes, and do both train the same model?* Random weights, the
# text of notebook 00, a few steps of AdamW; one more step is measured.

# %%
text = texts.load_text().content
batches = texts.batches(text, here.seq_len, here.batch_size, vocab_size=1024, steps=here.steps + 1)
batches = [batch.to(here.device) for batch in batches]
sizes = {"n_layer": here.n_layers, "n_embd": here.hidden, "n_head": here.heads, "n_positions": here.seq_len}


def train(model: nn.Module) -> tuple[ms.Trace, list[Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches[:-1]:
        model(batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with ms.MemoryMeter(model, optimizer) as meter:
        model(batches[-1], labels=batches[-1], use_cache=False).loss.backward()
    return meter.trace, [parameter.grad for parameter in model.parameters()]


# %%
model = ms.gpt2("mini", **sizes).to(here.device)
twins = [copy.deepcopy(model) for _ in range(2)]
results = {"keep all": train(model)}
ms.models.hugging_face_checkpointing(twins[0])
results["Hugging Face's switch"] = train(twins[0])
with ms.apply(twins[1], ms.FullCheckpoint()) as applied:
    results["ours"] = train(twins[1])
for name, (trace, grads) in results.items():
    equal = all(map(torch.equal, grads, results["keep all"][1]))
    print(f"{name}: saved {trace.saved_bytes:,} bytes, equal gradients: {equal}")
    print(f"    peak {trace.peak_bytes:,} bytes, in {trace.peak_at}")
print(f"Ours ran {applied.report.block_recomputes} blocks again, in {here.steps + 1} steps of {here.n_layers} blocks.")

# %% [markdown]
# Equal bytes, equal gradients. Beside the blocks' inputs they hold the loss with its log-probabilities: checkpointing
# blocks does not touch it.
#
# *Why `use_cache=False`?* The cache of keys and values is for generating text. *A recomputed block writes to it a second
# time: how long is it then?*

# %%
from transformers import DynamicCache

cache = DynamicCache(config=model.config)
inputs = torch.randn_like(x).requires_grad_()
output = checkpoint(lambda v: model.transformer.h[0](v, cache), inputs, use_reentrant=False)
print(f"after forward the cache holds {cache.get_seq_length()} positions")
output.sum().backward()
print(f"after backward it holds {cache.get_seq_length()}")
with ms.apply(model, ms.FullCheckpoint()):
    try:
        model(batches[0], DynamicCache(config=model.config))
    except ValueError as error:
        print(f"ours refuses: {error}")

# %% [markdown]
# Twice as long, and no error. `ms.apply` switches the cache off while it lasts, and refuses one that you hand in.
#
# ## Your predictions

# %%
print(ledger)
ledger.plot()

# %% [markdown]
# ## What you should have noticed
#
# - A checkpointed block saves its input; backward brings one block at a time back to life.
# - The price is 2/9 of a step's counted FLOPs, not 1/3, unless something behind the last product needs a tensor.
# - Equal shapes prove nothing. Compare loss, gradients and random state with keep-all, then count bytes.
# - With few tokens gradients hold the peak, and it stays.
#
# ## Next
#
# [03 Selective recomputation](03_selective_recomputation.ipynb): must it be all blocks, or whole blocks? Some tensors
# are nearly free to make again.
