"""The check of notebook 07's closed form: what a rank holds while a chunk goes backward, its weights shared out.

It follows :mod:`memsave_lib.course.checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memsave_lib.course.checks import Verdict, answered, explain_gaps, first_gap, no_count, right, wrong
from memsave_lib.course.env import Setup
from memsave_lib.formulas import BlockShape, block_saved_bytes, stack_parameter_bytes
from memsave_lib.units import exact_bytes

RankBytes = Callable[[int, int, int, int, int], int]


@dataclass(frozen=True)
class RankCase:
    """Arguments of the exercise."""

    weights: int  # bytes of all blocks' weights
    n_blocks: int
    n_ranks: int
    chunk: int  # blocks in a chunk
    activations: int  # bytes that a rank has alive while the chunk goes backward

    def __str__(self) -> str:
        return (
            f"weights={self.weights:,}, n_blocks={self.n_blocks}, n_ranks={self.n_ranks}, chunk={self.chunk}, "
            f"activations={self.activations:,}"
        )

    @property
    def share(self) -> int:
        return self.weights // self.n_ranks

    @property
    def whole(self) -> int:
        """Bytes of the whole weights of a chunk."""
        return self.chunk * self.weights // self.n_blocks

    @property
    def held(self) -> int:
        return 4 * self.share + self.whole + self.activations


#: No two of the usual mistakes give the same numbers in all three.
_CASES = (
    RankCase(24_000, 6, 2, 3, 1_000_000),
    RankCase(7_200_000, 10, 8, 2, 50_000_000),
    RankCase(96_000, 8, 4, 1, 77_000),
)


@answered
def check_rank_bytes(function: RankBytes, here: Setup) -> Verdict:
    """``function(weights, n_blocks, n_ranks, chunk, activations)``: what a rank under FSDP2 holds in a chunk's wave."""
    shape = BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
    alive = (here.n_layers - 1) * shape.checkpoint_bytes + block_saved_bytes(shape)
    yours = RankCase(stack_parameter_bytes(shape, here.n_layers), here.n_layers, 2, 1, alive)
    cases = (*_CASES, yours)
    given = [function(case.weights, case.n_blocks, case.n_ranks, case.chunk, case.activations) for case in cases]
    if complaint := no_count(given):
        return wrong(complaint)
    wanted = [case.held for case in cases]
    if given == wanted:
        return right(
            f"At your parameters, with two ranks and every block checkpointed, a rank holds {exact_bytes(yours.held)}, "
            f"{exact_bytes(yours.activations)} of them activations."
        )
    for reason, mistake in _MISTAKES.items():
        if given == [mistake(case) for case in cases]:
            return wrong(reason)
    gaps = [int(want - got) for want, got in zip(wanted, given, strict=True)]
    terms = {name: [size(case) for case in cases] for name, size in _TERMS.items()}
    return wrong(explain_gaps(gaps, terms) or first_gap(cases, given, wanted, "a rank holds {:,}"))


_MISTAKES: Mapping[str, Callable[[RankCase], int]] = {
    "You share the activations out. They belong to a rank's own sequences: all of them are here.": (
        lambda c: c.held - c.activations + c.activations // c.n_ranks
    ),
    "You forgot the whole weights: to run the chunk's blocks a rank gathers them.": lambda c: c.held - c.whole,
    "You have the whole weights of one block. All blocks of the chunk are run again before one of them is through with "
    "backward, and until then their weights stay.": lambda c: c.held - c.whole + c.weights // c.n_blocks,
    "You have the whole weights of the whole model: only those of one chunk are gathered at a time.": (
        lambda c: c.held - c.whole + c.weights
    ),
    "You share nothing out: so much a rank holds under DDP.": lambda c: 4 * c.weights + c.activations,
    "You share out parameters alone. Gradients and Adam's two averages are shared out with them.": (
        lambda c: c.held + 3 * (c.weights - c.share)
    ),
    "You share out parameters and gradients. Adam's two averages are shared out with them.": (
        lambda c: c.held + 2 * (c.weights - c.share)
    ),
    "You gather what the other ranks have, and count the rank's own share of the chunk once. It is there twice: as a "
    "share, and in the whole.": lambda c: c.held - c.whole // c.n_ranks,
    "You count one average of Adam's: it has two, of gradients and of their squares.": lambda c: c.held - c.share,
    "You forgot Adam's averages: they take two shares.": lambda c: c.held - 2 * c.share,
    "You count the parameters alone: gradients take a share, and Adam's averages two.": lambda c: c.held - 3 * c.share,
    "You share the chunk's whole weights out: a block runs on whole weights.": (
        lambda c: c.held - c.whole + c.whole // c.n_ranks
    ),
    "The activations are missing.": lambda c: c.held - c.activations,
}

#: Bytes that a learner may miss or add, alone or two of them.
_TERMS: Mapping[str, Callable[[RankCase], int]] = {
    "a share of the weights": lambda c: c.share,
    "the whole weights of the chunk": lambda c: c.whole,
    "the activations": lambda c: c.activations,
    "the weights of the whole model": lambda c: c.weights,
}
