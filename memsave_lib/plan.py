"""What happens to each block of a stack, as data.

A plan is a tuple of *segments*, in the order of the blocks. A kept segment simply runs. A recomputed segment is a
*region*: only its input survives forward, and backward runs its blocks again. Regions may nest. What a segment of the
stack keeps for backward, all saved tensors or the one input, may be sent away until backward wants it. From a plan
follows, by arithmetic alone, how often each block runs again and how many FLOPs that costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Segment:
    """Contiguous blocks ``start .. stop - 1`` that are kept, or recomputed as one region.

    ``inner`` says how the blocks of a region run whenever the region runs; empty means: all kept. ``offload`` sends
    away what the segment keeps: only a segment of the stack itself can, none inside a region.
    """

    start: int
    stop: int
    recompute: bool = False
    inner: tuple[Segment, ...] = ()
    offload: bool = False

    @property
    def n_blocks(self) -> int:
        return self.stop - self.start

    def body(self) -> tuple[Segment, ...]:
        """The segments that run when this region runs."""
        return self.inner or (Segment(self.start, self.stop),)


@dataclass(frozen=True)
class RegionFlops:
    """FLOPs of one forward of a region, and the part of it that lies behind its last saved tensor.

    PyTorch ends a recomputation at the last tensor that backward needs ("early stop"), so the tail is not repeated.
    """

    forward: int
    tail: int = 0

    def repeated(self, early_stop: bool) -> int:
        return self.forward - self.tail if early_stop else self.forward


@dataclass(frozen=True)
class BlockFlops(RegionFlops):
    """The same for one block, with the regions inside it that :class:`SelectiveOps` can recompute."""

    regions: Mapping[str, tuple[RegionFlops, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What happens to each block of a stack of ``n_blocks``."""

    n_blocks: int
    segments: tuple[Segment, ...]
    recompute_ops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_cover(self.segments, 0, self.n_blocks)

    @property
    def actions(self) -> tuple[str, ...]:
        """``"keep"``, ``"recompute"`` or ``"offload"`` for each block; for one of which the input alone is sent away,
        ``"recompute"``. Operations inside a block are in ``recompute_ops``.
        """
        return tuple(_action(segment) for segment in self.segments for _ in range(segment.n_blocks))

    @property
    def offloads(self) -> bool:
        """Whether anything is sent away."""
        return any(segment.offload for segment in self.segments)

    @property
    def has_chunks(self) -> bool:
        """Whether some region spans several blocks."""
        return any(segment.recompute and segment.n_blocks > 1 for segment in self.segments)

    @property
    def n_regions(self) -> int:
        """Region inputs alive at the end of forward: the checkpoints."""
        return sum(segment.recompute for segment in self.segments)

    def recompute_counts(self) -> tuple[int, ...]:
        """How often each block's forward starts again during one backward: its depth in nested regions.

        Early stop ends the last block of every region before its end, and never starts a region nested there.
        """
        counts = [0] * self.n_blocks
        for region in _regions(self.segments):
            for index in range(region.start, _started_until(region)):
                counts[index] += 1
        return tuple(counts)

    def region_runs(self) -> int:
        """How many regions are run again during one backward, nested ones included."""
        return sum(1 for _ in _regions(self.segments))

    def extra_flops(self, costs: Sequence[BlockFlops], early_stop: bool = True) -> int:
        """FLOPs that one backward of the stack spends on recomputation.

        Args:
            costs: FLOPs of each block, in order (:func:`memsave_lib.flops.profile_blocks` measures them).
            early_stop: whether a recomputation ends at its last saved tensor, PyTorch's default.
        """
        if len(costs) != self.n_blocks:
            raise ValueError(f"costs has {len(costs)} entries for a plan of {self.n_blocks} blocks")
        total = sum(_run_again(region, costs, early_stop) for region in _regions(self.segments))
        for cost in costs:
            for op in self.recompute_ops:
                total += sum(region.repeated(early_stop) for region in cost.regions[op])
        return total

    def offloaded_bytes(self, saved: Sequence[int], checkpoints: Sequence[int]) -> int:
        """Bytes that leave in one forward.

        Args:
            saved: of each block, in order: what leaves when it is kept and offloaded.
            checkpoints: of each block: what leaves when a region starts with it.
        """
        if not len(saved) == len(checkpoints) == self.n_blocks:
            raise ValueError(
                f"{len(saved)} saved and {len(checkpoints)} checkpoints for a plan of {self.n_blocks} blocks"
            )
        return sum(
            checkpoints[segment.start] if segment.recompute else sum(saved[segment.start : segment.stop])
            for segment in self.segments
            if segment.offload
        )

    def describe(self) -> str:
        """One line a block: what happens to it and, for a recomputed block, in which region."""
        suffix = f", recomputing inside: {', '.join(self.recompute_ops)}" if self.recompute_ops else ""
        counts = self.recompute_counts()
        lines = []
        for segment in self.segments:
            for index in range(segment.start, segment.stop):
                if not segment.recompute:
                    lines.append(f"block {index:>2}: {_action(segment)}{suffix}")
                    continue
                where = "" if segment.n_blocks == 1 else f", region of blocks {segment.start}-{segment.stop - 1}"
                again = "" if counts[index] == 1 else f", started again {counts[index]} times"
                sent = ", input offloaded" if segment.offload and index == segment.start else ""
                lines.append(f"block {index:>2}: recompute{where}{again}{sent}")
        return "\n".join(lines)


def _action(segment: Segment) -> str:
    if segment.recompute:
        return "recompute"
    return "offload" if segment.offload else "keep"


def _regions(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Every region that backward runs again, nested ones included."""
    for segment in segments:
        if segment.recompute:
            yield segment
            yield from _regions(segment.inner)


def _started_until(region: Segment) -> int:
    """The block before which a recomputation of this region ends: a region nested at its end is not started."""
    last = region.body()[-1]
    return last.start if last.recompute else region.stop


def _run_again(region: Segment, costs: Sequence[BlockFlops], early_stop: bool) -> int:
    if not early_stop:
        return sum(costs[index].forward for index in range(region.start, region.stop))
    stop = _started_until(region)
    total = sum(costs[index].forward for index in range(region.start, stop))
    return total - costs[stop - 1].tail if stop == region.stop else total


def _check_cover(segments: Sequence[Segment], start: int, stop: int) -> None:
    """Segments must cover the blocks once, in order; a gap would silently drop a block."""
    position = start
    for segment in segments:
        if segment.start != position or segment.stop <= segment.start:
            raise ValueError(
                f"segments must cover blocks {start}..{stop - 1} in order, got {segment} at block {position}"
            )
        if segment.inner:
            _check_cover(segment.inner, segment.start, segment.stop)
            if any(inner.offload for inner in segment.inner):
                raise ValueError(
                    f"nothing inside a region is kept until backward, so nothing can be offloaded: {segment}"
                )
        position = segment.stop
    if position != stop:
        raise ValueError(f"segments end at block {position}, the stack has {stop} blocks")
