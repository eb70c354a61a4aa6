"""What labs on a stack of the course's blocks have in common: its step, what to expect of it, choices for sliders."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memsave_lib import formulas
from memsave_lib.arguments import whole_number
from memsave_lib.course.env import look_at_machine, resolve_device
from memsave_lib.labs.config import Job, Prediction
from memsave_lib.models import BlockStack
from memsave_lib.plan import Plan
from memsave_lib.strategies import Strategy


@dataclass(frozen=True)
class StackStep:
    """A step of a stack of blocks: forward and backward of the sum of its output, without an optimizer."""

    n_layers: int
    hidden: int
    heads: int
    batch_size: int
    seq_len: int
    device: torch.device
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        for name in ("n_layers", "hidden", "heads", "batch_size", "seq_len"):
            whole_number(name, getattr(self, name))
        self.shape  # noqa: B018 - refuses heads that do not divide hidden

    @classmethod
    def on(
        cls, device: str | torch.device, n_layers: int, hidden: int, heads: int, batch_size: int, seq_len: int
    ) -> StackStep:
        """On a device of this machine; ``"auto"`` is a GPU where there is one."""
        return cls(n_layers, hidden, heads, batch_size, seq_len, resolve_device(str(device)))

    @property
    def shape(self) -> formulas.BlockShape:
        return formulas.BlockShape(
            self.batch_size, self.seq_len, self.hidden, self.heads, device=self.device.type, attention=self.attention
        )

    def job(self, strategy: Strategy) -> Job:
        """A new model, without gradients, and an input. They are made on the CPU, whose dice are put back."""
        with torch.random.fork_rng(devices=[]):
            model = BlockStack(self.n_layers, self.hidden, self.heads, attention=self.attention)
            x = torch.randn(self.batch_size, self.seq_len, self.hidden)
        # Predictions are for this type, whatever the default is.
        model, x = model.to(self.device, torch.float32), x.to(self.device, torch.float32)

        def step() -> None:
            model(x).sum().backward()

        return Job(model, strategy, step)

    def predict(self, plan: Plan, budget_bytes: int | None = None, remark: str = "") -> Prediction:
        """What a step under this plan saves and holds. The peak is predicted on a CPU only, and without offloading."""
        parameters = formulas.stack_parameter_bytes(self.shape, self.n_layers)
        here = formulas.stack_saved_bytes(plan, self.shape)
        sent = formulas.offloaded_bytes(plan, self.shape) if plan.offloads else None
        if plan.offloads or self.device.type != "cpu":
            needed = parameters + here + (sent or 0)
            return Prediction(here, None, needed, sent, None, budget_bytes, remark)
        options = {"loss": "sum", "input_requires_grad": False, "new_gradients": True}
        forecast = formulas.stack_forecast(plan, self.shape, parameters, **options)
        peak = forecast.peak.live_bytes
        return Prediction(here, peak, peak, None, forecast, budget_bytes, remark)

    def free_bytes(self) -> int | None:
        machine = look_at_machine()
        return machine.gpu.free_bytes if self.device.type == "cuda" and machine.gpu else machine.host_free_bytes


def lengths_around(seq_len: int, halvings: int = 2) -> tuple[int, ...]:
    """Choices for a slider: ``seq_len``, halved so many times, and doubled twice; none below 8."""
    shorter = {seq_len, *(max(8, seq_len >> count) for count in range(1, halvings + 1))}
    return tuple(sorted(shorter | {2 * seq_len, 4 * seq_len}))


def up_to_twice(number: int) -> range:
    """Choices for a slider: from 1 to twice ``number``."""
    return range(1, 2 * number + 1)
