"""What to do with each block of a stack: keep its saved activations, or recompute them in backward.

A strategy is a small frozen dataclass. ``strategy.plan(n_blocks)`` turns it into a :class:`Plan`, which says for every
block what happens to it. Both are pure data: nothing here imports torch, and nothing here touches a model. The runner
(:mod:`memsave_lib.runner`) is the only reader that acts on a plan.

A plan is a tuple of *segments*, in the order of the blocks. A kept segment simply runs. A recomputed segment is a
*region*: only its input survives forward, and backward runs its blocks again. ``Recursive`` nests regions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

OPS = ("attention", "activation", "norm")


@dataclass(frozen=True)
class Segment:
    """Contiguous blocks ``start .. stop - 1`` that are kept, or recomputed as one region.

    ``inner`` says how the blocks of a region run whenever the region runs; empty means: all kept.
    """

    start: int
    stop: int
    recompute: bool = False
    inner: tuple[Segment, ...] = ()

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
        """``"keep"`` or ``"recompute"`` for each block. Operations inside a block are in ``recompute_ops``."""
        return tuple(
            "recompute" if segment.recompute else "keep" for segment in self.segments for _ in range(segment.n_blocks)
        )

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

    def describe(self) -> str:
        """One line a block: what happens to it and, for a recomputed block, in which region."""
        suffix = f", recomputing inside: {', '.join(self.recompute_ops)}" if self.recompute_ops else ""
        counts = self.recompute_counts()
        lines = []
        for segment in self.segments:
            for index in range(segment.start, segment.stop):
                if not segment.recompute:
                    lines.append(f"block {index:>2}: keep{suffix}")
                    continue
                where = "" if segment.n_blocks == 1 else f", region of blocks {segment.start}-{segment.stop - 1}"
                again = "" if counts[index] == 1 else f", started again {counts[index]} times"
                lines.append(f"block {index:>2}: recompute{where}{again}")
        return "\n".join(lines)


class Strategy(ABC):
    """A rule that gives every stack, whatever its depth, a :class:`Plan`."""

    @abstractmethod
    def plan(self, n_blocks: int) -> Plan:
        """The plan for a stack of ``n_blocks`` blocks; ValueError when the strategy does not fit that depth."""

    @property
    @abstractmethod
    def label(self) -> str:
        """A few words for tables and legends."""


@dataclass(frozen=True)
class KeepAll(Strategy):
    """Keep every saved activation: what PyTorch does on its own, and what all strategies are compared with."""

    label = "keep all"

    def plan(self, n_blocks: int) -> Plan:
        n_blocks = _positive("n_blocks", n_blocks)
        return Plan(n_blocks, (Segment(0, n_blocks),))


@dataclass(frozen=True)
class FullCheckpoint(Strategy):
    """Keep only the input of each block; recompute one block at a time in backward."""

    label = "full checkpoint"

    def plan(self, n_blocks: int) -> Plan:
        n_blocks = _positive("n_blocks", n_blocks)
        return Plan(n_blocks, tuple(Segment(i, i + 1, recompute=True) for i in range(n_blocks)))


@dataclass(frozen=True)
class Selective(Strategy):
    """Keep block ``i`` when ``i % checkpoint_every == 0``, recompute all others one by one.

    ``checkpoint_every=1`` keeps all. Other tools count the other way round: Hugging Face's ``every_n_layers=n`` and
    torchtitan's layer frequency *recompute* every n-th block.
    """

    checkpoint_every: int = 2

    def __post_init__(self) -> None:
        _positive("checkpoint_every", self.checkpoint_every)

    @property
    def label(self) -> str:
        return f"selective, k={self.checkpoint_every}"

    def plan(self, n_blocks: int) -> Plan:
        n_blocks = _positive("n_blocks", n_blocks)
        return Plan(
            n_blocks,
            tuple(Segment(i, i + 1, recompute=i % self.checkpoint_every != 0) for i in range(n_blocks)),
        )


@dataclass(frozen=True)
class SelectiveOps(Strategy):
    """Keep every block, but recompute cheap operations inside each of them.

    Args:
        recompute: any of ``"attention"`` (the attention core), ``"activation"`` (between the two feed-forward
            projections) and ``"norm"`` (both LayerNorms); one name may be given as a plain string.
    """

    recompute: tuple[str, ...] = OPS

    def __post_init__(self) -> None:
        names = (self.recompute,) if isinstance(self.recompute, str) else tuple(self.recompute)
        if not names:
            raise ValueError(
                f"SelectiveOps(recompute=()) recomputes nothing; name at least one of {OPS}, or use KeepAll()"
            )
        for name in names:
            if name not in OPS:
                raise ValueError(f"SelectiveOps(recompute=...) got {name!r}; it knows {', '.join(map(repr, OPS))}")
        if len(set(names)) != len(names):
            raise ValueError(f"SelectiveOps(recompute={names!r}) names an operation twice")
        # One order, so that equal sets give equal strategies.
        object.__setattr__(self, "recompute", tuple(op for op in OPS if op in names))

    @property
    def label(self) -> str:
        return "recompute " + " + ".join(self.recompute)

    def plan(self, n_blocks: int) -> Plan:
        n_blocks = _positive("n_blocks", n_blocks)
        return Plan(n_blocks, (Segment(0, n_blocks),), recompute_ops=self.recompute)


@dataclass(frozen=True)
class Chunked(Strategy):
    """Cut the stack into ``num_checkpoints`` contiguous chunks and recompute each as one region.

    Chunks that cannot be equal differ by one block, the larger ones first. ``recompute_last=False`` leaves the last
    chunk alone, as ``torch.utils.checkpoint.checkpoint_sequential`` does: backward needs it at once, so with equal
    chunks the peak stays the same and one chunk's forward is saved.
    """

    num_checkpoints: int = 4
    recompute_last: bool = True

    def __post_init__(self) -> None:
        _positive("num_checkpoints", self.num_checkpoints)
        if not isinstance(self.recompute_last, bool):
            raise TypeError(f"recompute_last is True or False, got {self.recompute_last!r}")

    @property
    def label(self) -> str:
        chunks = "1 chunk" if self.num_checkpoints == 1 else f"{self.num_checkpoints} chunks"
        return chunks if self.recompute_last else f"{chunks}, last one kept"

    def plan(self, n_blocks: int) -> Plan:
        n_blocks = _positive("n_blocks", n_blocks)
        if self.num_checkpoints > n_blocks:
            raise ValueError(
                f"Chunked(num_checkpoints={self.num_checkpoints}) needs at least {self.num_checkpoints} blocks, "
                f"this stack has {n_blocks}: choose 1 to {n_blocks} chunks"
            )
        bounds = [0]
        for size in chunk_sizes(n_blocks, self.num_checkpoints):
            bounds.append(bounds[-1] + size)
        last = self.num_checkpoints - 1
        return Plan(
            n_blocks,
            tuple(
                Segment(start, stop, recompute=self.recompute_last or number != last)
                for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False))
            ),
        )

    @classmethod
    def best(cls, n_blocks: int, block_bytes: int, checkpoint_bytes: int) -> Chunked:
        """The number of chunks with the lowest peak, found by trying every one.

        While chunk ``j`` (from 1) runs backward, ``j`` checkpoints and the saved activations of its blocks are alive.
        For equal chunks the minimum lies near ``sqrt(n_blocks * block_bytes / checkpoint_bytes)``: the familiar
        ``sqrt(n_blocks)`` holds only where a block saves no more than its own input. Of equal peaks the one with more
        chunks wins, because early stop spares each chunk the end of its last block.

        Args:
            n_blocks: blocks in the stack.
            block_bytes: saved bytes of one block, its input included.
            checkpoint_bytes: bytes of one block's input.
        """
        n_blocks = _positive("n_blocks", n_blocks)
        _positive("block_bytes", block_bytes)
        _positive("checkpoint_bytes", checkpoint_bytes)

        def peak(chunks: int) -> int:
            sizes = chunk_sizes(n_blocks, chunks)
            return max(alive * checkpoint_bytes + size * block_bytes for alive, size in enumerate(sizes, start=1))

        return cls(min(range(1, n_blocks + 1), key=lambda chunks: (peak(chunks), -chunks)))


@dataclass(frozen=True)
class Recursive(Strategy):
    """Bisection: recompute the left half as a region, treat the right half the same way, down to single blocks.

    A stack of L blocks keeps about log2(L) checkpoints and one live block, and starts (L / 2) * log2(L) blocks again.
    """

    label = "recursive"

    def plan(self, n_blocks: int) -> Plan:
        n_blocks = _positive("n_blocks", n_blocks)
        return Plan(n_blocks, _bisect(0, n_blocks))


def chunk_sizes(n_blocks: int, num_checkpoints: int) -> tuple[int, ...]:
    """Blocks in each of ``num_checkpoints`` chunks, the larger first."""
    size, larger = divmod(n_blocks, num_checkpoints)
    return (size + 1,) * larger + (size,) * (num_checkpoints - larger)


def _bisect(start: int, stop: int) -> tuple[Segment, ...]:
    if stop - start == 1:
        return (Segment(start, stop),)
    middle = (start + stop + 1) // 2
    left = Segment(start, middle, recompute=True, inner=_bisect(start, middle))
    return (left, *_bisect(middle, stop))


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
        position = segment.stop
    if position != stop:
        raise ValueError(f"segments end at block {position}, the stack has {stop} blocks")


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number of at least 1, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value
