# %% [markdown]
# # 01 Activations
#
# <!-- colab -->
#
# Notebook 00 ended with a bar full of activations. Now you take it apart: which tensors, why these, how many bytes.
#
# **After these 30 minutes, and 29 of exercises, you can**
#
# - say what autograd keeps for an operation, and why;
# - count the saved bytes of a transformer block on paper, to the byte;
# - read a memory timeline and say where its peak is;
# - name five ways to measure memory that give a wrong number.

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
from collections.abc import Callable

import torch
from torch import nn

import memsave_lib as ms
from memsave_lib import labs
from memsave_lib.course import checks, measure_checks, texts
from memsave_lib.course.counters import count_otherwise
from memsave_lib.course.env import setup
from memsave_lib.course.predictions import Ledger
from memsave_lib.course.questions import activations as questions
from memsave_lib.course.saved import saved_for_backward, saved_table
from memsave_lib.units import human_bytes

here = setup(seq_len, checkpoint_every, n_layers, hidden, batch_size, steps, device)
ledger = Ledger()
print(here)

# %% [markdown]
# ## 1. What backward needs
#
# Forward computes `y = x @ W`. Backward gets the gradient of `y` and returns those of `x` and `W`. *Which of the three
# tensors must survive until then?* And if `W` is frozen, so that it needs no gradient?

# %%
x = torch.randn(here.batch_size, here.seq_len, here.hidden, device=here.device, requires_grad=True)
W = nn.Parameter(torch.randn(here.hidden, here.hidden, device=here.device))
print("W learns:", saved_for_backward(lambda x, W: x @ W, x=x, W=W), sep="\n")
W.requires_grad_(False)
print("W is frozen:", saved_for_backward(lambda x, W: x @ W, x=x, W=W), sep="\n")

# %% [markdown]
# The gradient of `W` is `x.T @ dy`, that of `x` is `dy @ W.T`. Each needs the *other* one; nobody needs `y`. Freeze `W`,
# and `x` is dropped. Autograd keeps what a derivative mentions, nothing else.
#
# `saved_for_backward` listens with a *saved-tensor hook*, which gets every tensor that an operation keeps. Now the
# operations of a transformer block, in units of one hidden state (the size of `x`). *One of the eight keeps nothing.
# Which?*

