"""What to do with each block of a stack: keep its saved activations, recompute them in backward, or send them away.

A strategy is a small frozen dataclass: a rule for stacks of any depth. ``strategy.plan(n_blocks)`` turns it into a
:class:`~memsave_lib.plan.Plan`, which says for every block what happens to it. Both are pure data: nothing here imports
torch or touches a model. The runner (:mod:`memsave_lib.runner`) is the only reader that acts on a plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memsave_lib.arguments import whole_number
from memsave_lib.plan import BlockFlops, Plan, RegionFlops, Segment
from memsave_lib.units import parse_bytes

if TYPE_CHECKING:
    from memsave_lib.stores import Store

__all__ = [
    "OPS",
    "BlockFlops",
    "Chunked",
    "FullCheckpoint",
    "KeepAll",
    "Offload",
    "Offloading",
    "PerBlock",
    "Plan",
    "Recursive",
    "RegionFlops",
    "Segment",
    "Selective",
    "SelectiveOps",
    "Strategy",
    "chunk_sizes",
]

OPS = ("attention", "activation", "norm")
ACTIONS = ("keep", "recompute", "offload")
#: Below it, asking for a copy costs more than the bytes are worth: statistics, log-sum-exp, masks of short sequences.
MIN_BYTES = 64 * 1024


@dataclass(frozen=True)
class Offloading:
    """How tensors travel; see :class:`Offload`."""

    store: str | Store
    min_bytes: int
    prefetch: int

    def __post_init__(self) -> None:
        named = self.store in ("host", "disk") if isinstance(self.store, str) else hasattr(self.store, "lane")
        if not named or isinstance(self.store, type):
            raise ValueError(
                f'store is "host", "disk" or a store such as HostStore(max_bytes="4 GiB"), got {self.store!r}'
            )
        object.__setattr__(self, "min_bytes", parse_bytes(self.min_bytes))
        whole_number("prefetch", self.prefetch, at_least=0)

    @property
    def label(self) -> str:
        return self.store if isinstance(self.store, str) else type(self.store).__name__


class Strategy(ABC):
    """A rule that gives every stack, whatever its depth, a :class:`Plan`."""

    @abstractmethod
    def plan(self, n_blocks: int) -> Plan:
        """The plan for a stack of ``n_blocks`` blocks; ValueError when the strategy does not fit that depth."""

    @property
    @abstractmethod
    def label(self) -> str:
        """A few words for tables and legends."""

    @property
    def offloading(self) -> Offloading | None:
        """How to send away what the plan offloads; None for strategies that offload nothing."""
        return None


@dataclass(frozen=True)
class KeepAll(Strategy):
    """Keep every saved activation: what PyTorch does on its own, and what all strategies are compared with."""

    label = "keep all"

    def plan(self, n_blocks: int) -> Plan:
        n_blocks = whole_number("n_blocks", n_blocks)
        return Plan(n_blocks, (Segment(0, n_blocks),))


@dataclass(frozen=True)
class FullCheckpoint(Strategy):
    """Keep only the input of each block; recompute one block at a time in backward."""

    label = "full checkpoint"

    def plan(self, n_blocks: int) -> Plan:
        n_blocks = whole_number("n_blocks", n_blocks)
        return Plan(n_blocks, tuple(Segment(i, i + 1, recompute=True) for i in range(n_blocks)))


@dataclass(frozen=True)
class Selective(Strategy):
    """Keep block ``i`` when ``i % checkpoint_every == 0``, recompute all others one by one.

    ``checkpoint_every=1`` keeps all. Other tools count the other way round: Hugging Face's ``every_n_layers=n`` and
    torchtitan's layer frequency *recompute* every n-th block.
    """

    checkpoint_every: int = 2

    def __post_init__(self) -> None:
        whole_number("checkpoint_every", self.checkpoint_every)

    @property
    def label(self) -> str:
        return f"selective, k={self.checkpoint_every}"

    def plan(self, n_blocks: int) -> Plan:
        n_blocks = whole_number("n_blocks", n_blocks)
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
        n_blocks = whole_number("n_blocks", n_blocks)
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
        whole_number("num_checkpoints", self.num_checkpoints)
        if not isinstance(self.recompute_last, bool):
            raise TypeError(f"recompute_last is True or False, got {self.recompute_last!r}")

    @property
    def label(self) -> str:
        chunks = "1 chunk" if self.num_checkpoints == 1 else f"{self.num_checkpoints} chunks"
        return chunks if self.recompute_last else f"{chunks}, last one kept"

    def plan(self, n_blocks: int) -> Plan:
        n_blocks = whole_number("n_blocks", n_blocks)
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
        n_blocks = whole_number("n_blocks", n_blocks)
        whole_number("block_bytes", block_bytes)
        whole_number("checkpoint_bytes", checkpoint_bytes)

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
        n_blocks = whole_number("n_blocks", n_blocks)
        return Plan(n_blocks, _bisect(0, n_blocks))


@dataclass(frozen=True)
class Offload(Strategy):
    """Follow another strategy, and send away what it keeps: every saved tensor of a kept block, the input of a region.

    Args:
        strategy: what to do with the blocks. ``KeepAll()`` offloads everything, ``FullCheckpoint()`` the checkpoints.
        store: where the bytes go: ``"host"``, ``"disk"`` or a store of your own making.
        keep_last: how many regions at the end of the stack stay (blocks, where blocks are kept): backward wants them
            at once.
        min_bytes: smaller tensors stay; a number or a string such as ``"1 MiB"``.
        prefetch: how many tensors may be on their way at once: out during forward, and back ahead of use during
            backward. 0 waits for every copy where it happens.
    """

    strategy: Strategy = KeepAll()
    store: str | Store = "host"
    keep_last: int = 1
    min_bytes: int | str = MIN_BYTES
    prefetch: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise TypeError(f"strategy is a strategy such as KeepAll(), got {self.strategy!r}")
        if self.strategy.offloading is not None:
            raise ValueError(f"{self.strategy} offloads already: hand it to apply() as it is")
        whole_number("keep_last", self.keep_last, at_least=0)
        object.__setattr__(self, "min_bytes", self.offloading.min_bytes)

    @property
    def offloading(self) -> Offloading:
        return Offloading(self.store, self.min_bytes, self.prefetch)

    @property
    def label(self) -> str:
        where = f"offload to {self.offloading.label}"
        return where if self.strategy == KeepAll() else f"{self.strategy.label}, {where}"

    def plan(self, n_blocks: int) -> Plan:
        plan = self.strategy.plan(n_blocks)
        units = tuple(_units(plan.segments))
        sent = len(units) - self.keep_last
        return replace(plan, segments=tuple(replace(unit, offload=i < sent) for i, unit in enumerate(units)))


@dataclass(frozen=True)
class PerBlock(Strategy):
    """Say for each block what happens to it: ``PerBlock(("offload", "recompute", "keep"))``.

    Args:
        actions: ``"keep"``, ``"recompute"`` or ``"offload"``, one for each block of the stack.
        store, min_bytes, prefetch: for the blocks to offload, as in :class:`Offload`.
    """

    actions: tuple[str, ...]
    store: str | Store = "host"
    min_bytes: int | str = MIN_BYTES
    prefetch: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.actions, str) or not all(action in ACTIONS for action in self.actions):
            raise ValueError(f"actions is a tuple of {', '.join(map(repr, ACTIONS))}, got {self.actions!r}")
        object.__setattr__(self, "actions", tuple(self.actions))
        if not self.actions:
            raise ValueError("actions is empty: name one for each block")
        options = Offloading(self.store, self.min_bytes, self.prefetch)
        object.__setattr__(self, "min_bytes", options.min_bytes)

    @property
    def offloading(self) -> Offloading | None:
        return Offloading(self.store, self.min_bytes, self.prefetch) if "offload" in self.actions else None

    @property
    def label(self) -> str:
        counts = [f"{self.actions.count(action)} {action}" for action in ACTIONS if action in self.actions]
        return f"per block: {', '.join(counts)}"

    def plan(self, n_blocks: int) -> Plan:
        n_blocks = whole_number("n_blocks", n_blocks)
        if n_blocks != len(self.actions):
            raise ValueError(f"PerBlock names {len(self.actions)} actions, this stack has {n_blocks} blocks")
        return Plan(
            n_blocks,
            tuple(
                Segment(i, i + 1, recompute=action == "recompute", offload=action == "offload")
                for i, action in enumerate(self.actions)
            ),
        )


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


def _units(segments: tuple[Segment, ...]) -> Iterator[Segment]:
    """Regions as they are, kept segments block by block."""
    for segment in segments:
        if segment.recompute:
            yield segment
        else:
            yield from (Segment(index, index + 1) for index in range(segment.start, segment.stop))
