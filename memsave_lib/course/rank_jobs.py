"""What several ranks are asked to do together, and what each of them finds: plain data that processes exchange."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from memsave_lib.arguments import whole_number
from memsave_lib.placement import check_strategy
from memsave_lib.strategies import Strategy

WRAPPERS = ("DDP", "FSDP2")
MODELS = ("stack", "gpt2")
VOCABULARY = 256  # of the GPT-2
#: The last operation of a chunk: its output is a tensor of its own, or a view of one.
ENDS = ("an addition", "a Linear")
#: The first PyTorch whose FSDP2 leaves the weights whole that a recomputation gathers, on a CPU too.
OLDEST_FOR_FSDP2 = "2.11"


def why_not(wrapper: str) -> str:
    """Why a wrapper cannot be used with this PyTorch, as a sentence; "" when it can."""
    version = importlib.metadata.version("torch")
    if wrapper != "FSDP2" or _numbers(version) >= _numbers(OLDEST_FOR_FSDP2):
        return ""
    return f"FSDP2 is not run here: it needs PyTorch {OLDEST_FOR_FSDP2} or newer on a CPU, and this is {version}."


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


class Job(Protocol):
    """What every rank does; it must survive ``pickle``."""

    n_ranks: int

    def rows(self) -> list[dict[str, Any]]:
        """Called in each rank, inside a process group: what it found, in values that JSON knows."""


@dataclass(frozen=True)
class Run:
    """One training step under a wrapper of PyTorch's and a strategy of ours.

    Args:
        wrapper: ``"DDP"`` (DistributedDataParallel) or ``"FSDP2"`` (``fully_shard`` on each block and on the model).
        strategy: applied with ``ms.apply``.
        model: ``"stack"``, the course's blocks, or ``"gpt2"``, Hugging Face's with a vocabulary of 256.
        apply_first: before the model is wrapped, instead of after it.
    """

    wrapper: str
    strategy: Strategy
    model: str = "stack"
    apply_first: bool = False

    def __post_init__(self) -> None:
        for name, known in (("wrapper", WRAPPERS), ("model", MODELS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is one of {', '.join(map(repr, known))}, got {getattr(self, name)!r}")
        check_strategy(self.strategy)


@dataclass(frozen=True)
class Training:
    """Training steps on several ranks, each with sequences of its own.

    Args:
        runs: what to train, one after the other, each time a new model with the same weights.
        n_layers, hidden, heads, seq_len: of the model.
        batch_size: sequences **of one rank**; the whole batch has ``n_ranks`` times as many.
        n_ranks: 2, 4, 8, ...: only by a power of two does everybody divide without rounding.
    """

    runs: tuple[Run, ...]
    n_layers: int
    hidden: int
    heads: int
    batch_size: int
    seq_len: int
    n_ranks: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n_layers", "hidden", "heads", "batch_size", "seq_len"):
            whole_number(name, getattr(self, name))
        whole_number("n_ranks", self.n_ranks, at_least=2)
        if self.n_ranks & (self.n_ranks - 1):
            raise ValueError(f"n_ranks is a power of two, got {self.n_ranks}")

    def rows(self) -> list[dict[str, Any]]:
        from memsave_lib.course import rank_training  # needs PyTorch's distributed packages

        return rank_training.rows(self)


@dataclass(frozen=True)
class Outcome:
    """What one rank found in one run. Bytes are those of this rank.

    Args:
        saved_bytes: of activations, at the end of forward.
        parameter_bytes, gradient_bytes, average_bytes: what it holds between two steps; the averages are Adam's two.
        collectives: operations that all ranks did together in the step: name -> how many.
        gathered_bytes: what came out of its all-gathers.
        whole_blocks: the most blocks whose weights were whole at once, in forward or in backward.
        block_recomputes: blocks started again in backward.
        equals_plain: every gradient is, bit by bit, that of the same wrapper without a strategy.
        equals_one_process: every gradient is, bit by bit, that of one process which does the ranks' work one after
            the other: forward and backward on each rank's sequences, the loss divided by the number of ranks, gradients
            accumulated.
        off_whole_batch: one forward and backward on the whole batch adds the same products in another order: the
            largest difference to a gradient of that, relative to the largest number in it.
    """

    rank: int
    run: Run
    saved_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    average_bytes: int
    collectives: Mapping[str, int]
    gathered_bytes: int
    whole_blocks: int
    block_recomputes: int
    equals_plain: bool
    equals_one_process: bool
    off_whole_batch: float

    @property
    def all_gathers(self) -> int:
        return self.collectives.get("all-gather", 0)

    @property
    def reduce_scatters(self) -> int:
        return self.collectives.get("reduce-scatter", 0)


@dataclass(frozen=True)
class Partitioning:
    """A stack in chunks under DeepSpeed's checkpoint, whose inputs are shared out among ranks that all hold the same.

    Such ranks are model-parallel: each computes its part of every layer, and all of them have the whole hidden states.
    Here each computes everything, which changes no byte of a checkpoint.
    """

    n_chunks: int
    blocks_in_chunk: int
    hidden: int
    heads: int
    batch_size: int
    seq_len: int
    n_ranks: int = 2
    seed: int = 0

    def rows(self) -> list[dict[str, Any]]:
        from memsave_lib.course import rank_partition  # needs PyTorch's distributed packages

        return rank_partition.rows(self)


@dataclass(frozen=True)
class Held:
    """What one rank held after forward, the loss included.

    Args:
        end: the last operation of each chunk, one of ``ENDS``.
        partitioned: whether DeepSpeed's ``partition_activations`` was on.
        equals_plain: loss and every gradient are, bit by bit, those of one process without checkpoints.
    """

    rank: int
    end: str
    partitioned: bool
    held_bytes: int
    equals_plain: bool
