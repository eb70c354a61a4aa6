"""The peak of a training step of Hugging Face's GPT-2 and Llama, where it is the loss's backward, in closed form.

With a real vocabulary the largest tensors of a step are the logits, and three of their size in float32 are alive at
once when the log-softmax runs backward: the log-probabilities that forward saved, their gradient, and the gradient of
the logits. Everything that forward saved is still there, and no gradient of a parameter is there yet. So the peak is

    parameters + buffers + optimizer state + saved bytes + 8*bsV + 8*bs + 8 - (what the loss has already let go)

``8*bsV`` are the two gradients (the log-probabilities are among the saved bytes), ``8*bs`` the labels that the caller
holds, 8 the loss and its gradient. The loss has let go of its own shifted labels and of the weight of all labels. The
logits themselves are gone when the caller drops the model's output before backward, as :func:`memsave_lib.estimate`
does; who holds it (``out = model(...); out.loss.backward()``) has ``c*bsV`` more.

Later in backward saved activations vanish and gradients pile up. A short text, or a small vocabulary, peaks there, or
in the optimizer's step: then these functions refuse, because what they say would be too little.
"""

from __future__ import annotations

from memsave_lib.arguments import whole_number
from memsave_lib.formulas.blocks import BlockShape, element_bytes
from memsave_lib.formulas.language_models import (
    FLOAT,
    INTEGER,
    LlamaShape,
    gpt2_block_terms,
    gpt2_terms,
    llama_block_terms,
    llama_terms,
    loss_terms,
)
from memsave_lib.formulas.training import block_parameters, gpt2_parameter_tensors, gpt2_parameters
from memsave_lib.plan import Plan

OPTIMIZER_AVERAGES = {None: 0, "sgd": 0, "adam": 2, "adamw": 2}
LLAMA_BLOCK_TENSORS = 9  # weights of two norms and seven projections


def llama_block_parameters(shape: LlamaShape) -> int:
    """Number of parameters of a Llama block: ``2h**2 + 2h**2*kv/a + 3hf + 2h``."""
    hidden, grouped = shape.hidden, shape.hidden * shape.kv_heads // shape.heads
    return 2 * hidden * (hidden + grouped) + 3 * hidden * shape.ffn + 2 * hidden


def llama_parameters(n_layers: int, shape: LlamaShape, vocab_size: int) -> int:
    """Number of parameters of Llama: a table of tokens, the blocks, the final norm, and a head of its own."""
    whole_number("n_layers", n_layers)
    whole_number("vocab_size", vocab_size)
    return 2 * vocab_size * shape.hidden + n_layers * llama_block_parameters(shape) + shape.hidden


def gpt2_peak_bytes(
    plan: Plan, shape: BlockShape, vocab_size: int, n_positions: int = 1024, optimizer: str | None = None
) -> int:
    """Peak of a training step of ``GPT2LMHeadModel``, everything counted, where the loss's backward is the peak.

    Args:
        plan: of a strategy that offloads nothing.
        shape: blocks and input; ``attention="sdpa"``, dropout 0.
        vocab_size, n_positions: rows of the two tables.
        optimizer: None, ``"sgd"``, ``"adam"`` or ``"adamw"``: whose state is there, and whose step follows.

    Raises:
        ValueError: the peak is, or may be, elsewhere; or the plan offloads.
    """
    size, hidden = element_bytes(shape.dtype), shape.hidden
    parameters = gpt2_parameters(plan.n_blocks, hidden, vocab_size, n_positions)
    block, table = size * block_parameters(hidden), size * vocab_size * hidden
    saved = gpt2_terms(plan, shape, vocab_size)
    there = size * parameters + _state_bytes(optimizer, parameters, gpt2_parameter_tensors(plan.n_blocks), size)
    peak = there + _at_the_loss(saved, shape.batch, shape.seq_len, vocab_size)
    later = _later(plan, shape, vocab_size, saved, table, block, sum(gpt2_block_terms(shape).values()))
    # The gradient of the shared table is there twice when its two parts are added up, and their sum a third time.
    end = size * parameters + 2 * table + 2 * shape.checkpoint_bytes
    return _checked(peak, there + max(later, end), there + _step_bytes(optimizer, size * parameters, table), plan)


