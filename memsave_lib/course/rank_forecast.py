"""What each rank of a training finds, by closed form: before it runs, or where it cannot be run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memsave_lib.course.rank_jobs import VOCABULARY, Run, Training
from memsave_lib.formulas import (
    BlockShape,
    block_parameters,
    element_bytes,
    gpt2_parameters,
    gpt2_terms,
    stack_saved_bytes,
)
from memsave_lib.plan import Plan


@dataclass(frozen=True)
class Expected:
    """As the fields of the same names in :class:`memsave_lib.course.rank_jobs.Outcome`.

    ``all_gathers``, ``reduce_scatters``: of one step. What DistributedDataParallel does instead, all-reduces of
    buckets, depends on the size of these.
    """

    saved_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    average_bytes: int
    all_gathers: int
    reduce_scatters: int
    gathered_bytes: int
    whole_blocks: int
    block_recomputes: int


def expected(run: Run, job: Training) -> Expected:
    """What a rank finds in one run of a job.

    A rank computes with sequences of its own, so it saves what one process saves for them, however weights are held.
    """
    plan = run.strategy.plan(job.n_layers)
    weights, blocks = _weight_bytes(run, job)
    sharded = run.wrapper == "FSDP2"
    share = weights // job.n_ranks if sharded else weights
    # GPT-2's tables and last norm are gathered with the first forward and stay whole till their backward is done.
    around = weights - blocks
    groups = job.n_layers + (around > 0)
    return Expected(
        saved_bytes=_saved_bytes(run, job),
        parameter_bytes=share,
        gradient_bytes=share,
        average_bytes=2 * share,
        all_gathers=sharded * (groups + job.n_layers),
        reduce_scatters=sharded * groups,
        gathered_bytes=sharded * (2 * blocks + around),
        whole_blocks=largest_region(plan) if sharded else job.n_layers,
        block_recomputes=sum(plan.recompute_counts()),
    )


def largest_region(plan: Plan) -> int:
    """Blocks that backward runs again before the first of them is through: they are whole at the same time.

    FSDP2 lets go of a block's whole weights when its gradients are there, not when a recomputation has used them.
    """
    return max((segment.n_blocks for segment in plan.segments if segment.recompute), default=1)


def _weight_bytes(run: Run, job: Training) -> tuple[int, int]:
    """Of the whole model, and of its blocks."""
    size = element_bytes("float32")
    blocks = size * job.n_layers * block_parameters(job.hidden)
    if run.model == "stack":
        return blocks, blocks
    return size * gpt2_parameters(job.n_layers, job.hidden, VOCABULARY, job.seq_len), blocks


def _saved_bytes(run: Run, job: Training) -> int:
    shape = BlockShape(job.batch_size, job.seq_len, job.hidden, job.heads)
    plan, options = run.strategy.plan(job.n_layers), run.strategy.offloading
    if run.model == "stack":
        loss = shape.checkpoint_bytes  # the square keeps its input
        return stack_saved_bytes(plan, shape, options.min_bytes if options else 0) + loss
    sent: Sequence[int] = [shape.checkpoint_bytes] * job.n_layers  # inputs of regions; kept blocks are not in the terms
    return sum(gpt2_terms(plan, shape, VOCABULARY).values()) - plan.offloaded_bytes([0] * job.n_layers, sent)
