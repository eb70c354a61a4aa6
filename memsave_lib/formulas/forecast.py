"""The memory of a step as a curve over its work, before it runs: what a plot can show at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from memsave_lib.formulas.blocks import BlockShape, element_bytes
from memsave_lib.formulas.offloading import CAUSAL_ATTENTION, FULL_ATTENTION
from memsave_lib.formulas.script import Moment
from memsave_lib.formulas.timeline import step_moments
from memsave_lib.formulas.training import block_parameters
from memsave_lib.plan import Plan


@dataclass(frozen=True)
class Stretch:
    """A part of the step that one block has to itself: FLOPs done before it and after it. Block -1 is the loss."""

    phase: str
    block: int
    start: float
    end: float


@dataclass(frozen=True)
class Forecast:
    """What a step will hold, and how much of its work is done when.

    Args:
        moments: as of :func:`~memsave_lib.formulas.step_moments`, with what is there all the time added.
        work: FLOPs done at each moment.
        stretches: the step, block by block.
        checkpoints: blocks whose input is kept while they are not.
        plain_flops: of the step without recomputation.
    """

    moments: tuple[Moment, ...]
    work: tuple[float, ...]
    stretches: tuple[Stretch, ...]
    checkpoints: tuple[int, ...]
    plain_flops: float

    @property
    def flops(self) -> float:
        """Of the whole step."""
        return self.stretches[-1].end

    @property
    def flops_ratio(self) -> float:
        """Of the whole step, in units of the step without recomputation."""
        return self.flops / self.plain_flops

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.live_bytes)

    def most(self, phase: str, block: int) -> int:
        """The most bytes alive while a block is in a phase; the loss is block -1."""
        return max(one.live_bytes for one in self.moments if (one.phase, one.block) == (phase, block))

    def work_done(self, places: Iterable[tuple[str, int]]) -> float:
        """FLOPs done when a step has got through these (phase, block), in order; the last one counts half.

        Places that are not ahead in the forecast, such as what dies at the end, move nothing.
        """
        at = 0
        for place, _ in groupby(places):
            ahead = range(at, len(self.stretches))
            at = next((i for i in ahead if (self.stretches[i].phase, self.stretches[i].block) == place), at)
        return (self.stretches[at].start + self.stretches[at].end) / 2


def block_flops(shape: BlockShape) -> float:
    """FLOPs of a block's forward: ``8h + 4f`` a token and channel in the projections, and attention."""
    return shape.elements * (8 * shape.hidden + 4 * shape.ffn) + attention_flops(shape)


def attention_flops(shape: BlockShape) -> float:
    """``kappa*s`` a token and channel: 4 for two products, half of it where a position sees only what is before it."""
    return shape.elements * shape.seq_len * (CAUSAL_ATTENTION if shape.causal else FULL_ATTENTION)


def down_projection_flops(shape: BlockShape) -> float:
    """Of the last product of a block, whose output nothing needs: PyTorch's early stop saves it in a recomputation."""
    return 2 * shape.elements * shape.ffn


def stack_parameter_bytes(shape: BlockShape, n_layers: int) -> int:
    """Bytes of the parameters of a stack of blocks; all of their gradients take as many."""
    return element_bytes(shape.dtype) * n_layers * block_parameters(shape.hidden, shape.ffn_mult)


def stack_forecast(plan: Plan, shape: BlockShape, floor_bytes: int = 0, **options: str | bool) -> Forecast:
    """The memory of a training step of a stack over its FLOPs.

    Backward takes twice the FLOPs of forward; the loss takes none. Within a block the work is spread evenly over its
    operations, so a moment's place is right to a block, its bytes are exact.

    Args:
        plan, shape, options: as for :func:`~memsave_lib.formulas.step_moments`.
        floor_bytes: what is there all the time, such as parameters.
    """
    moments, work, stretches = [], [], []
    for (phase, block), members in groupby(step_moments(plan, shape, **options), key=_place(plan)):
        ops = list(members)
        start = stretches[-1].end if stretches else 0.0
        amount = _amount(phase, ops, plan, shape)
        stretches.append(Stretch(phase, block, start, start + amount))
        for number, moment in enumerate(ops):
            moments.append(Moment(moment.phase, moment.block, moment.op, floor_bytes + moment.live_bytes))
            work.append(start + amount * number / len(ops))
    checkpoints = tuple(segment.start for segment in plan.segments if segment.recompute)
    plain = 3 * plan.n_blocks * block_flops(shape)
    return Forecast(tuple(moments), tuple(work), tuple(stretches), checkpoints, plain)


def _place(plan: Plan) -> Callable[[Moment], tuple[str, int]]:
    def place(moment: Moment) -> tuple[str, int]:
        # Operations that run again inside a block are part of its backward.
        inside = plan.recompute_ops and moment.phase == "recompute"
        return ("backward" if inside else moment.phase), moment.block

    return place


def _amount(phase: str, ops: Sequence[Moment], plan: Plan, shape: BlockShape) -> float:
    if ops[0].block < 0:
        return 0.0
    if phase == "backward":
        # Of the operations that run again inside a block only attention has products.
        return 2 * block_flops(shape) + (attention_flops(shape) if "attention" in plan.recompute_ops else 0)
    stopped_early = phase == "recompute" and ops[-1].op == "GELU"
    return block_flops(shape) - (down_projection_flops(shape) if stopped_early else 0)
