"""Checks of the exercises of notebook 05: what leaves, and which link is fast enough.

They follow :mod:`memsave_lib.course.checks`: a :class:`Verdict` to print, "not tried yet" for an untouched stub, and
for a wrong answer the reason why it is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

from memsave_lib.course.checks import Verdict, answered, no_count, right, shown, wrong
from memsave_lib.course.costs import saved_storages
from memsave_lib.course.env import Setup
from memsave_lib.formulas import BlockShape, hiding_bandwidth
from memsave_lib.strategies import MIN_BYTES
from memsave_lib.units import exact_bytes

# The bytes that leave


@dataclass(frozen=True)
class LeavingCase:
    """Arguments of the exercise: what each block saves, its input first, and how many blocks at the end stay."""

    sizes: tuple[int, ...]
    n_layers: int
    keep_last: int

    def __str__(self) -> str:
        return f"sizes={list(self.sizes)}, n_layers={self.n_layers}, keep_last={self.keep_last}"

    def count(self, *, blocks: int | None = None, min_bytes: int = MIN_BYTES, first_input: bool = False) -> int:
        """Bytes that leave from the first ``blocks`` blocks; ``first_input`` counts the input of the stack too."""
        sent = max(0, self.n_layers - self.keep_last) if blocks is None else blocks
        each = [size if size >= min_bytes else 0 for size in self.sizes]
        return sent * sum(each) - (0 if first_input or not sent else each[0])


@answered
def check_bytes_that_leave(function: Callable[[list[int], int, int], int], here: Setup) -> Verdict:
    """``function(sizes, n_layers, keep_last)``: bytes that ``Offload(keep_last=...)`` sends away in one forward."""
    shape = BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
    yours = LeavingCase(saved_storages(shape), here.n_layers, 1)
    cases = (yours, *_LEAVING_CASES)
    given = [function(list(case.sizes), case.n_layers, case.keep_last) for case in cases]
    if complaint := no_count(given):
        return wrong(complaint)
    wanted = [case.count() for case in cases]
    if given == wanted:
        return right(f"At your parameters {exact_bytes(wanted[0])} leave; {len(_LEAVING_CASES)} other stacks agree.")
    for reason, mistake in _LEAVING_MISTAKES.items():
        if given == [mistake(case) for case in cases]:
            return wrong(reason)
    for limit in sorted({size for case in cases for size in case.sizes if size < MIN_BYTES}):
        if given == [case.count(min_bytes=limit) for case in cases]:
            return wrong(f"You send tensors of {limit:,} bytes: what is smaller than {MIN_BYTES:,} bytes stays.")
    case, found, expected = next(row for row in zip(cases, given, wanted, strict=True) if row[1] != row[2])
    return wrong(f"For {case} you get {found:,} bytes; {expected:,} bytes leave.")


_LEAVING_CASES = (
    LeavingCase(saved_storages(BlockShape(2, 256, 64, 2)), 4, 0),
    LeavingCase(saved_storages(BlockShape(2, 256, 64, 2)), 4, 2),
    # The log-sum-exp takes 64 KiB exactly, which is not less than the limit.
    LeavingCase(saved_storages(BlockShape(2, 2048, 64, 4)), 3, 1),
    # The log-sum-exp takes 65,024 bytes: less than 64 KiB, and more than 64,000 bytes, which some take for the same.
    LeavingCase(saved_storages(BlockShape(2, 4064, 64, 2)), 3, 1),
    # Only queries, keys and values, and the two wide tensors are large enough: no block's input is.
    LeavingCase(saved_storages(BlockShape(1, 128, 64, 1)), 3, 1),
    LeavingCase(saved_storages(BlockShape(2, 256, 64, 2)), 2, 3),  # more blocks stay than there are
)

_LEAVING_MISTAKES: dict[str, Callable[[LeavingCase], int]] = {
    "You send all blocks: the last `keep_last` stay.": lambda case: case.count(blocks=case.n_layers),
    "Either you keep the first `keep_last` blocks, and it is the last ones that stay; or you leave out the input of "
    "the last block, and it is the first block's that stays.": (
        lambda case: case.count(first_input=case.keep_last > 0)
    ),
    "You count the small tensors too: what is smaller than 64 KiB stays.": lambda case: case.count(min_bytes=0),
    "You leave out a tensor of 64 KiB exactly: only what is smaller stays.": lambda case: case.count(
        min_bytes=MIN_BYTES + 1
    ),
    "You count the input of the first block: whoever called the stack holds it, so it stays.": (
        lambda case: case.count(first_input=True)
    ),
    "You leave out the input of every block: only the first block's is held by somebody else.": (
        lambda case: max(0, case.n_layers - case.keep_last) * sum(size for size in case.sizes[1:] if size >= MIN_BYTES)
    ),
    "You count small tensors and the input of the first block: both stay.": (
        lambda case: case.count(min_bytes=0, first_input=True)
    ),
    "You count all that is saved. Three things stay: the last `keep_last` blocks, tensors smaller than 64 KiB, and the "
    "input of the first block.": lambda case: case.n_layers * sum(case.sizes),
    "You count a negative number of blocks: with keep_last above n_layers nothing leaves.": (
        lambda case: (
            case.count()
            if case.n_layers > case.keep_last
            else (case.n_layers - case.keep_last) * sum(size for size in case.sizes if size >= MIN_BYTES)
            - (case.sizes[0] if case.sizes[0] >= MIN_BYTES else 0)
        )
    ),
    "You count the way back too: the exercise asks what leaves.": lambda case: 2 * case.count(),
}

# The slowest link behind which a copy hides


@dataclass(frozen=True)
class LinkCase:
    """Arguments of the exercise, in its order."""

    seq_len: int
    hidden: int
    gamma: float
    flops: float
    blocks_per_copy: int

    def __str__(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in vars(self).items())

    def bandwidth(self, kappa: int = 2) -> float:
        one = hiding_bandwidth(self.seq_len, self.hidden, self.gamma, self.flops, kappa)
        return one / self.blocks_per_copy


@answered
def check_slowest_link(function: Callable[[int, int, float, float, int], float]) -> Verdict:
    """``function(seq_len, hidden, gamma, flops, blocks_per_copy)``: bytes a second at which the copy just hides."""
    arguments = [tuple(vars(case).values()) for case in _LINK_CASES]
    given = [function(*values) for values in arguments]
    if bad := [value for value in given if isinstance(value, bool) or not isinstance(value, Real)]:
        return wrong(f"A bandwidth is a number, and your function returned {shown(bad[0])}.")
    given = [_as_float(value) for value in given]
    wanted = [case.bandwidth() for case in _LINK_CASES]
    if _same(given, wanted):
        return right(
            f"On an A100, checkpoints of Llama-2-7B's width at 4,096 tokens need {wanted[0] / 1e9:.1f} GB/s, one for "
            f"each block, and {wanted[1] / 1e9:.2f} GB/s, one for four."
        )
    for reason, mistake in _LINK_MISTAKES.items():
        if _same(given, [mistake(case) for case in _LINK_CASES]):
            return wrong(reason)
    case, found, expected = next(row for row in zip(_LINK_CASES, given, wanted, strict=True) if not _close(*row[1:]))
    return wrong(f"For {case} you get {found:.4g} bytes a second; the copy just hides at {expected:.4g}.")


def _as_float(value: Real) -> float:
    """A whole number may be larger than any float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _same(given: Sequence[float], wanted: Sequence[float]) -> bool:
    return all(_close(one, other) for one, other in zip(given, wanted, strict=True))


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)


