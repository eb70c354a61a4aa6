"""What a block of the course, or of Llama, costs on paper: what :func:`memsave_lib.simulate` needs, without a run.

For a model that is at hand, :func:`memsave_lib.profiling.block_costs` measures the same.
"""

from __future__ import annotations

from dataclasses import replace

from memsave_lib.costs import BlockCosts
from memsave_lib.formulas import BlockShape, LlamaShape, block_storages, llama_block_terms
from memsave_lib.formulas.offloading import CAUSAL_ATTENTION, FULL_ATTENTION
from memsave_lib.strategies import MIN_BYTES


def saved_storages(shape: BlockShape) -> tuple[int, ...]:
    """Bytes of each storage that a kept block saves, in the order of packing; the block's input is the first.

    For blocks with fused attention and without dropout: queries, keys and values are one storage there.
    """
    if shape.attention != "sdpa" or shape.dropout or shape.autocast:
        raise ValueError(f"the storages are listed for attention='sdpa', dropout 0 and no autocast only, got {shape}")
    return block_storages(shape)


def paper_costs(shape: BlockShape, min_bytes: int = MIN_BYTES) -> BlockCosts:
    """FLOPs of a block by closed form, and the storages of at least ``min_bytes`` that it would send away.

    Forward: ``8h + 4f`` FLOPs a token and channel in the projections, ``24h`` for f = 4h, and ``kappa*s`` in attention.
    Backward takes twice as much; a recomputation stops before the down-projection.
    """
    kappa = CAUSAL_ATTENTION if shape.causal else FULL_ATTENTION
    down = 2 * shape.elements * shape.ffn
    forward = shape.elements * (8 * shape.hidden + kappa * shape.seq_len) + 2 * down
    return BlockCosts(
        forward=forward,
        backward=2 * forward,
        recompute=forward - down,
        saved=tuple(size for size in saved_storages(shape) if size >= min_bytes),
        checkpoint=shape.checkpoint_bytes if shape.checkpoint_bytes >= min_bytes else 0,
    )


def stack_costs(shape: BlockShape, n_layers: int, min_bytes: int = MIN_BYTES) -> list[BlockCosts]:
    """The same for each block of a stack, whose input does not travel: whoever called the stack holds it."""
    cost = paper_costs(shape, min_bytes)
    first = replace(cost, saved=cost.saved[1:] if cost.checkpoint else cost.saved, checkpoint=0)
    return [first, *[cost] * (n_layers - 1)]


def llama_costs(shape: LlamaShape, n_layers: int) -> tuple[BlockCosts, ...]:
    """What Llama's blocks cost, by closed form: the input of simulations and plans for models that fit nowhere here.

    Forward takes two FLOPs for each weight of the seven projections and token, and ``2*s*h`` a token in causal
    attention; backward twice as much; a recomputation is a whole forward, without PyTorch's early stop. Parameters,
    gradients, embeddings and loss are no part of it.
    """
    tokens, hidden = shape.batch * shape.seq_len, shape.hidden
    grouped = hidden * shape.kv_heads // shape.heads
    weights = 2 * hidden * (hidden + grouped) + 3 * hidden * shape.ffn
    forward = float(tokens * (2 * weights + CAUSAL_ATTENTION * shape.seq_len * hidden))
    saved = tuple(size for size in llama_block_terms(shape).values() if size >= MIN_BYTES)
    return (BlockCosts(forward, 2 * forward, None, saved, shape.checkpoint_bytes),) * n_layers
