"""Checks of the exercises of notebook 04: how many chunks, the chunks themselves, and gradients that are not there.

They follow :mod:`memsave_lib.course.checks`: a :class:`Verdict` to print, "not tried yet" for an untouched stub, and
for a wrong answer the reason why it is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral

import torch
from torch import Tensor, nn

from memsave_lib.course.checks import Verdict, all_equal, answered, right, shown, wrong
from memsave_lib.course.env import Setup
from memsave_lib.course.silent_cases import silent_cases
from memsave_lib.formulas import BlockShape, block_saved_bytes, stack_saved_bytes
from memsave_lib.meter import MemoryMeter
from memsave_lib.models import BlockStack
from memsave_lib.strategies import Chunked, chunk_sizes
from memsave_lib.units import human_bytes

# The best number of chunks

#: (blocks, bytes a block saves, bytes of a checkpoint). In all but the second, unequal chunks are best, and several
#: numbers of chunks have the lowest peak or nearly so; each of the usual mistakes gives another list of numbers.
_COUNT_CASES = ((80, 16, 1), (12, 64, 4), (23, 3, 1), (10, 5, 2), (9, 1, 1), (30, 17, 1))


@answered
def check_best_chunks(function: Callable[[int, int, int], int], here: Setup) -> Verdict:
    """``function(n_blocks, block_bytes, checkpoint_bytes)`` is the number of chunks with the lowest peak."""
    shape = BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
    yours = (here.n_layers, block_saved_bytes(shape), shape.checkpoint_bytes)
    cases = (*_COUNT_CASES, yours)
    given = [function(*case) for case in cases]
    if bad := [value for value in given if isinstance(value, bool) or not isinstance(value, Integral)]:
        return wrong(f"A number of chunks is an int, and your function returned {shown(bad[0])}.")
    wanted = [Chunked.best(*case).num_checkpoints for case in cases]
    if given == wanted:
        return right(
            f"For 80 blocks that save 16 times their input you say {wanted[0]}, for your {here.n_layers} blocks "
            f"{wanted[-1]}."
        )
    for reason, mistake in _COUNT_MISTAKES:
        if given == [mistake(*case) for case in cases]:
            return wrong(reason)
    number = next(number for number, pair in enumerate(zip(given, wanted, strict=True)) if pair[0] != pair[1])
    return wrong(_about_count(*cases[number], given[number], wanted[number]))


def _about_count(n_blocks: int, block: int, checkpoint: int, given: int, wanted: int) -> str:
    case = f"{n_blocks} blocks that save {block:,} bytes each, {checkpoint:,} of them a checkpoint"
    if not 1 <= given <= n_blocks:
        return f"For {case}, you say {given} chunks: there can be 1 to {n_blocks}."
    peaks = [peak_bytes(n_blocks, chunks, block, checkpoint) for chunks in (given, wanted)]
    if peaks[0] == peaks[1]:
        return (
            f"For {case}, {given} and {wanted} chunks have the same peak: of equal peaks take the one with more chunks."
        )
    return (
        f"For {case}, you say {given} chunks, which peak at {peaks[0]:,} bytes; {wanted} chunks peak at {peaks[1]:,}."
    )


def peak_bytes(n_blocks: int, chunks: int, block: int, checkpoint: int) -> int:
    """Highest sum of checkpoints and one live chunk; while chunk j (from 1) is alive, j checkpoints are."""
    sizes = chunk_sizes(n_blocks, chunks)
    return max(alive * checkpoint + size * block for alive, size in enumerate(sizes, start=1))


def _equal_only(n_blocks: int, block: int, checkpoint: int) -> int:
    equal = [chunks for chunks in range(1, n_blocks + 1) if n_blocks % chunks == 0]
    return min(equal, key=lambda chunks: (peak_bytes(n_blocks, chunks, block, checkpoint), -chunks))


def _all_alive(n_blocks: int, block: int, checkpoint: int) -> int:
    """As if every checkpoint were alive while the largest chunk is."""
    sums = {n: n * checkpoint + -(-n_blocks // n) * block for n in range(1, n_blocks + 1)}
    return min(sums, key=lambda chunks: (sums[chunks], -chunks))


def _root(rounded: Callable[[float], int], relative: bool) -> Callable[[int, int, int], int]:
    """The root of the number of blocks, times A' if ``relative``, as a whole number of chunks that there can be."""

    def mistake(n_blocks: int, block: int, checkpoint: int) -> int:
        ratio = block / checkpoint if relative else 1.0
        return max(1, min(n_blocks, rounded(math.sqrt(n_blocks * ratio))))

    return mistake


