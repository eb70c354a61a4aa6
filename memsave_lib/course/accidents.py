"""Accidents of measuring a training step, each of them measured on small models.

So the check of an exercise can say which one is left in a learner's function, alone or with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memsave_lib.meter import MemoryMeter
from memsave_lib.models import gpt2
from memsave_lib.trace import Trace


@dataclass(frozen=True)
class StepCase:
    """A small GPT-2 with gradients that nobody cleared, an optimizer that has never stepped, and batches."""

    n_layers: int
    hidden: int
    vocab_size: int
    seq_len: int
    batch: int
    n_batches: int

    def __str__(self) -> str:
        return (
            f"a GPT-2 with n_layers={self.n_layers}, hidden={self.hidden}, {self.vocab_size} tokens to choose from, "
            f"and batches of {self.batch} x {self.seq_len}"
        )

    @property
    def n_parameters(self) -> int:
        """Parameter tensors, a shared one once: two embeddings, 12 a block, and the last LayerNorm's two."""
        return 12 * self.n_layers + 4

    def fresh(self) -> tuple[nn.Module, Optimizer, list[Tensor]]:
        """Arguments for one call. The batches are one storage: it is alive as a whole, however many are looked at."""
        model = gpt2(
            "tiny",
            n_layer=self.n_layers,
            n_embd=self.hidden,
            n_head=1,
            n_positions=self.seq_len,
            vocab_size=self.vocab_size,
            use_cache=False,
        )
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        batches = torch.zeros(self.n_batches, self.batch, self.seq_len, dtype=torch.int64)
        return model, torch.optim.AdamW(model.parameters()), list(batches)


#: The first peaks at the loss, where all that forward saved is alive; the second in the optimizer's step.
CASES = (StepCase(1, 64, 512, 64, 2, 2), StepCase(2, 64, 256, 8, 1, 3))


@dataclass(frozen=True)
class Accidents:
    """What may be wrong with the measured step.

    Args:
        gradients: cleared before the meter starts, never, or only when the losses have been watched.
        cold: no step went before it.
        held: what is alive, with its graph, when the step begins: the losses that were watched, the last one, or the
            output that it came from, with its logits. "until forward": in a variable that the step's own forward then
            overwrites.
        steps: whether the optimizer does.
        out: whether a variable holds the output of the measured step, and the logits with it.
    """

    gradients: Literal["cleared", "stale", "late"] = "cleared"
    cold: bool = False
    held: Literal["none", "all", "last", "last until forward", "output", "output until forward"] = "none"
    steps: bool = True
    out: bool = False

    def trace(self, case: StepCase) -> Trace:
        """The step, measured with these accidents."""
        model, optimizer, batches = case.fresh()
        if not self.cold:
            _output(model, batches[0]).loss.backward()
            optimizer.step()
        if self.gradients == "cleared":
            optimizer.zero_grad()
        with MemoryMeter(model, optimizer) as meter:
            held = self._watch(model, batches)
            if self.gradients == "late":
                optimizer.zero_grad()
            out = _output(model, batches[0])
            loss = out.loss
            if not self.out:
                del out
            if self.held.endswith("until forward"):
                held.clear()
            loss.backward()
            del loss
            if self.steps:
                optimizer.step()
        return meter.trace

    def _watch(self, model: nn.Module, batches: Sequence[Tensor]) -> list[object]:
        """Forward over all batches; returns the losses or outputs that stay alive, their graphs with them."""
        held: list[object] = []
        for batch in batches:
            out = _output(model, batch)
            held.append(out if self.held.startswith("output") else out.loss)
            del out
            if self.held == "none":
                held.clear()
            elif self.held != "all":
                del held[:-1]
        return held

    @property
    def reasons(self) -> list[str]:
        """A sentence for each accident, with what to do."""
        found = [_GRADIENTS.get(self.gradients), _COLD if self.cold else None, _HELD.get(self.held)]
        found += [None if self.steps else _NO_STEP, _OUT if self.out else None]
        return [reason for reason in found if reason]


_GRADIENTS = {
    "stale": "Gradients are alive when the measured step begins: those of an earlier step, zeros "
    "(set_to_none=False), or those of a backward in the watching loop. Watch without backward, and call "
    "optimizer.zero_grad() before the meter starts.",
    "late": "zero_grad() comes only when the losses have been watched, and until then old gradients are alive: call it "
    "before the meter starts.",
}
_COLD = (
    "The optimizer has no averages yet when the step begins: warm up with one whole step, optimizer.step() included, "
    "outside of the meter."
)
_LAST = (
    "The last loss that was watched is still alive when the step begins, in a variable, and keeps its graph: take "
    ".item() of it at once, without giving it a name."
)
_OUTPUT = (
    "The last output that was watched is still alive when the step begins, in a variable, with its logits and its "
    "graph: take .loss.item() of it at once, without giving it a name."
)
_HELD = {
    "all": "The sum of live losses keeps the graph of every batch, and all that forward saved: add loss.item().",
    "last": _LAST,
    "last until forward": _LAST,
    "output": _OUTPUT,
    "output until forward": _OUTPUT,
}
_NO_STEP = "optimizer.step() is not measured; with little text the peak is there."
_OUT = "A variable holds the model's output, and the logits with it, through backward: keep the loss alone."

#: What variables may hold: of the watching, and whether the output of the measured step.
_IN_VARIABLES = (
    ("none", True),
    ("last", False),
    ("last until forward", False),
    ("output", False),
    ("output until forward", True),
    ("last until forward", True),
)

HONEST = Accidents()


def suspects() -> Iterator[Accidents]:
    """The accidents of the stub first, alone and together; then those that come with mending it."""
    for held, cold, gradients in product(("none", "all"), (False, True), ("cleared", "stale")):
        if (accidents := Accidents(gradients, cold, held)) != HONEST:
            yield accidents
    yield from (Accidents(steps=False), Accidents("late"), Accidents("late", cold=True))
    for held, out in _IN_VARIABLES:
        for cold, gradients in product((False, True), ("cleared", "stale")):
            yield Accidents(gradients, cold, held, out=out)


def _output(model: nn.Module, batch: Tensor) -> object:
    return model(input_ids=batch, labels=batch)
