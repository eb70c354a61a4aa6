# %% [markdown]
# # 00 Start here
#
# <!-- colab -->
#
# A training step holds far more memory than the model. This course finds out what that memory is, and how to trade it
# for time. You predict a number, measure it, and read why the two differ.
#
# **After these 15 minutes, and 9 of exercises, you can**
#
# - say whether your machine is good enough for the course;
# - measure the peak memory of a training step, to the byte, and say where in the step it is;
# - do an exercise and read what its check tells you.
#
# You need some Python, and to have seen a training loop in PyTorch. You need no GPU, no account and no download.
#
# ## Before you begin
#
# Run the cells from top to bottom with Shift+Enter. The first one finds the library of the course, and says what it
# found.
#
# <details><summary>On Colab</summary>
#
# Choose *Runtime > Change runtime type > T4 GPU* before you run anything.
#
# The first cell of every notebook finds the library where it is: installed, in a folder above the notebook, in a zip
# of the course that you uploaded (the folder icon on the left), or at the address from which the course is published,
# which it then clones. It installs nothing: what the course needs is on Colab already.
#
# The library has a self-test for GPUs: streams, page-locked memory, random numbers, CUDA's formulas. It has not been run
# on a GPU yet; you may be the first. Once the cells down to `print(here)` have run, it takes another one:
#
# ```python
# from pathlib import Path
#
# course = Path(ms.__file__).parents[1]
# !pip install -q pytest hypothesis
# !cd "{course}" && python -m pytest -q -m gpu tests
# ```
#
# </details>

# %% tags=["nbval-ignore-output"]
# <setup>

# %% [markdown]
# Every notebook has a cell of parameters like the next one. Change a number there, run all cells, and everything
# below follows. `checkpoint_every` waits for notebook 03 (and 03 makes no use of `steps`); `device="auto"` takes a GPU where there is one.

# %% tags=["parameters"]
seq_len = 512
checkpoint_every = 2
n_layers = 6
hidden = 256
batch_size = 2
steps = 3
device = "auto"

# %%
import time

import torch

import memsave_lib as ms
from memsave_lib.course import checks, texts
from memsave_lib.course.env import check_environment, setup
from memsave_lib.course.predictions import Ledger
from memsave_lib.course.questions import start
from memsave_lib.units import human_bytes

here = setup(seq_len, checkpoint_every, n_layers, hidden, batch_size, steps, device)
ledger = Ledger()
print(here)

# %% [markdown]
# ## 1. Does your machine do?
#
# *How many lines below begin with WARN? How much memory is free?*

# %% tags=["nbval-ignore-output"]
print(check_environment())

# %% [markdown]
# OK means: nothing to do. Under a WARN an arrow says what would help; the course runs on as far as it can.
#
# Look at `device`. On a CPU the course counts the bytes of every tensor just as on a GPU; only the steps take longer.
# On a GPU the same cells use it. *Host memory* is the RAM of the computer. Without a GPU it holds your tensors too.

# %% [markdown]
# ## 2. One step of training
#
# *How much memory does it take to train a model once, on one batch?*
#
# First the batch. Real English, cut into tokens; the tokens are learned from the text itself.

# %%
text = texts.load_text()
batches = texts.batches(text.content, here.seq_len, here.batch_size, vocab_size=1024, steps=here.steps)
batches = [batch.to(here.device) for batch in batches]
print(text.origin)
print(f"Batches: {len(batches)}, each of {here.batch_size} sequences of {here.seq_len} tokens.")

# %% [markdown]
# Then the model: GPT-2 as Hugging Face has it, but small, and with random weights. It knows nothing yet, which does
# not matter here: memory depends on shapes, not on values.

# %%
model = ms.gpt2(
    "mini",
    n_layer=here.n_layers,
    n_embd=here.hidden,
    n_head=here.heads,
    n_positions=here.seq_len,
    use_cache=False,  # the cache is for generating text
).to(here.device)
weights = model.get_memory_footprint(return_buffers=False)
print(f"{model.num_parameters():,} parameters take {human_bytes(weights)}. Their values are random.")