def _first_of_equal(n_blocks: int, block: int, checkpoint: int) -> int:
    return min(range(1, n_blocks + 1), key=lambda chunks: peak_bytes(n_blocks, chunks, block, checkpoint))


_ROOT_OF_BLOCKS = (
    "This is the root of the number of blocks, which is right only where a block saves no more than its input. A block "
    "that saves sixteen times its input wants smaller chunks."
)
_ROOT_OF_PRODUCT = (
    "The root of L*A' is the best number of chunks if it could be any number. Chunks are whole blocks: try every "
    "number from 1 to n_blocks."
)
_COUNT_MISTAKES: tuple[tuple[str, Callable[[int, int, int], int]], ...] = (
    *[(_ROOT_OF_BLOCKS, _root(rounded, relative=False)) for rounded in (round, math.floor, math.ceil)],
    *[(_ROOT_OF_PRODUCT, _root(rounded, relative=True)) for rounded in (round, math.floor, math.ceil)],
    (
        "You tried only numbers that divide the blocks evenly. Unequal chunks, the larger first, can be better: the "
        "small ones come when most checkpoints are alive.",
        _equal_only,
    ),
    (
        "You count every checkpoint while the largest chunk is alive. The larger chunks are the first ones, and run "
        "backward last: when chunk j is alive, the checkpoints behind it are gone, and j are left.",
        _all_alive,
    ),
    (
        "Of equal peaks take the one with more chunks: early stop spares each chunk the end of its last block.",
        _first_of_equal,
    ),
    (
        "One block a chunk is best for few blocks; for many, so many checkpoints weigh more than a block.",
        lambda n, block, checkpoint: n,
    ),
)


# Blocks in chunks

_RUN_SHAPE = BlockShape(2, 24, 64, 2)
#: (blocks, chunks): equal chunks, unequal ones, one chunk, one block a chunk.
_RUN_CASES = ((6, 3), (7, 3), (8, 5), (4, 1), (3, 3))
RunChunks = Callable[[Sequence[nn.Module], Tensor, int], Tensor]


@answered
def check_chunks(function: RunChunks, here: Setup) -> Verdict:
    """``function(blocks, x, num_checkpoints)`` runs the blocks in chunks, each under PyTorch's checkpoint."""
    with torch.random.fork_rng():
        for n_blocks, chunks in (*_RUN_CASES, (here.n_layers, min(3, here.n_layers))):
            torch.manual_seed(here.seed)
            # float32, whatever the default may be: the bytes below are of that.
            stack = BlockStack(n_blocks, _RUN_SHAPE.hidden, _RUN_SHAPE.heads).float()
            x = torch.randn(_RUN_SHAPE.batch, _RUN_SHAPE.seq_len, _RUN_SHAPE.hidden, dtype=torch.float32)
            if (fault := _fault_in_chunks(function, stack, x, chunks)) is not None:
                return wrong(f"{n_blocks} blocks, {chunks} chunk{'s' if chunks > 1 else ''}: {fault}")
    sizes = chunk_sizes(here.n_layers, min(3, here.n_layers))
    return right(
        f"Equal outputs and gradients, and one input a chunk is saved. Your blocks: chunks of {_listed(sizes)}."
    )


