# %% [markdown]
# # 05 Stream offloading
#
# <!-- colab -->
#
# Instead of computing saved activations again, you can send them to the host's memory or a disk, and have them back
# in time. That costs waiting, which can be hidden.
#
# **After these 30 minutes, and 38 of exercises, you can**
#
# - read a timeline of computation and copies, and say who waits for whom;
# - say when a copy hides behind computation;
# - say why the peak may stay when checkpoints leave;
# - name four ways in which offloading corrupts gradients or saves nothing.

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
import os

import pandas as pd
import torch
from IPython.display import display
from torch import Tensor, nn

import memsave_lib as ms
from memsave_lib import devices, formulas, held, labs
from memsave_lib.course import costs, disk_memory, hook_checks, long_text, offload_checks, peers, records
from memsave_lib.course.env import setup
from memsave_lib.course.predictions import Ledger
from memsave_lib.course.questions import offloading as questions
from memsave_lib.units import human_bytes

here = setup(seq_len, checkpoint_every, n_layers, hidden, batch_size, steps, device)
ledger = Ledger()
print(here)

# %% [markdown]
# ## 1. Send it away and bring it back
#
# *How much code does it take?* PyTorch hands each tensor that autograd saves to a function of yours and keeps what
# that returns; in backward a second one turns that back. Explainers show a Module with a `backward` method.
#
# **Predict** for each: of a block's six layers, how many outputs are alive after forward, and do weights leave too?
# **Measure** with weak references, which keep nothing alive. (Without a GPU, copies lie in the same memory, which
# stands in for the host's.)


# %%
def send(tensor: Tensor) -> tuple[torch.device, Tensor]:
    return tensor.device, tensor.to("cpu", copy=True)


def bring_back(ticket: tuple[torch.device, Tensor]) -> Tensor:
    return ticket[1].to(ticket[0])


