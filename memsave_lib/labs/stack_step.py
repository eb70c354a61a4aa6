"""What labs on a stack of the course's blocks have in common: its step, its lengths, the memory that is free for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from memsave_lib import formulas
from memsave_lib.course.env import look_at_machine
from memsave_lib.models import BlockStack


@dataclass(frozen=True)
class StackStep:
    """A stack of blocks on a device, and the size of its steps."""

    n_layers: int
    hidden: int
    heads: int
    batch_size: int
    device: torch.device

    def build(self) -> BlockStack:
        return BlockStack(self.n_layers, self.hidden, self.heads).to(self.device)

    def shape(self, seq_len: int) -> formulas.BlockShape:
        return formulas.BlockShape(self.batch_size, seq_len, self.hidden, self.heads, device=self.device.type)

    def prepare(self, model: BlockStack, seq_len: int) -> Callable[[], torch.Tensor]:
        """Forward and backward, without an optimizer, from the same input every time and without gradients."""
        model.zero_grad(set_to_none=True)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.batch_size, seq_len, self.hidden, generator=generator).to(self.device)

        def step() -> torch.Tensor:
            loss = model(x).sum()
            loss.backward()
            return loss

        return step

    def free_bytes(self) -> int | None:
        machine = look_at_machine()
        return machine.gpu.free_bytes if self.device.type == "cuda" and machine.gpu else machine.host_free_bytes


def lengths_around(seq_len: int) -> tuple[int, ...]:
    """Choices for a slider: from a quarter to four times ``seq_len``."""
    return tuple(sorted({max(8, seq_len * part // 4) for part in (1, 2, 4, 8, 16)}))