# %% [markdown]
# <details><summary>The published GPT-2 instead</summary>
#
# Where the Hugging Face hub can be reached, this downloads the weights of the 124M model. It needs its own tokens.
# Run it in place of the two cells above; everything below works as it is, but takes longer.
#
# ```python
# from transformers import AutoTokenizer
#
# model = ms.gpt2("small", pretrained=True, n_positions=max(1024, here.seq_len), use_cache=False).to(here.device)
# tokens = AutoTokenizer.from_pretrained("gpt2")(text.content, return_tensors="pt").input_ids[0]
# needed = here.steps * here.batch_size * here.seq_len
# batches = list(tokens[:needed].view(here.steps, here.batch_size, here.seq_len).to(here.device))
# weights = model.get_memory_footprint(return_buffers=False)
# ```
#
# </details>

# %% [markdown]
# **Measure.** `MemoryMeter` watches whatever runs inside its `with`: it notes each tensor that appears or vanishes,
# in bytes. Of what was there before it counts the tensors of model and optimizer. This is a plain training loop; the
# meter changes nothing in it.

# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses, traces = [], []
for batch in batches:
    with ms.MemoryMeter(model, optimizer) as meter:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
    losses.append(loss.item())
    traces.append(meter.trace)

# %% tags=["nbval-ignore-output"]
print("loss of each step:", ", ".join(f"{value:.2f}" for value in losses))

# %% [markdown]
# The model has begun to learn, if you gave it a few steps. *Peak* is the largest number of bytes that were alive at one
# moment.
#
# **Predict** that of the first step, which runs the model forward, computes gradients backward, and lets the optimizer
# AdamW change the weights. At its fullest moment, how many times the bytes of the parameters are alive? (20 % off is
# near enough.) Put your number in place of `None`, then run the cell: it compares, and says what is missing. The `ledger` remembers your first
# prediction of each number, and the newest. A wrong one teaches more than none. (Where **Predict** is bold, the next cell
# has a place for your number. Questions in italics are for you and a sheet of paper.)

# %%
# Exercise: difficulty 1 of 3, 2 minutes. For: knowing how much more a step takes than the model.
# <exercise>
# <stub>
peak_times = None  # your number: times the bytes of the parameters
# <solution>
size = model.config
activations = 4 * batches[0].numel() * (28 * size.n_layer * size.n_embd + 3 * size.vocab_size)
update = 3 * weights + 2 * 4 * size.vocab_size * size.n_embd
peak_times = 1 + max(activations, update) / weights
# </exercise>
first = traces[0]
times = first.peak_bytes / weights
print(ledger.check(start.first_peak(times), peak_times, times))
print(f"Parameters: {human_bytes(weights)}. Peak of the first step: {human_bytes(first.peak_bytes)}.")
print(f"The peak was in {first.peak_at}.")

# %% [markdown]
# A place is a phase of the step, a module if one is at work, and an operation. `log_softmax` in its name means the
# loss, where forward turns into backward.
#
# <details><summary>Hint</summary>
#
# Nobody can know it yet; 20 % off is good enough. What has the size of the parameters? What else does a step need, and
# does that grow with the batch?
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# From the back of an envelope that you can fill yourself after notebook 01. For each token and block, GPT-2 keeps 28
# numbers for each of its `n_embd`; at the loss three more for each token of the vocabulary are alive. Or, with a
# short text, the optimizer's step is the fullest moment: gradients and two averages, and two temporary tensors as large
# as the largest parameter.
#
# </details>
#
# **Predict** again: the step is over, and the next one has not begun. How many times the parameters is alive now?

# %%
# Exercise: difficulty 1 of 3, 2 minutes. For: telling what stays from what comes and goes.
# <exercise>
# <stub>
stays_times = None  # your number: times the bytes of the parameters
# <solution>
stays_times = 4
# </exercise>
between = sum(first.at_end.values()) / weights
print(ledger.check(start.after_the_step(times), stays_times, between))
print(f"After the step {human_bytes(sum(first.at_end.values()))} stay alive.")

# %% [markdown]
# <details><summary>Hint</summary>
#
# Which tensors does the next step need? And what goes only when `zero_grad()` is called?
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# Parameters, a gradient for each, and the two averages of each gradient that AdamW keeps. The crumbs on top are the
# batch, which you hold yourself, and AdamW's counters of steps.
#
# </details>
#
# *What is the rest of the peak?* The meter sorts every byte into a category. Here are three moments of the first step.