class FromTheExplainer(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.backward_calls = block, 0

    def forward(self, x: Tensor) -> Tensor:
        output = self.block(x)
        self.away = output.detach().to("cpu", copy=True)
        return output

    def backward(self, gradient: Tensor) -> Tensor:
        self.backward_calls += 1
        return gradient


# %%
import weakref

x = torch.randn(here.batch_size, here.seq_len, here.hidden, device=here.device)
block = ms.TransformerBlock(here.hidden, here.heads).to(here.device)
explained, witnesses = FromTheExplainer(block), {}
for layer in block.children():
    layer.register_forward_hook(lambda n, _, out: witnesses.update({n: weakref.ref(out.untyped_storage())}))


def with_hooks() -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(send, bring_back):
        return block(x)


for name, run in {"keep all": lambda: block(x), "hooks": with_hooks, "explainer": lambda: explained(x)}.items():
    loss = run().sum()
    alive = sum(witness() is not None for witness in witnesses.values())
    loss.backward()
    print(f"{name:<10} {alive} of {len(witnesses)} layers' outputs are alive after forward")
print(f"FromTheExplainer.backward was called {explained.backward_calls} times")

# %%
stack = ms.BlockStack(here.n_layers, here.hidden, here.heads).to(here.device)
weights = {parameter.untyped_storage().data_ptr() for parameter in stack.parameters()}
sent = {"activations": 0, "weights": 0}


def send_and_count(tensor: Tensor) -> tuple[torch.device, Tensor]:
    sent["weights" if tensor.untyped_storage().data_ptr() in weights else "activations"] += tensor.nbytes
    return send(tensor)


with torch.autograd.graph.saved_tensors_hooks(send_and_count, bring_back):
    loss = stack(x).sum()
loss.backward()
print("hooks:", ", ".join(f"{human_bytes(size)} of {kind}" for kind, size in sent.items()))
with ms.apply(stack, ms.Offload()) as applied:
    stack(x).sum().backward()
print(f"ms.Offload(): {applied.report.offload}")

# %% [markdown]
# Autograd walks through operations, not Modules: nobody calls that `backward`. The graph still holds every tensor
# (outputs that are only added were never saved), and a copy comes on top. Claim A6 of the ledger in notebook 06, that
# such code offloads, is false.
#
# Hooks free, but also send weights, alive anyway: such a copy only costs memory. `ms.Offload()` keeps those, small
# tensors, the stack's input, and the last block, which backward wants at once.
#
# ### Exercise: the bytes that leave
#
# `sizes` are the bytes that each block saves, its input first. Three things stay: tensors below 65,536 bytes, the last
# `keep_last` blocks, the first block's input. How many bytes leave?

# %%
shape = formulas.BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
sizes = list(costs.saved_storages(shape))
print(f"each block saves {len(sizes)} storages: {', '.join(human_bytes(size) for size in sizes)}")


# Exercise: difficulty 1 of 3, 10 minutes. For: forecasting what offloading moves.
def bytes_that_leave(sizes: list[int], n_layers: int, keep_last: int) -> int:
    """In one forward, of all blocks together."""
    # <exercise>
    # <stub>
    raise NotImplementedError("your turn")
    # <solution>
    total = 0
    for block in range(n_layers - keep_last):
        for position, size in enumerate(sizes):
            if size >= 65536 and (block, position) != (0, 0):
                total += size
    return total
    # </exercise>


print(offload_checks.check_bytes_that_leave(bytes_that_leave, here))

# %% [markdown]
# <details><summary>Hint</summary>
#
# Two loops: over the blocks that leave, `range(n_layers - keep_last)`, and over the sizes. Which of them do not count?
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# </details>
#
# ## 2. Blocking, overlapped, prefetched
#
# *The same bytes three times: who waits?* `prefetch=n` lets n tensors leave, or come back ahead of use, while
# computation goes on. With 0 each copy is waited for on the spot. **Predict** how many are on their way already when
# backward asks.
#
# Measured, with your disk; and **simulated**, not yet run on a GPU: a T4 by cited figures, width 4,096, 4,096 tokens in
# half precision.

# %%
disk = "disk" if hasattr(os, "preadv") else "host"  # Windows lacks what a DiskStore needs
large = formulas.BlockShape(1, 4096, 4096, 32, dtype="float16", device="cuda")
blocks, plan = costs.stack_costs(large, here.n_layers), ms.Offload().plan(here.n_layers)
measured, simulated = {}, {}
for prefetch in (0, 2, 4):
    with ms.apply(stack, ms.Offload(store=disk, prefetch=prefetch)) as applied:
        stack(x).sum().backward()
    traffic, one = applied.report.offload, ms.simulate(blocks, plan, devices.T4, prefetch=prefetch)
    measured[f"prefetch={prefetch}"], simulated[f"T4, prefetch={prefetch}"] = traffic.lanes, one
    moved = f"{traffic.moved.tensors} tensors left, {human_bytes(traffic.moved.bytes)}"
    print(f"prefetch={prefetch}: {moved}; {traffic.prefetch_hits} were on their way back when asked for")
    print(f"    T4: waits {len(one.stalls)} times, {one.stall_seconds / one.step_seconds:.1%} of the step")
display(ms.plots.stream_lanes(measured, seconds=False))
ms.plots.stream_lanes(simulated, seconds=False)

# %% [markdown]
# With 0, copies and computation never run together. With 2, nearly all waiting is gone, for a few tensors' memory.
# (The gap is the last block's backward, which asks for nothing. Copies take a core from computing here.)
#
# ### Your turn: the lab
#
# *How slow may the link be before computing waits: if everything leaves, and if only checkpoints do?* Your stack at
# 100 GFLOP/s, simulated. **Predict** how far the two are apart. *Run* sends a real step's tensors to your own disk:
# how high does memory climb in forward?

# %%
lab = labs.offload_lab(here.n_layers, here.hidden, here.heads, here.batch_size, here.seq_len, device=here.device)
lab.still()

# %%
lab

# %% [markdown]
# Everything needs 64·10¹¹/(24*h* + 2*s*) bytes a second, checkpoints a sixteenth. In forward, memory climbs for the
# last block, which stays.
#
# ## 3. When does it hide?
#
# A block of width *h* computes 24*h*² + κ*sh* FLOPs a token (κ = 2 for causal attention, 4 for full) and sends γ*h*
# bytes a token. With *F* FLOP/s and *B* bytes/s the copy hides, with enough tensors under way, when
#
# $$24h + \kappa s \ge \gamma F / B.$$
#
# The batch drops out; backward has twice the work. In half precision γ is 2 for a block's input, 34 for all that a GPT
# block with dropout saves, 45.5 for Llama-2-7B's. Yours (float32, no dropout): 4 and 64.
#
# **Predict** for *F/B* = 2,353 (a T4), 6,326 (A100), 7,260 (H100) and *h* = 4,096: from how many tokens on does each
# hide? Write down the A100's for γ = 34 and κ = 2. Judge three claims. A1: *a 7B model has 8.6 GB of activations at 32k
# tokens*. A3: *10 GB out and back at 25 GB/s take 0.8 s*. A4: *offloading slows training 2–3 times with overlap, 3–5
# times in practice*.

# %% tags=["nbval-ignore-output"]
machine = devices.measure(here.device, seconds=1.0)
print(f"{machine.name}: F = {machine.flops / 1e9:,.0f} GFLOP/s")
for link in ("copy_out", "disk_write"):
    ratio, left = machine.flops / machine.need(link), 24 * here.hidden + 2 * here.seq_len
    print(f"{link}: B = {machine.need(link) / 1e9:.1f} GB/s, 24h + 2s = {left:,}")
    for what, gamma in (("block inputs", 4), ("everything", 64)):
        print(f"    {what}: needs {gamma * ratio:,.0f}, hides: {left >= gamma * ratio}")

# %%
# Exercise: difficulty 2 of 3, 3 minutes. For: knowing when a copy costs nothing.
# <exercise>
# <stub>
tokens_on_an_a100 = None  # your number
# <solution>
tokens_on_an_a100 = (34 * 6326 - 24 * 4096) / 2
# </exercise>
print(ledger.check(questions.everything_hides(), tokens_on_an_a100, questions.tokens_to_hide()))
rows = {}
for one in (devices.T4, devices.A100, devices.H100):
    rows[one.name] = {"F/B": f"{one.flops / one.copy_out:,.0f}"}
    for what, gamma in {"block inputs": 2, "GPT, everything": 34, "Llama-2-7B, everything": 45.5}.items():
        first = formulas.hiding_seq_len(4096, gamma, one.flops, one.copy_out)
        rows[one.name][what] = f"from {first:,} tokens" if first else "always"
pd.DataFrame(rows).T

# %%
inputs = 32 * 32_768 * 4096 * 2
print(f"A1: {inputs / 1e9:.1f} GB are the block inputs alone; everything is {34 / 2:.0f} to {45.5 / 2:.1f} times that")
print(f"A3: {2 * 10 / 25:.1f} of a second: right arithmetic, but a cost only where somebody waits")
blocks, times = costs.stack_costs(large, 32), {}
for one in (devices.T4, devices.A100, devices.H100, devices.T4.pageable()):
    for what, strategy in {"everything": ms.KeepAll(), "block inputs": ms.FullCheckpoint()}.items():
        for how, prefetch in {"overlapped": 4, "blocking": 0}.items():
            step = ms.simulate(blocks, ms.Offload(strategy).plan(32), one, prefetch=prefetch)
            times.setdefault(f"{what}, {how}", {})[one.name] = f"{step.step_seconds / step.compute_seconds:.2f}"
print("A4: 32 such blocks, times the step without copies:")
pd.DataFrame(times)

# %% [markdown]
# <details><summary>Hint</summary>
#
# At the limit both sides are equal: put numbers for *h*, κ, γ and *F/B*, and solve for *s*.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# </details>
#
# Block inputs hide anywhere here; everything at very long context only, unless the device computes slowly, as a T4 and
# your CPU do. A1 counts the inputs alone. A4 is right only where memory is not *pinned* (locked in place for the copy
# engines). (Simulated, **not yet run on a GPU**.)
#
# ### Exercise: the slowest link
#
# Chunks of `blocks_per_copy` blocks are checkpointed: one input leaves for each chunk. How many bytes a second must the
# link carry so that its copy just hides? Attention is causal.


# %%
# Exercise: difficulty 1 of 3, 10 minutes. For: judging a machine before you rent it.
def slowest_link(seq_len: int, hidden: int, gamma: float, flops: float, blocks_per_copy: int) -> float:
    """In bytes a second."""
    # <exercise>
    # <stub>
    raise NotImplementedError("your turn")
    # <solution>
    return gamma * flops / (blocks_per_copy * (24 * hidden + 2 * seq_len))
    # </exercise>


print(offload_checks.check_slowest_link(slowest_link))

# %% [markdown]
# <details><summary>Hint</summary>
#
# The left side is the computing behind which one copy hides. How much of it is there now? Then solve for *B*.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# </details>
#
# ## 4. Offload the checkpoints
#
# *Checkpoint each block, then send the checkpoints away: how far does the peak fall, and where is it?*
#
# *And which blocks should stay?* Claim A5: offload the last layers, their activations are the largest. **Predict** the
# bytes of each block, and who waits at the turn from forward to backward with `keep_last=0`.


# %%
def step(strategy: ms.Strategy) -> ms.Trace:
    stack.zero_grad()
    with ms.apply(stack, strategy), ms.MemoryMeter(stack) as meter:
        stack(x).sum().backward()
    gradients.append([parameter.grad for parameter in stack.parameters()])
    return meter.trace


gradients, checkpoint = [], ms.FullCheckpoint()
options = {"everything kept": ms.KeepAll(), "checkpointed": checkpoint, "checkpoints offloaded": ms.Offload(checkpoint)}
traces = {name: step(strategy) for name, strategy in options.items()}
for (name, trace), found in zip(traces.items(), gradients):
    equal = all(map(torch.equal, found, gradients[0]))
    here_bytes, away = human_bytes(trace.saved_bytes), human_bytes(trace.host_peak_bytes)
    print(f"{name}: gradients equal: {equal}; {here_bytes} saved here, {away} away; peak {trace.peak_bytes:,} bytes")
ms.plots.memory_timeline({name: traces[name] for name in list(traces)[1:]}, x="events")

# %%
with ms.apply(stack, ms.Offload(keep_last=0)) as applied:
    stack(x).sum().backward()
copies = applied.report.offload.lanes.copy_out
each = [sum(copy.nbytes for copy in copies if copy.block == block) for block in range(here.n_layers)]
print("bytes that leave, block by block:", ", ".join(f"{nbytes:,}" for nbytes in each))
blocks = costs.stack_costs(large, here.n_layers)
for keep_last in range(3):
    one = ms.simulate(blocks, ms.Offload(keep_last=keep_last).plan(here.n_layers), devices.T4)
    turn = sum(stall.seconds for stall in one.stalls if stall.kind != "leaving")
    print(f"T4, keep_last={keep_last}: waiting at the turn is {turn / one.step_seconds:.1%} of the step")

# %% [markdown]
# Checkpoints left, the peak stayed: it sits in the first block's backward, when other checkpoints are used up and
# gradients piled up beside one live block. Checkpoints weigh with many blocks and long sequences only.
#
# A5 is false: blocks are equal, but for the stack's input, and the last are wanted first. Who sends them waits for
# them to leave and to return.
#
# ## 5. A real disk
#
# *Does the process become smaller?* Ask for the resident memory (RSS) of a process of its own.
# (`MALLOC_MMAP_THRESHOLD_` makes it give freed memory back.)
#
# *And when the disk is full?* Writing happens in a thread, later. **Predict**: an error, a hang, or a wrong gradient?
# (The failure is injected.)

# %% tags=["nbval-ignore-output"]
size = disk_memory.Size(n_layers=8, hidden=256, batch=2, seq_len=1024)
for case in () if disk_memory.why_not() else disk_memory.CASES:
    growth = disk_memory.measure(case, size)
    grown = f"{human_bytes(growth.after_forward)} after forward, {human_bytes(growth.after_step)} after the step"
    print(f"{case:<9} RSS grew by {grown}; {human_bytes(growth.offloaded_bytes)} offloaded")


# %%
import errno
from concurrent.futures import Future


class FullDisk(ms.DiskStore):
    room = 4 * shape.checkpoint_bytes

    def start_write(self, extent, memory: Tensor) -> Future:
        if extent.stop <= self.room:
            return super().start_write(extent, memory)
        failed = Future()
        failed.set_exception(OSError(errno.ENOSPC, "No space left on device"))
        return failed


try:
    step(ms.Offload(store=FullDisk(), keep_last=0, min_bytes=1))
except OSError as error:
    print(f"{type(error).__name__}: {error.strerror}")
print("the next step is right:", step(ms.Offload(store=disk)) and all(map(torch.equal, gradients[-1], gradients[0])))

# %% [markdown]
# An error, within the step. And RSS fell. Beware of the **page cache**: the system keeps written pages in memory
# while there is room. Small runs "on disk" are fast, large ones suddenly not.
#
# ### Exercise: three bugs in ten lines
#
# `send` and `bring_back` send weights. They notice nothing when a saved tensor changes in place before backward: hooks
# switch PyTorch's own check off, and gradients are silently wrong. Whoever lets small tensors stay by returning the
# argument leaks: an output holds its operation, which holds what you returned.
#
# Write hooks without the three bugs. `held.witness(tensor)` shares a tensor's version and none of its memory;
# `held.check_version(witness, version, shape)` raises when the version has moved on.


# %%
# Exercise: difficulty 3 of 3, 15 minutes. For: reviewing anyone's offloading code.
class Hooks:
    def __init__(self, model: nn.Module) -> None:
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    # <exercise>
    # <stub>
    def pack(self, tensor: Tensor) -> object:
        raise NotImplementedError("your turn")

    def unpack(self, ticket: object) -> Tensor:
        raise NotImplementedError("your turn")

    # <solution>
    def pack(self, tensor: Tensor) -> object:
        stays = tensor.nbytes < 65536 or tensor.untyped_storage().data_ptr() in self.weights
        kept = tensor.detach() if stays else tensor.to("cpu", copy=True)
        return tensor.device, kept, held.witness(tensor), tensor._version

    def unpack(self, ticket: object) -> Tensor:
        home, kept, witness, version = ticket
        held.check_version(witness, version, kept.shape)
        return kept.to(home)

    # </exercise>


print(hook_checks.check_hooks(Hooks, here))

# %% [markdown]
# <details><summary>Hint</summary>
#
# Two kinds of tensors stay: weights, recognized by their storage's address, and those below 65,536 bytes. For these
# keep `tensor.detach()`. The ticket needs four things: where the tensor lived, its copy, a witness, and
# `tensor._version` at packing. `shape` is the saved tensor's.
#
# </details>
#
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# </details>
#
# ## 6. GPT-2 on a book
#
# The explainers' homework: GPT-2 on 8,192 tokens of a book, checkpointing against offloading. GPT-2 has 1,024
# positions; here its table is longer. A10: *offloading cuts the peak by 20–40 %, doubles or triples the step time,
# leaves perplexity unchanged*. **Predict** the three for a GPT-2 of 6 blocks, width 256, twice your `seq_len`.

# %%
book = long_text.long_text("mini", seq_len=2 * here.seq_len, steps=here.steps, store=disk, device=here.device)
for row in book:
    lower = 1 - row.peak_bytes / book[0].peak_bytes
    same = row.perplexity == book[0].perplexity
    print(f"{row.label:<14} peak {human_bytes(row.peak_bytes)}, {lower:.0%} lower, in {row.peak_at}")
    print(f"{'':<14} on disk {human_bytes(row.disk_bytes)}; perplexity equal to the last digit: {same}")

# %% tags=["nbval-ignore-output"]
runs = {"here": pd.DataFrame([row.figures() for row in book])}
try:
    record = records.load("long_text")
    runs["full size"] = record.frame()
    print(record.origin)
except records.NoRecord as missing:
    print(missing)
table = pd.concat({name: run.set_index("label") for name, run in runs.items()})
table["times"] = table.step_seconds / table.groupby(level=0).step_seconds.transform("first")
table = table.assign(**{name: table[name].map(human_bytes) for name in ("peak_bytes", "disk_bytes")})
display(table[["peak_bytes", "peak_at", "disk_bytes", "step_seconds", "times", "perplexity"]])
tools = peers.table()
for name in ("held_bytes", "peak_bytes"):
    tools[name] = ["" if pd.isna(nbytes) else human_bytes(int(nbytes)) for nbytes in tools[name]]
tools

# %% [markdown]
# A10: perplexity is equal. At full size (recorded on a CPU) offloading halved the peak in about the same time, and
# all four peaks sit in the loss: A10's other numbers are no law. Other tools (last table) are exact too; without a
# GPU their copies count as held, and one fails. All this is **not yet run on a GPU**.
#
# ## Your predictions

# %%
print(ledger)
ledger.plot()

# %% [markdown]
# ## What you should have noticed
#
# - A graph that still holds the tensor, or a weight that leaves, saves nothing. A returned argument leaks. A tensor
#   changed in place corrupts gradients.
# - The same bytes cost nothing or a multiple of the step: it depends on who waits.
# - Block inputs hide nearly anywhere; everything on slow devices, or at very long context.
# - A peak beside one live block does not care where checkpoints lie.
#
# ## Next
#
# Keep, recompute, offload: notebook 06 chooses for each block, under your budget.