# %%
y = torch.randn_like(x, requires_grad=True)
split = (here.batch_size, here.heads, here.seq_len, here.hidden // here.heads)
q, k, v = (torch.randn(split, device=here.device, requires_grad=True) for _ in range(3))
survey = {
    "matmul": saved_for_backward(lambda x, W: x @ W, x=x, W=nn.Parameter(W.detach())),
    "GELU": saved_for_backward(nn.functional.gelu, input=x),
    "LayerNorm": saved_for_backward(nn.LayerNorm(here.hidden, device=here.device), input=x),
    "softmax": saved_for_backward(lambda x: x.softmax(-1), x=x),
    "log_softmax": saved_for_backward(lambda x: x.log_softmax(-1), x=x),
    "dropout": saved_for_backward(lambda x: nn.functional.dropout(x, 0.1), x=x),
    "attention": saved_for_backward(nn.functional.scaled_dot_product_attention, query=q, key=k, value=v),
    "add": saved_for_backward(lambda x, y: x + y, x=x, y=y),
}
print(saved_table(survey, unit_bytes=x.nbytes), f"One unit: {human_bytes(x.nbytes)}", sep="\n")

# %% [markdown]
# - *add* keeps nothing: the gradient passes through it unchanged. Residual connections are free.
# - *GELU* keeps its input. *Softmax* and *log_softmax* keep their outputs: their derivatives are written with these.
# - *LayerNorm* keeps its input and two numbers for each position: mean and 1 / deviation.
# - *dropout* keeps which elements it dropped, a CPU as floats, a GPU as one byte each.
# - *attention*, PyTorch's fused kernel, keeps queries, keys, values and its output, but no scores: one number a row,
#   the log-sum-exp, is enough to compute them again.

# %% [markdown]
# ## 2. One block
#
# A block chains these operations: LayerNorm, a projection to Q, K and V, attention, a projection, add; LayerNorm, a
# projection to four times the width, GELU, a projection back, add. Some tensors have two users: the output of
# attention is also the input of the projection behind it. One storage, counted once.
#
# **Predict**: how many hidden states does one block save, statistics left out?


# %%
# Exercise: difficulty 2 of 3, 4 minutes. For: telling what a block keeps, and what it does not.
# <exercise>
# <stub>
hidden_states = None  # your number
# <solution>
hidden_states = 2 * (1 + 1) + 3 + 1 + 4 + 4
# </exercise>
block = ms.TransformerBlock(here.hidden, here.heads).to(here.device)
measured = saved_for_backward(block, x=x).nbytes
print(ledger.check(questions.block_saves(), hidden_states, measured / x.nbytes))


def shape_at(length: int, **options: object) -> ms.formulas.BlockShape:
    return ms.formulas.BlockShape(here.batch_size, length, here.hidden, here.heads, device=here.device.type, **options)


shape = shape_at(here.seq_len)
predicted = ms.formulas.block_saved_bytes(shape)
print(f"Formula {predicted:,} bytes, hooks {measured:,} bytes, difference {measured - predicted}.")
ms.plots.block_terms(ms.formulas.block_terms(shape), unit_bytes=shape.checkpoint_bytes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Walk through the block with section 1's table. LayerNorms, projections and GELU keep their inputs. Which of these are
# four hidden states wide? What does attention keep?
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# Both LayerNorms and the projections behind them: one each. Queries, keys, values: 3. The output of attention: 1. The
# inputs of GELU and of the last projection: 4 each. That is 16.
#
# </details>
#
# With `s` positions, `b` sequences, `h` for hidden, `a` heads and 4 bytes an element the tensors take `64sbh`. What is
# left are crumbs: `16sb` for the statistics of two LayerNorms, and `4asb` for the log-sum-exp. Bytes have no noise: a
# difference is a missing tensor. (Proven on CPUs; a GPU's kernels may keep a few bytes more.)
#
# ## 3. Twice the sequence
#
# *What happens to these bytes when `seq_len` doubles?* Three blocks: fused attention; the same attention written out
# (`"math"`), which keeps its matrix of scores; and fused attention with a little dropout. *Which of them more than
# double?* (Large open markers: measured.)

# %%
blocks = {"fused": {}, "math": {"attention": "math"}, "fused, dropout 0.1": {"dropout": 0.1}}
found, curves = {name: {} for name in blocks}, {}
for name, options in blocks.items():
    block = ms.TransformerBlock(here.hidden, here.heads, **options).to(here.device)
    for length in (here.seq_len, 2 * here.seq_len):
        x = torch.randn(here.batch_size, length, here.hidden, device=here.device, requires_grad=True)
        found[name][length] = saved_for_backward(block, x=x).nbytes
    once, twice = found[name].values()
    quadratic = (twice - 2 * once) / (2 * here.heads * here.seq_len**2 * here.batch_size)
    print(f"{name:<20}{human_bytes(once)} -> {human_bytes(twice)}, x {twice / once:.2f}, {quadratic:.0f} as²b")
    lengths = range(here.seq_len, 4 * here.seq_len + 1, here.seq_len)
    curves[name] = {length: ms.formulas.block_saved_bytes(shape_at(length, **options)) for length in lengths}
ms.plots.bytes_against("seq_len", curves, found)

# %% [markdown]
# What grows beyond twice is quadratic; the last number is its bytes for each score. Fused: none. Written out: 4, one
# float, the scores after softmax.
#
# The third line is the surprise. On a CPU, PyTorch's fused kernel cannot do dropout. It silently falls back to the
# written-out version, and keeps three matrices: weights, mask, and their product. Hugging Face's GPT-2 has dropout
# 0.1 by default. (Fused kernels on a GPU draw their own mask: 0.) In this course dropout is 0 unless a section is about
# it.
#
# ## 4. The whole step
#
# Now the small GPT-2 of notebook 00, for several steps. (Its blocks save 28 hidden states, not 16: Hugging Face writes
# GELU out in single operations.) *Where is the peak: in forward, backward, or the optimizer?* And
# what does the second step hold that the first did not?

# %%
text = texts.load_text().content
batches = texts.batches(text, here.seq_len, here.batch_size, vocab_size=1024, steps=here.steps + 1)
batches = [batch.to(here.device) for batch in batches]


def small_gpt(vocab_size: int) -> nn.Module:
    size = dict(n_layer=here.n_layers, n_embd=here.hidden, n_head=here.heads, n_positions=here.seq_len)
    return ms.gpt2("mini", vocab_size=vocab_size, use_cache=False, **size).to(here.device)


model = small_gpt(vocab_size=1024)
optimizer = torch.optim.AdamW(model.parameters())


# %%
def training_step(batch: torch.Tensor, clear: bool = True) -> ms.Trace:
    with ms.MemoryMeter(model, optimizer) as meter:
        if clear:
            optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return meter.trace


first, *later = [training_step(batch) for batch in batches]
weights = first.at_peak["parameter"]
more = (later[0].start_bytes - first.start_bytes) / weights
print(f"The second step starts with {more:.1f} times the parameters more than the first.")
ms.plots.memory_timeline({"first step": first, "second step": later[0]}, x="events")

# %% [markdown]
# **Forward climbs**: block after block lays its saved activations on the pile. **Backward descends**: each block, the
# last first, consumes what it saved and leaves gradients. In its first `step()` the **optimizer** creates two averages
# of each gradient; every later step stands on them. (The third: gradients of the first step, not yet cleared.)
#
# Activations are highest where forward turns into backward. With enough tokens the peak is there too, in the loss
# (*log_softmax*). With few, gradients and optimizer weigh more, and the peak moves towards the end of the step.
#
# ### Your turn: the lab
#
# *Your blocks alone, without loss and optimizer. From which `seq_len` on does attention, written out (`math`), save more than
# all the rest together?* Work it out with section 3's 4*as*²*b* and 64*sbh*; a head is 64 wide here. The lab draws
# the memory of the whole step at once, dashed, and beside it a curve over `seq_len`. *Run* fills the outline with a
# real step; earlier runs stay, in grey. (Blocks are counted from 0.)

# %%
lab = labs.activations_lab(here.n_layers, here.hidden, here.heads, here.batch_size, here.seq_len, here.device)
lab.still()

# %%
lab

# %% [markdown]
# At *s* = 16*h*/*a* = 1,024 scores weigh as much as all the rest, at any width: twice the bytes of fused attention.
#
# ### The other end of the model
#
# This model knows 1,024 tokens; the published GPT-2 knows 50,257. For each position it gives one number per token of
# the vocabulary: the logits. They go through `log_softmax` into the loss. In the second of two runs the variable
# `out`, which holds the logits, stays alive during backward. **Predict** for that run: when `log_softmax` runs backward,
# how many tensors as large as the logits are alive?

# %%
VOCABULARY = 50_257
large = small_gpt(VOCABULARY)
logits = 4 * here.batch_size * here.seq_len * VOCABULARY
at_loss = {}
for name in (f"{VOCABULARY:,}, out deleted", f"{VOCABULARY:,}, out alive"):
    large.zero_grad()
    with ms.MemoryMeter(large) as meter:
        out = large(input_ids=batches[0], labels=batches[0])
        loss = out.loss
        if name.endswith("deleted"):
            del out
        loss.backward()
    at_loss[name] = meter.trace
del large, out, loss

# %%
# Exercise: difficulty 2 of 3, 3 minutes. For: finding a peak that no block makes.
# <exercise>
# <stub>
tensors = None  # your number
# <solution>
tensors = 4
# </exercise>
deleted, alive = at_loss.values()
others = alive.saved_bytes - logits
moments = alive.frame().query("op == '_log_softmax_backward_data'")
meet = round((moments["total"].max() - alive.at_peak["parameter"] - others) / logits, 2)  # what else is alive
print(ledger.check(questions.logits_at_the_loss(), tensors, meet))
print(f"Logits, 4bsV: {human_bytes(logits)}. All else that forward saved, every block: {human_bytes(others)}.")
print(f"{meet:.0f} times the logits / all else: {meet * logits / others:.1f}. Peak in {alive.peak_at}.")
print(f"With out deleted it is lower by {(alive.peak_bytes - deleted.peak_bytes) / logits:.2f} times the logits.")
ms.plots.bytes_by_category({"1,024 tokens": first.at_peak} | {name: trace.at_peak for name, trace in at_loss.items()})

# %% [markdown]
# <details><summary>Hint</summary>
#
# Forward turns logits into log-probabilities. Who keeps either of them? Backward goes the same way back.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# The logits, which `out` holds; their log-probabilities, which `log_softmax` has saved; the gradient of these, which
# comes in; and the gradient of the logits, which goes out to the head's product.
#
# </details>
#
# With a ratio above 1 the loss outweighs all blocks together. One `del out` gives one of the four back. Strategies
# for *blocks* cannot help there: ask first where the peak is.
#
# ## 5. Measuring honestly
#
# *What is the peak of a training step?* The truth is that of a step in the middle of training, which starts without
# gradients. Two that people report instead: too low or too high?

# %%
truth = later[-1]
left_over = training_step(batches[0], clear=False)
for name, trace in {"the truth": truth, "first step": first, "stale gradients": left_over}.items():
    apart = trace.peak_bytes - truth.peak_bytes
    print(f"{name:<16}{human_bytes(trace.peak_bytes):>10}{apart:>+14,} bytes, {apart / weights:+.2f} x parameters")

# %% [markdown]
# The *first step* has no optimizer state yet: warm up before you measure. *Stale gradients*, from a step that nobody
# cleared, lie under everything: call `zero_grad()` first.
#
# The third is a loop that only watches the loss, without `backward()`, and says `total += loss` where
# `total += loss.item()` was meant. *How much memory do two batches cost then?*


# %%
def watch(read: Callable[[torch.Tensor], object]) -> ms.Trace:
    optimizer.zero_grad()
    with ms.MemoryMeter(model) as meter:
        total = 0.0
        for batch in batches[:2]:
            total += read(model(input_ids=batch, labels=batch).loss)
    return meter.trace


for name, read in {"loss.item()": torch.Tensor.item, "loss": lambda loss: loss}.items():
    trace = watch(read)
    left = trace.at_end["activation"] / truth.saved_bytes
    print(f"total += {name:<13}peak {human_bytes(trace.peak_bytes):>10}; left behind: {left:.2f} times the saved bytes")

# %% [markdown]
# A live loss keeps its graph, and the graph every saved activation. Each batch adds its own.
#
# Last, the counters at hand: the resident memory of the process (RSS), and Python's `tracemalloc`. *Do they see a
# forward pass?* The same one, twice:

# %% tags=["nbval-ignore-output"]
with ms.MemoryMeter(model) as meter:
    out = model(input_ids=batches[0], labels=batches[0])
print(f"tensors: {human_bytes(sum(meter.trace.at_end.values()) - meter.trace.start_bytes)}")
del out
for _ in range(2):
    found = count_otherwise(lambda: model(input_ids=batches[0], labels=batches[0]))
    print(f"RSS: {human_bytes(found.resident_growth)}, tracemalloc: {human_bytes(found.python_peak)}")

# %% [markdown]
# `tracemalloc` counts Python's objects, not tensors. RSS counts the process's pages: freed memory may stay there and
# serve the next pass, so the same pass can show another growth each time. On a GPU neither sees the device. Hence the
# meter.
#
# ## Exercise: a stack on paper
#
# How many bytes do `n_layers` blocks save together? float32, fused attention, no dropout, feed-forward four times as
# wide.


# %%
# Exercise: difficulty 2 of 3, 10 minutes. For: counting on paper what no machine of yours could hold.
def saved_bytes(batch: int, seq_len: int, hidden: int, heads: int, n_layers: int) -> int:
    """Bytes that autograd holds at the end of the forward pass of a stack of blocks."""
    # <exercise>
    # <stub>
    raise NotImplementedError("your turn")
    # <solution>
    hidden_states = 16 * 4 * seq_len * batch * hidden
    statistics = 2 * 2 * 4 * seq_len * batch
    log_sum_exp = 4 * heads * seq_len * batch
    return n_layers * (hidden_states + statistics + log_sum_exp)
    # </exercise>


print(checks.check_saved_bytes(saved_bytes, here))

# %% [markdown]
# <details><summary>Hint</summary>
#
# Section 2 gives three terms for one block. The output of the last block is not saved: nothing behind it needs it.
# The input of each block is the output of the one before it: counting it with the block that reads it counts it once.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# </details>
#
# ## Exercise: find the bugs
#
# This function should find the peak of a step on `batches[0]`, in the middle of training. Before the step it looks at
# all losses. Three mistakes of section 5 are in it. `model` comes with gradients that nobody cleared, `optimizer` has
# never stepped.


# %%
# Exercise: difficulty 3 of 3, 12 minutes. For: measuring your own training.
def honest_peak(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> int:
    """Peak bytes of a step in the middle of training, which starts without gradients."""
    # <exercise>
    # <stub>
    raise NotImplementedError("find the bugs, then delete this line")
    with ms.MemoryMeter(model, optimizer) as meter:
        total = 0.0
        for batch in batches:
            total += model(input_ids=batch, labels=batch).loss
        assert total < float("inf"), "the model has diverged"
        model(input_ids=batches[0], labels=batches[0]).loss.backward()
        optimizer.step()
    return meter.trace.peak_bytes
    # <solution>
    model(input_ids=batches[0], labels=batches[0]).loss.backward()  # warm up: now the optimizer has its averages
    optimizer.step()
    model.zero_grad()  # or the optimizer's: nothing old may lie under the measured step
    with ms.MemoryMeter(model, optimizer) as meter:
        total = 0.0
        for batch in batches:
            total += model(input_ids=batch, labels=batch).loss.item()
        assert total < float("inf"), "the model has diverged"
        model(input_ids=batches[0], labels=batches[0]).loss.backward()
        optimizer.step()
    return meter.trace.peak_bytes
    # </exercise>


print(measure_checks.check_honest_peak(honest_peak))

# %% [markdown]
# <details><summary>Hint</summary>
#
# Ask of everything that is alive when the step begins: should it be there, and is all there that should be? Mend one,
# run the cell, and read what is left.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
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
# - Autograd keeps what a derivative's formula mentions.
# - A block saves 16 hidden states and crumbs; PyTorch agrees to the byte.
# - Linear in `seq_len` with fused attention. Dropout can take that away without a word.
# - A peak needs a place: blocks, loss, or optimizer. Only one of them is the bottleneck.
#
# ## Next
#
# [02 Full checkpointing](02_full_checkpointing.ipynb): keep one of the sixteen, and compute the rest again.
