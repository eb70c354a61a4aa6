"""One forward and backward with dropout: what is alive between the two, what hooks see of it, which gradients come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memsave_lib.course.checks import all_equal
from memsave_lib.meter import MemoryMeter

SEED = 1


@dataclass(frozen=True)
class Outcome:
    """Of one step.

    Args:
        held_bytes: alive after forward, beyond what was before.
        hooked_bytes: what saved-tensor hooks see.
        gradients: of every parameter.
    """

    held_bytes: int
    hooked_bytes: int
    gradients: tuple[Tensor | None, ...]

    def equals(self, other: Outcome) -> bool:
        """Whether all gradients are there and bit-equal."""
        return all_equal(self.gradients, other.gradients)


def outcome(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> Outcome:
    """A step of ``run(x).sum()``, by default of ``model(x).sum()``, from the same random state each time."""
    torch.manual_seed(SEED)
    model.zero_grad()
    with MemoryMeter(model) as meter:
        before = meter.live_bytes
        loss = (run or model)(x).sum()
        held = meter.live_bytes - before
        loss.backward()
    return Outcome(held, meter.trace.saved_bytes, tuple(parameter.grad for parameter in model.parameters()))
