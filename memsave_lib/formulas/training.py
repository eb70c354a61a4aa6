"""Bytes of what is not activations: parameters, gradients, the optimizer. And rules of thumb for the whole step."""

from __future__ import annotations

import math

from memsave_lib.arguments import whole_number
from memsave_lib.formulas.blocks import element_bytes

BLOCK_TENSORS = 12  # weight and bias of two LayerNorms and four projections


def block_parameters(hidden: int, ffn_mult: int = 4) -> int:
    """Number of parameters of a :class:`~memsave_lib.models.TransformerBlock`: ``12h**2 + 13h`` for f = 4h."""
    whole_number("hidden", hidden)
    whole_number("ffn_mult", ffn_mult)
    ffn = ffn_mult * hidden
    norms = 2 * 2 * hidden
    attention = 3 * hidden * (hidden + 1) + hidden * (hidden + 1)
    feed_forward = ffn * (hidden + 1) + hidden * (ffn + 1)
    return norms + attention + feed_forward


def gpt2_parameters(n_layers: int, hidden: int, vocab_size: int, n_positions: int) -> int:
    """Number of parameters of GPT-2: two tables, the blocks, the final LayerNorm. The head shares the token table."""
    for name, value in (("n_layers", n_layers), ("vocab_size", vocab_size), ("n_positions", n_positions)):
        whole_number(name, value)
    return (vocab_size + n_positions) * hidden + n_layers * block_parameters(hidden) + 2 * hidden


def gpt2_parameter_tensors(n_layers: int) -> int:
    """Number of parameter tensors of GPT-2."""
    return 2 + BLOCK_TENSORS * whole_number("n_layers", n_layers) + 2


def state_terms(parameters: int, tensors: int, dtype: str = "float32") -> dict[str, int]:
    """Bytes that stay from step to step with Adam or AdamW: ``4*c`` for each parameter, and a counter for each tensor.

    Args:
        parameters: number of parameters, in ``tensors`` tensors.
        dtype: of the parameters; gradients and Adam's averages have the same. Its counters are float32.
    """
    size = whole_number("parameters", parameters) * element_bytes(dtype)
    return {
        "parameters": size,
        "gradients": size,
        "Adam: averages of gradients": size,
        "Adam: averages of their squares": size,
        "Adam: step counters": 4 * whole_number("tensors", tensors),
    }


def checkpointing_moves_peak(seq_len: int, batch: int, hidden: int) -> bool:
    """Whether full checkpointing can lower the peak of a stack of GPT blocks with fused attention.

    Saved activations at the end of forward, ``16*c*sbh`` a block, must exceed the gradients at the end of backward,
    ``12*c*h**2`` a block, which are there either way: ``s*b > 0.75*h``.
    """
    for name, value in (("seq_len", seq_len), ("batch", batch), ("hidden", hidden)):
        whole_number(name, value)
    return 16 * seq_len * batch > 12 * hidden


def best_chunk_count(n_blocks: int, block_bytes: int, checkpoint_bytes: int) -> float:
    """Number of equal chunks with the lowest peak, ``sqrt(L*A')``, where ``A'`` is saved bytes over checkpoint bytes.

    It minimizes ``L/m + m*A'`` over the blocks in a chunk, ``m = sqrt(L/A')``; more than L chunks there cannot be.
    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), have ``A' = 1``. For whole numbers and chunks
    that are not equal use :meth:`memsave_lib.strategies.Chunked.best`.
    """
    for name, value in (
        ("n_blocks", n_blocks),
        ("block_bytes", block_bytes),
        ("checkpoint_bytes", checkpoint_bytes),
    ):
        whole_number(name, value)
    return min(float(n_blocks), math.sqrt(n_blocks * block_bytes / checkpoint_bytes))