# %%
moments = first.frame()
fullest = moments.loc[moments["activation"].idxmax()]
most_activations = {category: int(fullest[category]) for category in first.at_peak}
saved = most_activations["activation"]
print(f"Activations reach {saved / weights:.1f} times the parameters, {saved / first.peak_bytes:.0%} of the peak.")
ms.plots.bytes_by_category(
    {"most activations": most_activations, "the peak": first.at_peak, "after the step": first.at_end}
)

# %% [markdown]
# The lowest bar is what stays: parameters and optimizer for good, gradients until the next `zero_grad()`. *temporary* is
# what operations hand to each other.
#
# The orange part of the top bar is **activations**: what forward computed and keeps, because backward will need it.
# They come and go within each step, and they grow with the batch and the length of the text; parameters do not. Are
# they less than half of the peak here? Then your batch is small: multiply `seq_len` by 8 and look again. With long
# texts they are nearly all there is. They are what this course is about.

# %% [markdown]
# ## 3. How the course works
#
# Each section asks a question, lets you predict, measures, explains. A cell that begins with *Exercise* is yours to
# change: a number in place of `None`, or a function in place of the line that raises an error. If you leave it, the
# notebook runs on. Hint and solution are folded below it; the ledger stands at the end.
#
# These words always mean the same here; other tools have other names for them.
#
# | here | meaning | elsewhere |
# |---|---|---|
# | saved activation | a tensor that autograd holds between forward and backward | stash, residual |
# | saved bytes | all saved activations at the end of forward, each storage once | activation memory |
# | peak bytes | the largest number of live bytes in the step | `max_memory_allocated` |
# | block | one transformer layer | layer, decoder layer |
# | keep, recompute, offload | what can happen to the saved activations of a block | store, checkpoint, swap |
# | checkpoint | a tensor kept so that what follows can be recomputed | also: a file with weights |
# | chunk | neighboring blocks recomputed as one | segment |

# %% [markdown]
# ### Exercise: the bytes of the parameters
#
# You have seen the bytes of this model's parameters. Write the function that counts them for any model, and run the
# cell: it checks your function.


# %%
# Exercise: difficulty 1 of 3, 5 minutes. For: counting bytes without a meter.
def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes that the parameters of a model take, each parameter counted once."""
    # <exercise>
    # <stub>
    raise NotImplementedError("your turn")
    # <solution>
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    # </exercise>


print(checks.check_parameter_bytes(parameter_bytes, model))

# %% [markdown]
# A check tries your function on several cases. When something is wrong it says what, not only that. Try it: return
# `0`, or forget half-precision numbers on purpose, and read what it answers. Nothing breaks, and nobody counts.
#
# <details><summary>Hint</summary>
#
# `model.parameters()` gives each parameter once, also when two layers share it. A tensor knows its number of
# elements, `numel()`, and the bytes of one element, `element_size()`.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# </details>

# %% [markdown]
# ### How long things take
#
# *How many seconds for one step on your machine, and does the meter make it longer?*


# %% tags=["nbval-ignore-output"]
def seconds_of_a_step() -> float:
    begin = time.perf_counter()
    model(input_ids=batches[0], labels=batches[0]).loss.backward()
    float(model.lm_head.weight.grad[0, 0])  # a GPU answers only when it is done
    return time.perf_counter() - begin


plain = min(seconds_of_a_step() for _ in range(3))
with ms.MemoryMeter(model):
    metered = min(seconds_of_a_step() for _ in range(3))
print(f"Forward and backward take {plain:.2f} s here, {metered:.2f} s under the meter.")

# %% [markdown]
# A notebook runs a few dozen such steps: about half a minute on two idle CPU cores. Reading and thinking take you 15 to
# 30 minutes, exercises as long again. If a step takes many seconds here, set a smaller `seq_len` and run all cells
# again.
#
# ## Your predictions

# %%
print(ledger)
ledger.plot()

# %% [markdown]
# ## What you should have noticed
#
# - The peak of a step is several times the parameters, and what stays between steps does not explain it all.
# - A peak without its place says little. The meter always names the phase, the module and the operation.
# - Counting bytes needs no GPU. A tensor has the same size everywhere.
#
# ## Next
#
# [01 Activations](01_activations.ipynb): which tensors backward needs, and why; the bytes of a block, counted on
# paper and measured, with a difference of 0.
