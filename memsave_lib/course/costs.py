"""What a block of the course, or of Llama, costs on paper: what :func:`memsave_lib.simulate` needs, without a run.

For a model that is at hand, :func:`memsave_lib.profiling.block_costs` measures the same.
"""

from __future__ import annotations

from dataclasses import replace

from memsave_lib.costs import BlockCosts, ModelCosts, Needs
from memsave_lib.formulas import (
    BlockShape,
    LlamaShape,
    block_flops,
    block_saved_bytes,
    block_storages,
    block_terms,
    llama_block_terms,
    stack_forecast,
    stack_parameter_bytes,
)
from memsave_lib.formulas.forecast import down_projection_flops
from memsave_lib.formulas.offloading import CAUSAL_ATTENTION
from memsave_lib.strategies import MIN_BYTES, FullCheckpoint, KeepAll


def saved_storages(shape: BlockShape) -> tuple[int, ...]:
    """Bytes of each storage that a kept block saves, in the order of packing; the block's input is the first.

    For blocks with fused attention and without dropout: queries, keys and values are one storage there.
    """
    if shape.attention != "sdpa" or shape.dropout or shape.autocast:
        raise ValueError(f"the storages are listed for attention='sdpa', dropout 0 and no autocast only, got {shape}")
    return block_storages(shape)


def prices_to_recompute(shape: BlockShape) -> list[tuple[str, int, int]]:
    """What each kind of tensor in a block saves, and the FLOPs of matrix products that make it again.

    Its neighbors being there: queries, keys and values come from the LayerNorm's output by one product, say. The
    block's own input has no price inside the block, so it is not listed; nor are statistics and the log-sum-exp.

    Returns:
        (name, bytes, FLOPs), in the order in which a block computes them.
    """
    terms, tokens, h = block_terms(shape), shape.batch * shape.seq_len, shape.hidden
    return [
        ("LayerNorm outputs", terms["QKV input"] + terms["up-projection input"], 0),
        ("queries, keys, values", terms["queries, keys, values"], 6 * h * h * tokens),
        ("attention output", terms["attention output"], 4 * shape.seq_len * h * tokens),
        ("second LayerNorm's input", terms["norm 2 input"], 2 * h * h * tokens),
        ("GELU input", terms["GELU input"], 2 * h * shape.ffn * tokens),
        ("GELU output", terms["down-projection input"], 0),
    ]


def paper_costs(shape: BlockShape, min_bytes: int = MIN_BYTES) -> BlockCosts:
    """FLOPs of a block by closed form, and the storages of at least ``min_bytes`` that it would send away.

    Forward takes :func:`~memsave_lib.formulas.block_flops`, ``24h + kappa*s`` a token and channel for f = 4h; backward
    twice as much; a recomputation stops before the down-projection.
    """
    forward = block_flops(shape)
    return BlockCosts(
        forward=forward,
        backward=2 * forward,
        recompute=forward - down_projection_flops(shape),
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


def stack_model_costs(shape: BlockShape, n_layers: int, loss: str = "sum") -> ModelCosts:
    """The costs of a stack of blocks and of a step without an optimizer, by closed form: what a planner needs.

    All bytes are those that :func:`memsave_lib.profiling.model_costs` measures: the moments of a step with all blocks
    kept, and of one with each recomputed, cut at the blocks. Gradients start from None, and the input needs none.
    """
    floor = stack_parameter_bytes(shape, n_layers)
    options = {"loss": loss, "input_requires_grad": False, "new_gradients": True}
    kept, recomputed = (
        stack_forecast(strategy.plan(n_layers), shape, floor, **options) for strategy in (KeepAll(), FullCheckpoint())
    )
    held = block_saved_bytes(shape), shape.checkpoint_bytes
    blocks = tuple(
        replace(
            cost,
            held=held[0],
            held_recomputed=held[1],
            needs=Needs(
                kept.most("forward", i) - i * held[0],
                kept.most("backward", i) - i * held[0],
                recomputed.most("forward", i) - i * held[1],
                max(recomputed.most(phase, i) for phase in ("recompute", "backward")) - i * held[1],
            ),
        )
        for i, cost in enumerate(stack_costs(shape, n_layers))
    )
    turn = max(kept.most(phase, -1) for phase in ("forward", "backward")) - n_layers * held[0]
    return ModelCosts(blocks, turn=turn, elsewhere=2 * floor + shape.checkpoint_bytes)
