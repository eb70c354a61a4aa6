"""Memory during one training step of a stack, operation by operation, and its peak, without running it."""

from __future__ import annotations

from memsave_lib.arguments import whole_number
from memsave_lib.formulas.blocks import BlockShape, block_saved_bytes, element_bytes
from memsave_lib.formulas.script import Moment, Step
from memsave_lib.plan import Plan

LOSSES = ("square", "mse", "sum")


def step_moments(
    plan: Plan,
    shape: BlockShape,
    *,
    loss: str = "square",
    hold_output: bool = False,
    input_requires_grad: bool = True,
    new_gradients: bool = False,
) -> list[Moment]:
    """Every operation of ``loss(stack(x)).backward()`` that allocates, with the bytes alive right after it.

    Counted is every tensor alive in the step, except parameters and gradients that were there before it: the input
    (and the target), saved activations, recomputed ones, the output, the loss, and what operations pass on to each
    other. Not counted is what a kernel allocates for itself and frees before it returns.
    With heads of width 1 PyTorch copies at other moments than listed here.

    Args:
        plan: of a :class:`~memsave_lib.models.BlockStack`, under ``KeepAll``, ``Selective``, ``FullCheckpoint``,
            ``Chunked``, ``Recursive`` or ``SelectiveOps``.
        shape: its blocks and input; dropout 0, no autocast, on a CPU.
        loss: ``"square"`` is ``stack(x).square().mean()``, ``"sum"`` is ``stack(x).sum()``, ``"mse"`` is
            ``F.mse_loss(stack(x), target)`` with a target that needs no gradient.
        hold_output: whether the step keeps a reference to the stack's output until its end.
        input_requires_grad: whether ``x`` asks for a gradient.
        new_gradients: True when ``.grad`` is None before the step, as after ``zero_grad()``, so that gradients pile up;
            False when backward adds to gradients that are there, and each new one is alive for a moment only.
    """
    _check_covered(shape)
    if loss not in LOSSES:
        raise ValueError(f"loss is one of {', '.join(LOSSES)}, got {loss!r}")
    if plan.recompute_ops and plan.n_regions:
        raise ValueError("the timeline covers recomputed blocks or recomputed operations, not both in one plan")
    step = Step(plan, shape, input_requires_grad, new_gradients)
    step.take("input", shape.checkpoint_bytes * (2 if loss == "mse" else 1))
    step.forward(plan.segments, saved=True)
    step.loss(loss, hold_output)
    step.backward(plan.segments)
    return step.moments


def stack_peak_bytes(plan: Plan, shape: BlockShape, **options: str | bool) -> int:
    """The largest number of bytes alive at once in a training step of a stack: the peak of :func:`step_moments`.

    Add the parameters, and the gradients that were there before the step, for the peak of everything.

    Args:
        options: ``loss``, ``hold_output``, ``input_requires_grad``, ``new_gradients``, as for :func:`step_moments`.
    """
    return max(moment.live_bytes for moment in step_moments(plan, shape, **options))


def working_set_bytes(shape: BlockShape) -> int:
    """``W`` in the peak of chunks: what backward needs beside checkpoints and one chunk's saved activations.

    The peak is the gradient of the down-projection's weight in the last block of a chunk. Alive then, beside what is
    saved, are the gradients of the block's output (``c*sbh``; it stands in for the chunk's input, which counts as a
    checkpoint and as a saved activation), of the GELU's output (``c*s*b*f``) and of the weight (``c*h*f``), the loss
    and its gradient (one number each): ``W = c*s*b*f + c*h*f + 2*c``.
    """
    _check_covered(shape)
    if shape.attention != "sdpa" or shape.ffn_mult < 3:
        raise ValueError(
            f"W is this simple for attention='sdpa' and ffn_mult of at least 3 only, got {shape.attention!r} and "
            f"{shape.ffn_mult}; use stack_peak_bytes"
        )
    size = element_bytes(shape.dtype)
    return size * (shape.batch * shape.seq_len * shape.ffn + shape.hidden * shape.ffn + 2)


def chunked_peak_bytes(n_blocks: int, chunk_blocks: int, shape: BlockShape) -> int:
    """Peak of a step with equal chunks of ``m`` blocks: ``L/m`` checkpoints, ``m`` blocks' saved activations, ``W``.

    The closed form for :func:`stack_peak_bytes` with its default options. Counts what that counts.
    """
    whole_number("chunk_blocks", chunk_blocks)
    whole_number("n_blocks", n_blocks, multiple_of=chunk_blocks)
    checkpoints = n_blocks // chunk_blocks * shape.checkpoint_bytes
    return checkpoints + chunk_blocks * block_saved_bytes(shape) + working_set_bytes(shape)


def _check_covered(shape: BlockShape) -> None:
    if shape.dropout or shape.autocast or shape.device != "cpu":
        raise ValueError(
            f"peaks are predicted for a CPU without dropout and without autocast only, got dropout={shape.dropout}, "
            f"autocast={shape.autocast!r}, device={shape.device!r}; measure instead"
        )
