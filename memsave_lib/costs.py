"""What the blocks of a stack cost: FLOPs, bytes that they hold, bytes that they need while they run.

The currency of forecasts: :func:`memsave_lib.profiling.model_costs` reads it off a model,
:func:`memsave_lib.simulate` and :func:`memsave_lib.plan_under_budget` spend it. It knows neither torch nor a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memsave_lib.arguments import whole_number


@dataclass(frozen=True)
class Needs:
    """The most bytes that are alive while a block runs, beside what the blocks before it hold for backward.

    What the block itself holds or saves counts, and so does all that is there anyway: parameters, gradients, the input.

    Args:
        forward, backward: of a block that is kept, or offloaded.
        recomputed_forward, recomputed_backward: of one that is recomputed; its second forward is a part of backward.
    """

    forward: int
    backward: int
    recomputed_forward: int
    recomputed_backward: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            whole_number(name, value, at_least=0)


@dataclass(frozen=True)
class BlockCosts:
    """What one block costs: FLOPs of its phases, bytes of what it saves, bytes that it needs.

    Args:
        forward: FLOPs of one forward.
        backward: FLOPs of one backward, without any recomputation.
        recompute: FLOPs of running forward again as the last block of a region, where PyTorch stops early; default: all
            of ``forward``. Other blocks of a region run in full.
        saved: bytes of each tensor that the block would send away, in the order of packing; its input is the first.
        checkpoint: bytes of the block's input, which is what a region that starts here would send away.
        held: bytes that the block holds for backward when it is kept; default: all of ``saved``. Tensors that are too
            small to travel make it more.
        held_recomputed: bytes that it holds when it is recomputed; default: ``checkpoint``.
        working: bytes that running the block takes beside what it holds or saves: temporaries, gradients.
        needs: the same told apart by phase and action; default: from ``held``, ``held_recomputed`` and ``working``.
    """

    forward: float
    backward: float
    recompute: float | None = None
    saved: tuple[int, ...] = ()
    checkpoint: int = 0
    held: int | None = None
    held_recomputed: int | None = None
    working: int = 0
    needs: Needs | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "recompute"):
            if name != "recompute" or self.recompute is not None:
                _flops(name, getattr(self, name))
        object.__setattr__(self, "saved", tuple(self.saved))
        for number, nbytes in enumerate(self.saved):
            whole_number(f"saved[{number}]", nbytes, at_least=0)
        for name in ("checkpoint", "working"):
            whole_number(name, getattr(self, name), at_least=0)
        if self.held is None:
            object.__setattr__(self, "held", sum(self.saved))
        if self.held_recomputed is None:
            object.__setattr__(self, "held_recomputed", self.checkpoint)
        whole_number("held_recomputed", self.held_recomputed, at_least=0)
        whole_number("held", self.held, at_least=0)
        if self.held < sum(self.saved):
            raise ValueError(f"held must be at least what would be sent away, {sum(self.saved)}, got {self.held}")
        if self.needs is None:
            kept, recomputed = self.held + self.working, self.held_recomputed + self.working
            object.__setattr__(self, "needs", Needs(kept, kept, recomputed, max(kept, recomputed)))

    @property
    def recompute_flops(self) -> float:
        """FLOPs of running forward again in a region of its own."""
        return self.forward if self.recompute is None else self.recompute


@dataclass(frozen=True)
class ModelCosts:
    """The blocks of a model, and the rest of its training step.

    Args:
        blocks: in order.
        turn: the most bytes alive between the last block's forward and its backward, beside what the blocks hold: the
            head and the loss.
        elsewhere: the most bytes alive before the first block's forward and after its backward: embeddings, optimizer.
        flops: FLOPs outside of the blocks.
    """

    blocks: tuple[BlockCosts, ...]
    turn: int = 0
    elsewhere: int = 0
    flops: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if not self.blocks:
            raise ValueError("blocks is empty: a model has at least one block")
        for index, block in enumerate(self.blocks):
            if not isinstance(block, BlockCosts):
                raise TypeError(f"blocks[{index}] must be BlockCosts, got {block!r}")
        whole_number("turn", self.turn, at_least=0)
        whole_number("elsewhere", self.elsewhere, at_least=0)
        _flops("flops", self.flops)

    @classmethod
    def of(cls, costs: Sequence[BlockCosts] | ModelCosts) -> ModelCosts:
        """The costs of a model; those of blocks alone are of a model that has nothing else."""
        if isinstance(costs, ModelCosts):
            return costs
        if not isinstance(costs, Sequence):
            raise TypeError(f"costs are ModelCosts, or a list of BlockCosts, one for each block, got {costs!r}")
        return cls(tuple(costs))

    @property
    def step_flops(self) -> float:
        """FLOPs of a step in which nothing is recomputed."""
        return self.flops + math.fsum(block.forward + block.backward for block in self.blocks)


def _flops(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be FLOPs, a number of at least 0, got {value!r}")