def llama_peak_bytes(plan: Plan, shape: LlamaShape, vocab_size: int, optimizer: str | None = None) -> int:
    """Peak of a training step of ``LlamaForCausalLM``, everything counted, where the loss's backward is the peak.

    Args:
        plan: of a strategy that offloads nothing.
        shape: blocks and input.
        vocab_size: rows of the table and of the head.
        optimizer: None, ``"sgd"``, ``"adam"`` or ``"adamw"``: whose state is there, and whose step follows.

    Raises:
        ValueError: the peak is, or may be, elsewhere; or the plan offloads.
    """
    size, hidden = element_bytes(shape.dtype), shape.hidden
    parameters = llama_parameters(plan.n_blocks, shape, vocab_size)
    block, table = size * llama_block_parameters(shape), size * vocab_size * hidden
    saved = llama_terms(plan, shape, vocab_size)
    frequencies = FLOAT * (hidden // shape.heads)  # of the rotation, for half a head; kept twice
    tensors = 3 + LLAMA_BLOCK_TENSORS * plan.n_blocks
    there = size * parameters + frequencies + _state_bytes(optimizer, parameters, tensors, size)
    peak = there + _at_the_loss(saved, shape.batch, shape.seq_len, vocab_size)
    later = _later(plan, shape, vocab_size, saved, table, block, sum(llama_block_terms(shape).values()))
    end = size * parameters + 2 * shape.checkpoint_bytes
    return _checked(peak, there + max(later, end), there + _step_bytes(optimizer, size * parameters, table), plan)


def _at_the_loss(saved: dict[str, int], batch: int, seq_len: int, vocab_size: int) -> int:
    """Everything that is no parameter, when the log-softmax has just run backward."""
    let_go = saved["loss: labels"] + saved["loss: weight of all labels"]
    labels, loss = INTEGER * batch * seq_len, 2 * FLOAT
    return sum(saved.values()) - let_go + labels + loss + 2 * FLOAT * batch * seq_len * vocab_size


def _later(
    plan: Plan,
    shape: BlockShape | LlamaShape,
    vocab_size: int,
    saved: dict[str, int],
    table: int,
    block_gradients: int,
    block_saved: int,
) -> int:
    """A bound for the rest of backward, parameters left out: the head's backward, then each region's.

    A region's backward holds its blocks' saved activations and, on top, temporaries: no more than one block saves.
    """
    logits = FLOAT * shape.batch * shape.seq_len * vocab_size
    without_loss = sum(saved.values()) - sum(loss_terms(shape.batch, shape.seq_len, vocab_size).values())
    inputs = 2 * INTEGER * shape.batch * shape.seq_len + 2 * FLOAT
    levels = [
        without_loss + logits + logits // 2 + inputs,
        without_loss + logits + table + shape.checkpoint_bytes + inputs,
    ]
    alive, gradients = without_loss + inputs, table
    for segment in reversed(plan.segments):
        blocks = segment.n_blocks * block_saved
        gradients += segment.n_blocks * block_gradients
        levels.append(alive + (blocks if segment.recompute else 0) + block_saved + gradients)
        alive -= shape.checkpoint_bytes if segment.recompute else blocks
    return max(levels)


def _state_bytes(optimizer: str | None, parameters: int, tensors: int, size: int) -> int:
    if optimizer not in OPTIMIZER_AVERAGES:
        raise ValueError(f"optimizer is one of {', '.join(map(repr, OPTIMIZER_AVERAGES))}, got {optimizer!r}")
    averages = OPTIMIZER_AVERAGES[optimizer]
    return averages * parameters * size + (FLOAT * tensors if averages else 0)


def _step_bytes(optimizer: str | None, gradients: int, table: int) -> int:
    """A bound for the optimizer's step: all gradients, and a few temporaries of the size of one parameter."""
    return 0 if optimizer is None else gradients + 3 * table


def _checked(peak: int, backward: int, step: int, plan: Plan) -> int:
    if plan.offloads:
        raise ValueError("the closed form of the peak is for plans that offload nothing: use memsave_lib.estimate")
    if peak < max(backward, step):
        raise ValueError(
            f"at the loss {peak:,} bytes are alive, but later there may be up to {max(backward, step):,}: this step's "
            "peak is not the loss's, use memsave_lib.estimate"
        )
    return peak
