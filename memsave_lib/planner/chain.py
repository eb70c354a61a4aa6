"""The planner's model of a training step: a chain of blocks, and copies as a fluid.

Each block is *kept*, *recomputed* or *offloaded*. What blocks hold adds up; a block that runs needs room beside that.
Offloaded bytes leave through a pipe of ``B`` bytes a second while computation goes on. Those that have not left yet,
the backlog ``Q``, take memory, and computation waits when there is no room for the next block, just long enough:

    forward of block i:   wait until  held + Q + need <= budget,  then  Q = max(0, Q - B * seconds) + bytes sent by i

At the end of forward the rest drains. Backward is the same film run in reverse: a block's bytes must be back before its
backward begins, so seen from the end of the step they pour in behind it, with a backlog ``R`` of bytes that lie here
ahead of use. Both recursions go through the blocks in order, so one pass over them prices a plan.

It is a model: tensors are no fluid, and the engine lets a number of tensors travel at once, not whatever fits.
:func:`memsave_lib.simulate` moves whole tensors and gives the honest time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memsave_lib.costs import BlockCosts, ModelCosts
from memsave_lib.devices import Device
from memsave_lib.simulation import LINKS
from memsave_lib.strategies import ACTIONS

KEEP, RECOMPUTE, OFFLOAD = range(3)


@dataclass(frozen=True)
class Chain:
    """The numbers of a plan: one row a block, and one column an action where it depends on that.

    Attributes:
        forward, backward: seconds; ``backward[i, a]`` includes running forward again.
        extra: seconds of running forward again: 0 but for recomputed blocks.
        held: bytes that stay until backward. sent: bytes that leave.
        need_forward, need_backward: bytes alive while the block runs, beside what the blocks before it hold.
        out, back: bytes a second of the link, each way; without a link, where nothing travels, any number will do.
        turn, elsewhere: as in :class:`~memsave_lib.costs.ModelCosts`.
        allowed: which actions there are: no offloading without a link.
    """

    forward: np.ndarray
    backward: np.ndarray
    extra: np.ndarray
    held: np.ndarray
    sent: np.ndarray
    need_forward: np.ndarray
    need_backward: np.ndarray
    out: float
    back: float
    turn: int
    elsewhere: int
    allowed: tuple[int, ...]

    @classmethod
    def of(cls, costs: ModelCosts, device: Device, link: str, actions: Sequence[str] = ACTIONS) -> Chain:
        blocks, flops = costs.blocks, device.need("flops")
        names = LINKS[link]
        reached = [getattr(device, name) for name in names]
        can_offload = "offload" in actions and None not in reached
        out, back = reached if can_offload else (1.0, 1.0)

        def rows(*columns: float | int) -> np.ndarray:
            return np.array(columns, dtype=float)

        return cls(
            forward=np.array([block.forward / flops for block in blocks]),
            backward=np.array([rows(*[b.backward] * 3) + rows(0, b.recompute_flops, 0) for b in blocks]) / flops,
            extra=np.array([rows(0, block.recompute_flops, 0) for block in blocks]) / flops,
            held=np.array([rows(b.held, b.held_recomputed, b.held - sum(b.saved)) for b in blocks]),
            sent=np.array([rows(0, 0, sum(block.saved)) for block in blocks]),
            need_forward=np.array([_need(b, b.needs.forward, b.needs.recomputed_forward) for b in blocks]),
            need_backward=np.array([_need(b, b.needs.backward, b.needs.recomputed_backward) for b in blocks]),
            out=out,
            back=back,
            turn=costs.turn,
            elsewhere=costs.elsewhere,
            allowed=tuple(i for i, name in enumerate(ACTIONS) if name in actions and (i != OFFLOAD or can_offload)),
        )

    @property
    def n_blocks(self) -> int:
        return len(self.forward)

    @property
    def plain_seconds(self) -> float:
        """Forward and backward of all blocks when everything is kept."""
        return math.fsum(self.forward) + math.fsum(self.backward[:, KEEP])

    @property
    def least_bytes(self) -> float:
        """What is alive at any moment between the first block and the last, whatever the plan."""
        return min(self.need_forward.min(), self.need_backward.min(), self.turn)

    @property
    def most_bytes(self) -> float:
        """What no plan exceeds at any moment between the first block and the last."""
        need = max(self.need_forward.max(), self.need_backward.max(), self.turn)
        return float((self.held + self.sent).max(axis=1).sum() + need)

    def extra_seconds(self, plans: np.ndarray | Sequence[Sequence[int]], budget: float) -> np.ndarray:
        """What each plan, a row of actions, costs beyond the plain step: recomputation, waiting; ``inf``: no room."""
        plans = np.asarray(plans)
        seconds, held, leaving, ahead = np.zeros((4, len(plans)))
        room = np.full(len(plans), self.elsewhere <= budget) & np.isin(plans, self.allowed).all(axis=1)
        for i, action in enumerate(plans.T):
            free_forward = budget - held - self.need_forward[i, action]
            free_backward = budget - held - self.need_backward[i, action]
            room &= (free_forward >= 0) & (free_backward >= 0)
            still, early = np.minimum(leaving, free_forward), np.minimum(ahead, free_backward)
            seconds += self.extra[i, action] + (leaving - still) / self.out + (ahead - early) / self.back
            leaving = np.maximum(0.0, still - self.out * self.forward[i]) + self.sent[i, action]
            ahead = np.maximum(0.0, early - self.back * self.backward[i, action]) + self.sent[i, action]
            held = held + self.held[i, action]
        room &= held + self.turn <= budget
        return np.where(room, seconds + leaving / self.out + ahead / self.back, math.inf)

    def floor(self) -> tuple[int, str]:
        """The smallest budget that some plan fits, copies waited for on the spot, and what sets it."""
        needs = max(self.turn, self.need_forward.max(), self.need_backward.max()) + self.held.max(axis=1).sum()
        low, high = self.elsewhere, int(max(self.elsewhere, needs))
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.leanest(middle)[1] else (low, middle)
        return low, self.leanest(low - 1)[1]

    def leanest(self, budget: float) -> tuple[tuple[int, ...], str]:
        """The plan that holds least, and the first moment of the step for which it leaves no room; "" when it fits.

        Greedy: of the actions that there is room for, the one that holds least is best for all blocks behind. Where
        this plan does not fit, none does.
        """
        if self.elsewhere > budget:
            return (), "what is outside of the blocks: parameters, gradients, embeddings, the optimizer"
        plan: list[int] = []
        held = 0.0
        for i in range(self.n_blocks):
            need = np.maximum(self.need_forward[i], self.need_backward[i])
            fitting = [action for action in self.allowed if held + need[action] <= budget]
            if not fitting:
                return (), f"block {i} at work, beside the least that the blocks before it can hold"
            plan.append(min(fitting, key=lambda action: self.held[i, action]))
            held += self.held[i, plan[-1]]
        turn = "the turn from forward to backward: the head and the loss (logits of a large vocabulary)"
        return tuple(plan), turn if held + self.turn > budget else ""

    def peak_bytes(self, plan: Sequence[int], tensors: Sequence[Sequence[int]], prefetch: int) -> int:
        """The peak when up to ``prefetch`` whole tensors are under way, out or back ahead of use, at any time.

        Args:
            tensors: bytes of each tensor that a block sends, in order, where it is offloaded.
        """
        peak, held, under_way = float(self.elsewhere), 0.0, deque[int](maxlen=prefetch)
        for i, action in enumerate(plan):
            need = max(self.need_forward[i, action], self.need_backward[i, action])
            peak = max(peak, held + sum(under_way) + need)
            held += self.held[i, action]
            under_way.extend(tensors[i] if action == OFFLOAD else ())
        return int(max(peak, held + self.turn))


def _need(block: BlockCosts, kept: int, recomputed: int) -> np.ndarray:
    return np.array([kept, recomputed, kept], dtype=float)
