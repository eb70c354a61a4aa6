"""Steps for an exercise of notebook 06: what to attack first? Real models, and steps made by hand.

The real ones are what a learner may have. Those made by hand decide what real ones leave open: which numbers are
compared, with what, and that parameters, gradients and optimizer state count together.
"""

from __future__ import annotations

from dataclasses import dataclass

import memsave_lib as ms
from memsave_lib.course.guide import STATE
from memsave_lib.estimation import Estimate
from memsave_lib.strategies import FullCheckpoint, KeepAll, Strategy
from memsave_lib.trace import Event, StorageFacts, Trace

Pair = tuple[Estimate, Estimate]


@dataclass(frozen=True)
class AttackCase:
    """A GPT-2 whose peak is made of one thing, or seems to be."""

    about: str
    layers: int
    hidden: int
    vocabulary: int
    batch: int
    seq_len: int

    def __str__(self) -> str:
        return (
            f"{self.about} ({self.layers} blocks of width {self.hidden}, vocabulary {self.vocabulary:,}, "
            f"{self.batch} x {self.seq_len} tokens)"
        )

    def estimates(self) -> Pair:
        config = {"n_layer": self.layers, "n_embd": self.hidden, "n_head": self.hidden // 64}

        def build() -> object:
            return ms.gpt2("tiny", **config, vocab_size=self.vocabulary, n_positions=self.seq_len)

        return tuple(
            ms.estimate(build, self.batch, self.seq_len, strategy) for strategy in (KeepAll(), FullCheckpoint())
        )


@dataclass(frozen=True)
class MadeCase:
    """A step made by hand, in MB.

    Args:
        state: parameters, gradients and optimizer state at the peak under full checkpointing.
        activation, temporary: what else is alive there.
        kept_peak: the peak under keep-all.
        kept_gradients: of these; the peak may be before they are there.
        at_the_loss: whether the peaks are in the loss.
    """

    state: tuple[int, int, int]
    activation: int
    temporary: int
    kept_peak: int
    kept_gradients: int
    at_the_loss: bool = False

    @property
    def peak(self) -> int:
        return sum(self.state) + self.activation + self.temporary

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size}" for name, size in zip(STATE, self.state, strict=True))
        return f"a step made by hand (peaks of {self.kept_peak} and {self.peak} MB; checkpointed: {parts} MB)"

    def estimates(self) -> Pair:
        parameters, gradients, optimizer = self.state
        held = parameters + self.kept_gradients + optimizer
        return (
            self._estimate(KeepAll(), self.kept_gradients, self.kept_peak - held - self.temporary, 80),
            self._estimate(FullCheckpoint(), gradients, self.activation, 4),
        )

    def _estimate(self, strategy: Strategy, gradients: int, activation: int, saved: int) -> Estimate:
        """A history of four storages, of which the last makes the peak."""
        parameters, _, optimizer = self.state
        before = {"parameter": parameters, "optimizer": optimizer}
        grown = {"gradient": gradients, "activation": activation, "temporary": self.temporary}
        op = "_log_softmax_backward_data" if self.at_the_loss else "mm"
        events = [
            Event(float(second), StorageFacts(size * 10**6, name), size * 10**6, "backward", "", op)
            for second, (name, size) in enumerate(grown.items())
        ]
        initial = [StorageFacts(size * 10**6, name) for name, size in before.items()]
        return Estimate(strategy, Trace(events, initial, saved * 10**6), None)


REAL_CASES = (
    AttackCase("a long text that peaks in the loss's backward", 4, 64, 512, 4, 256),
    AttackCase("a model of which more than half is weights", 4, 128, 64, 1, 96),
    AttackCase("a large vocabulary", 1, 64, 8192, 2, 128),
    AttackCase("a short text", 4, 128, 64, 1, 64),
    AttackCase("a shorter text", 2, 128, 256, 1, 48),
)
MADE_CASES = (
    # 45 % of the peak are state, and 53 % of keep-all's; the optimizer's is the largest of all categories.
    MadeCase((14, 3, 28), 28, 27, 105, 14),
    # 55 %, and 41 % of keep-all's; more is temporary than of any one kind of state, and the loss is at work.
    MadeCase((14, 13, 28), 0, 45, 108, 2, at_the_loss=True),
    # 52 %, but less than half of keep-all's peak.
    MadeCase((14, 10, 28), 8, 40, 108, 10),
    # 51 %, and 50.5 % of keep-all's peak.
    MadeCase((14, 9, 28), 9, 40, 101, 9),
    # Each part of the state is large once and missing once, and the order by a part is not the order by the sum.
    MadeCase((60, 5, 0), 15, 20, 103, 5),
    MadeCase((5, 5, 60), 10, 20, 103, 5),
    MadeCase((10, 60, 5), 5, 20, 103, 60),
    MadeCase((40, 0, 40), 5, 15, 103, 0),
    # The peak falls by 12 %: that is enough.
    MadeCase((10, 10, 20), 30, 18, 100, 10),
)