_LINK_CASES = (
    LinkCase(4096, 4096, 2, 156e12, 1),
    LinkCase(4096, 4096, 2, 156e12, 4),
    LinkCase(131072, 4096, 45.5, 156e12, 1),
    LinkCase(1024, 768, 34, 24e12, 3),
)

_LINK_MISTAKES: dict[str, Callable[[LinkCase], float]] = {
    "You leave out `blocks_per_copy`: while one copy is on its way, that many blocks compute.": (
        lambda case: case.bandwidth() * case.blocks_per_copy
    ),
    "You multiply by `blocks_per_copy`: more blocks compute behind each copy, so a slower link will do.": (
        lambda case: case.bandwidth() * case.blocks_per_copy**2
    ),
    "You take kappa = 4: with causal attention half of the scores are skipped, kappa = 2.": (
        lambda case: case.bandwidth(kappa=4)
    ),
    "You leave out attention: `kappa*s` grows with the sequence.": lambda case: case.bandwidth(kappa=0),
    "You multiply `blocks_per_copy` into the projections alone: attention is computed in each block too.": (
        lambda case: case.gamma * case.flops / (24 * case.hidden * case.blocks_per_copy + 2 * case.seq_len)
    ),
    "You turned the fraction upside down: a faster device needs a faster link.": lambda case: 1 / case.bandwidth(),
    "You ask for bits: bandwidths here are bytes a second.": lambda case: 8 * case.bandwidth(),
    "You count the way back too: it happens in backward, which has twice the time.": lambda case: 2 * case.bandwidth(),
}
