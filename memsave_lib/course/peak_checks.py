"""The check of notebook 02's closed form: the saved activations that a checkpointed stack holds at most.

It follows :mod:`memsave_lib.course.checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memsave_lib.course.checks import Verdict, answered, explain_gaps, first_gap, no_count, right, wrong
from memsave_lib.course.env import Setup
from memsave_lib.formulas import BlockShape, block_saved_bytes, stack_parameter_bytes, stack_peak_bytes
from memsave_lib.strategies import FullCheckpoint
from memsave_lib.units import exact_bytes

CheckpointedPeak = Callable[[int, BlockShape], int]


@dataclass(frozen=True)
class PeakCase:
    """Arguments of the exercise, and the bytes that answers to it are made of."""

    n_layers: int
    shape: BlockShape

    def __str__(self) -> str:
        shape = self.shape
        return (
            f"n_layers={self.n_layers}, batch={shape.batch}, seq_len={shape.seq_len}, hidden={shape.hidden}, "
            f"heads={shape.heads}"
        )

    @property
    def checkpoint(self) -> int:
        return self.shape.checkpoint_bytes

    @property
    def block(self) -> int:
        return block_saved_bytes(self.shape)

    @property
    def parameters(self) -> int:
        return stack_parameter_bytes(self.shape, self.n_layers)

    @property
    def peak(self) -> int:
        """While the last block is back to life: its saved tensors, its input among them, and the other inputs."""
        return (self.n_layers - 1) * self.checkpoint + self.block


#: No two of the usual mistakes give the same numbers in all three.
_CASES = (
    PeakCase(5, BlockShape(3, 40, 96, 4)),
    PeakCase(2, BlockShape(1, 7, 320, 5)),
    PeakCase(11, BlockShape(5, 129, 64, 2)),
)


@answered
def check_checkpointed_peak(function: CheckpointedPeak, here: Setup) -> Verdict:
    """``function(n_layers, shape)`` is the most bytes of saved activations alive at once, every block checkpointed."""
    yours = PeakCase(here.n_layers, BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads))
    cases = (*_CASES, yours)
    given = [function(case.n_layers, case.shape) for case in cases]
    if complaint := no_count(given):
        return wrong(complaint)
    wanted = [case.peak for case in cases]
    if given == wanted:
        return right(f"At your parameters ({yours}) at most {exact_bytes(yours.peak)} of saved activations are alive.")
    for reason, mistake in _MISTAKES.items():
        if given == [mistake(case) for case in cases]:
            return wrong(reason)
    return wrong(_about_gaps(cases, given, wanted))


def _about_gaps(cases: Sequence[PeakCase], given: Sequence[int], wanted: Sequence[int]) -> str:
    gaps = [int(want - got) for want, got in zip(wanted, given, strict=True)]
    if reason := explain_gaps(gaps, {name: [size(case) for case in cases] for name, size in _TERMS.items()}):
        return reason
    return first_gap(cases, given, wanted, "{:,} are alive")


_MISTAKES: Mapping[str, Callable[[PeakCase], int]] = {
    "You forgot the live block: these are the inputs that wait at the end of forward. In backward one block at a time "
    "comes back to life, with all that it saves.": lambda c: c.n_layers * c.checkpoint,
    "You counted the live block's input twice: it is one of the checkpoints, and the first of the tensors that the "
    "block saves.": lambda c: c.n_layers * c.checkpoint + c.block,
    "You took the live block's input away twice: while the block is alive its input is held, once.": (
        lambda c: (c.n_layers - 2) * c.checkpoint + c.block
    ),
    "You kept every block: this is the stack without checkpoints. Only one block at a time is alive in backward.": (
        lambda c: c.n_layers * c.block
    ),
    "This is the live block alone; the inputs of the blocks before it still wait for their turn.": lambda c: c.block,
    "You have two blocks alive at once: one is gone before the next comes back to life.": (
        lambda c: (c.n_layers - 2) * c.checkpoint + 2 * c.block
    ),
    "You counted elements, not bytes: a float32 has 4 bytes.": lambda c: c.peak // 4,
    "This is the peak of all that a step makes: asked are the saved activations alone, without gradients and what an "
    "operation in progress needs.": lambda c: stack_peak_bytes(FullCheckpoint().plan(c.n_layers), c.shape),
}

#: Bytes that a learner may miss or add.
_TERMS: Mapping[str, Callable[[PeakCase], int]] = {
    "all parameters, which are no activations": lambda c: c.parameters,
    "all parameters and their gradients, which are no activations": lambda c: 2 * c.parameters,
    "one hidden state: is the block's input counted once, and the stack's output not at all?": lambda c: c.checkpoint,
    "the LayerNorm statistics and the log-sum-exp of one block: formulas.block_saved_bytes(shape) knows them": (
        lambda c: c.block - 16 * c.checkpoint
    ),
}
