# %% [markdown]
# # 00 Start here
#
# A training step holds far more memory than the model. This course finds out what that memory is, and how to trade it
# for time. You predict a number, measure it, and read why the two differ.
#
# **After these 15 minutes you can**
#
# - say whether your machine is good enough for the course;
# - measure the peak memory of a training step, to the byte, and say where in the step it is;
# - do an exercise and read what its check tells you.
#
# You need some Python, and to have seen a training loop in PyTorch. You need no GPU, no account and no download.

# %% [markdown]
# ## Before you begin
#
# Run the cells from top to bottom with Shift+Enter. The first one loads PyTorch and the library of the course.
#
# <details><summary>On Colab: three lines before everything else</summary>
#
# Choose *Runtime > Change runtime type > T4 GPU*. Then run this in a new cell at the top, with the address from which
# you got the course. Everything else is there already.
#
# ```python
# !git clone ADDRESS course
# %cd course/notebooks
# import sys; sys.path.insert(0, "..")
# ```
#
# The library has a self-test for GPUs: streams, page-locked memory, random numbers, CUDA's formulas. It has not been run
# on a GPU yet; you may be the first. It takes another cell:
#
# ```python
# !pip install -q pytest hypothesis
# !cd .. && python -m pytest -q -m gpu tests
# ```
#
# </details>

# %%
import time

import torch

import memsave_lib as ms
from memsave_lib.course import checks, texts
from memsave_lib.course.env import check_environment, setup
from memsave_lib.units import human_bytes

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
here = setup(
    seq_len=seq_len,
    checkpoint_every=checkpoint_every,
    n_layers=n_layers,
    hidden=hidden,
    batch_size=batch_size,
    steps=steps,
    device=device,
)
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
# **Predict.** One step runs the model forward, computes gradients backward, and lets the optimizer AdamW change the
# weights. At its fullest moment, how many times the bytes of the parameters are alive? Write your guess down before
# you go on. A wrong guess teaches more than none.

# %%
guess = 1.0  # times the bytes of the parameters: put your number here

# %% [markdown]
# **Measure.** `MemoryMeter` watches whatever runs inside its `with`: it notes each tensor that appears or vanishes,
# in bytes. What you have here is a plain training loop; the meter changes nothing in it.

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
# The model has begun to learn, if you gave it a few steps. Now the peak of the first one: the largest number of bytes
# that were alive at one moment.

# %%
first = traces[0]
times = first.peak_bytes / weights
print(f"Parameters: {human_bytes(weights)}. Peak of the first step: {human_bytes(first.peak_bytes)}.")
print(f"That is {times:.1f} times as much.")
print(f"You guessed {guess:g} times.")
print(f"The peak was in {first.peak_at}.")

# %% [markdown]
# A place is a phase of the step, a module if one is at work, and an operation. `log_softmax` in its name means the
# loss, where forward turns into backward.
#
# A common guess is 4 times: parameters, a gradient for each, and the two averages of each gradient that AdamW keeps.
# *What is the rest?* The meter sorts every byte into a category. Here are three moments of the first step.

# %%
moments = first.frame()
fullest = moments.loc[moments["activation"].idxmax()]
most_activations = {category: int(fullest[category]) for category in first.at_peak}
ms.plots.bytes_by_category(
    {"most activations": most_activations, "the peak": first.at_peak, "after the step": first.at_end}
)

# %%
between, saved = sum(first.at_end.values()), most_activations["activation"]
print(f"After the step {between / weights:.1f} times the parameters stay alive, until the next one.")
print(f"Activations reach {saved / weights:.1f} times the parameters, {saved / first.peak_bytes:.0%} of the peak.")

# %% [markdown]
# The lowest bar is what you may have counted: parameters, gradients, optimizer. Parameters and optimizer stay from step
# to step; gradients go at the next `zero_grad()`. *temporary* is what operations hand to each other.
#
# The orange part of the top bar is **activations**: what forward computed and keeps, because backward will need it.
# They come and go within each step, and they grow with the batch and the length of the text; parameters do not. Are
# they less than half of the peak here? Then your batch is small: multiply `seq_len` by 8 and look again. With long
# texts they are nearly all there is. They are what this course is about.

# %% [markdown]
# ## 3. How the course works
#
# Each section asks a question, lets you predict, measures, explains. Each notebook ends in exercises. These words
# always mean the same here; other tools have other names for them.
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
# *Difficulty 1 of 3, 5 minutes.* You have seen the bytes of this model's parameters. Write the function that counts
# them for any model. Replace the line that raises the error, and run the cell: it checks your function.


# %%
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
# 30 minutes. If a step takes many seconds here, set a smaller `seq_len` and run all cells again.

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