def _fault_in_chunks(function: RunChunks, stack: BlockStack, x: Tensor, chunks: int) -> str | None:
    """What is wrong with one answer, None when nothing is."""
    blocks = list(stack.blocks)
    expected = stack(x)
    expected.sum().backward()
    wanted = [[parameter.grad for parameter in block.parameters()] for block in blocks]
    stack.zero_grad()
    order: list[int] = []  # the blocks that run, in turn: forward, then what backward runs again
    handles = [block.register_forward_pre_hook(lambda one, _: order.append(blocks.index(one))) for block in blocks]
    try:
        with MemoryMeter(stack) as meter:
            output = function(list(blocks), x, chunks)  # a copy: who takes blocks from the list may
            if not isinstance(output, Tensor):
                kind = "None" if output is None else f"an object of type {type(output).__name__}"
                return f"your function returned {kind}, not the output of the last block."
            if order != list(range(len(blocks))):
                return (
                    f"forward runs the blocks {_listed(order)}: every block must run once, in order, the last ones too."
                )
            if not torch.equal(output, expected):
                return "the output differs from a plain run: hand each chunk the output of the chunk before."
            if not output.requires_grad:
                return _why_no_gradient(function, blocks, x, chunks)
            output.sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    found = [[parameter.grad for parameter in block.parameters()] for block in blocks]
    stack.zero_grad()
    again = order[len(blocks) :]
    bad = [i for i, pair in enumerate(zip(found, wanted, strict=True)) if not all_equal(*pair)]
    if bad:
        late = max((again.count(i) for i in range(len(blocks))), default=0) > 1
        why = "does a lambda look up the loop variable too late?" if late else "is a part cut off from autograd?"
        return f"equal output, but the gradients of blocks {_listed(bad)} differ: {why}"
    return _fault_in_sizes(again, len(blocks), chunks, meter.trace.saved_bytes)


def _why_no_gradient(function: RunChunks, blocks: Sequence[nn.Module], x: Tensor, chunks: int) -> str:
    """Of an output that is right: with an input that needs a gradient, the older checkpoint would let it flow."""
    if function(list(blocks), x.clone().requires_grad_(), chunks).requires_grad:
        return (
            "the output is right, but no gradient flows from it: say use_reentrant=False. The other kind of "
            "checkpoint wants an input that needs a gradient, and the first x needs none."
        )
    return (
        "the output is right, but no gradient flows from it, whatever the input: autograd is switched off "
        "(torch.no_grad), or the output is detached."
    )


def _fault_in_sizes(again: list[int], n_blocks: int, chunks: int, saved: int) -> str | None:
    if not again:
        return "no block runs again in backward: nothing is checkpointed."
    if often := sorted({block for block in again if again.count(block) > 1}):
        return (
            f"equal gradients, but backward runs the blocks {_listed(often)} again more than once: a checkpoint inside "
            "a checkpoint. One call for each chunk, next to each other, will do."
        )
    starts = [i for i, block in enumerate(again) if i == 0 or block != again[i - 1] + 1]
    sizes = [stop - start for start, stop in zip(starts, [*starts[1:], len(again)], strict=True)][::-1]
    wanted = list(chunk_sizes(n_blocks, chunks))
    if sum(sizes) < n_blocks:
        return f"backward runs only the blocks {_listed(sorted(again))} again: each chunk is to be checkpointed."
    if sizes != wanted:
        hint = "the larger chunks come first" if sorted(sizes) == sorted(wanted) else "they differ by one block at most"
        return f"your chunks have {_listed(sizes)} blocks; they should have {_listed(wanted)}: {hint}."
    expected = stack_saved_bytes(Chunked(chunks).plan(n_blocks), _RUN_SHAPE)
    if saved != expected:
        bytes_saved = f"{human_bytes(saved)} are saved instead of {human_bytes(expected)}"
        return f"equal gradients, but {bytes_saved}, one input a chunk."
    return None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


# Gradients that are not there


@answered
def check_silent(function: Callable[[nn.Module], list[str]], here: Setup) -> Verdict:
    """``function(model)`` names the trainable parameters that a backward left without any gradient but zeros."""
    with torch.random.fork_rng():
        torch.manual_seed(here.seed)
        for case, (model, silent) in silent_cases().items():
            given = function(model)
            if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
                return wrong(f"The answer is a list of names, and your function returned {shown(given)}.")
            if sorted(given) != sorted(silent):
                return wrong(f"{case}: {_about_names(given, silent)}")
    return right("It finds zeros and missing gradients, and accuses neither frozen, tiny nor canceling ones.")


def _about_names(given: Sequence[str], silent: Sequence[str]) -> str:
    missed, accused = sorted(set(silent) - set(given)), sorted(set(given) - set(silent))
    parts = [f"you do not name {', '.join(missed)}"] if missed else []
    parts += (
        [f"you name {', '.join(accused)}, which {'is' if len(accused) == 1 else 'are'} all right"] if accused else []
    )
    return "; ".join(parts or ["you name a parameter twice"]) + "."
