"""Saved bytes of Hugging Face's GPT-2 and Llama: blocks, embeddings, head and loss, in closed form.

Everything is for a CPU with fused attention ("sdpa"), dropout 0, no padding, ``labels`` given and ``use_cache`` off.
"""

from __future__ import annotations

from dataclasses import dataclass

from memsave_lib.arguments import whole_number
from memsave_lib.formulas.blocks import BlockShape, block_terms, element_bytes
from memsave_lib.plan import Plan

INTEGER = 8  # bytes of a token, a position or a label: int64
FLOAT = 4  # the loss, normalizations and attention statistics are computed in float32 at least


def loss_terms(batch: int, seq_len: int, vocab_size: int) -> dict[str, int]:
    """What Hugging Face's language-model loss saves: log-probabilities in float32, whatever the model's dtype.

    The labels are shifted by padding one at the end. One sequence alone is a view of that longer tensor.
    """
    _check_sizes(batch=batch, seq_len=seq_len, vocab_size=vocab_size)
    tokens = batch * seq_len
    return {
        "loss: log-probabilities": FLOAT * tokens * vocab_size,
        "loss: labels": INTEGER * (tokens + (1 if batch == 1 else 0)),
        "loss: weight of all labels": FLOAT,
    }


def loss_peak_bytes(batch: int, seq_len: int, vocab_size: int, dtype: str = "float32", hold_logits: bool = True) -> int:
    """Peak of ``cross_entropy(logits.float(), labels)`` and its backward, the logits included, labels left out.

    In backward the log-probabilities, their gradient and the logits' gradient are alive in float32 at the same time:
    ``12*bsV``, and the logits themselves if the caller still refers to them, as ``out = model(...)`` does. In float32
    that is ``4*c*bsV``. Two numbers come on top: the loss and its gradient.
    """
    _check_sizes(batch=batch, seq_len=seq_len, vocab_size=vocab_size)
    logits = element_bytes(dtype) if hold_logits else 0
    return (3 * FLOAT + logits) * batch * seq_len * vocab_size + 2 * FLOAT


def gpt2_block_terms(shape: BlockShape, recompute_ops: tuple[str, ...] = ()) -> dict[str, int]:
    """Saved bytes of one Hugging Face GPT-2 block: ``28*c*sbh``, LayerNorm statistics and the log-sum-exp.

    Twelve units more than the course's block: GPT-2's GELU is written as single operations, of which the last ones
    keep ``tanh``, half of the input, and ``1 + tanh`` beside the input itself.
    """
    _check_gpt2(shape)
    if set(recompute_ops) - {"attention"}:
        raise ValueError(f'only "attention" can be recomputed inside a GPT-2 block, got {recompute_ops!r}')
    terms: dict[str, int] = {}
    for name, size in block_terms(shape, recompute_ops).items():
        terms[name] = size
        if name == "GELU input":
            terms |= {"GELU: tanh": size, "GELU: half of the input": size, "GELU: 1 + tanh": size}
    return terms


def gpt2_terms(plan: Plan, shape: BlockShape, vocab_size: int) -> dict[str, int]:
    """Saved bytes of ``GPT2LMHeadModel`` at the end of forward, loss included, with its blocks under ``plan``.

    Args:
        plan: what happens to each block.
        shape: blocks and input; ``attention="sdpa"``, dropout 0.
        vocab_size: width of the logits.
    """
    block = sum(gpt2_block_terms(shape, plan.recompute_ops).values())
    tokens = shape.batch * shape.seq_len
    return {
        "tokens": INTEGER * tokens,
        "positions": INTEGER * shape.seq_len,
        "kept blocks": block * plan.actions.count("keep"),
        "checkpoints": shape.checkpoint_bytes * plan.n_regions,
        "final norm input": shape.checkpoint_bytes,
        "final norm statistics": 2 * element_bytes(shape.dtype) * tokens,
        "head input": shape.checkpoint_bytes,
        **loss_terms(shape.batch, shape.seq_len, vocab_size),
    }


@dataclass(frozen=True)
class LlamaShape:
    """What the saved bytes of a Llama depend on.

    Args:
        batch, seq_len, hidden: shape of a hidden state.
        heads, kv_heads: query heads, and key and value heads.
        ffn: width of the gated feed-forward layer (``intermediate_size``).
        dtype: ``"float32"`` or a 16-bit one, of parameters and hidden states.
    """

    batch: int
    seq_len: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len", "hidden", "heads", "kv_heads", "ffn"):
            whole_number(name, getattr(self, name))
        if self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden: {self.hidden} is not a multiple of {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads: {self.heads} is not a multiple of {self.kv_heads}")
        if element_bytes(self.dtype) > FLOAT:
            raise ValueError(f"dtype is float32 or a 16-bit one, got {self.dtype!r}")

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one hidden state between two blocks."""
        return element_bytes(self.dtype) * self.batch * self.seq_len * self.hidden


def llama_block_terms(shape: LlamaShape, recompute_ops: tuple[str, ...] = ()) -> dict[str, int]:
    """Saved bytes of one Hugging Face Llama block, by tensor, in the order in which the block runs.

    bf16: ``2sb(8h + 4 + 2h + 2h*kv/a + 4f) + 4asb``; float32: ``4sb(6h + 2 + 2h + 2h*kv/a + 4f) + 4asb``. RMSNorm
    works in float32: below it, the block's input survives as a float32 copy and as the normalized tensor. The tables
    of cosines and sines, which all blocks share, are counted with the model.
    """
    if set(recompute_ops) - {"attention"}:
        raise ValueError(f'only "attention" can be recomputed inside a Llama block, got {recompute_ops!r}')
    size, tokens, state = element_bytes(shape.dtype), shape.batch * shape.seq_len, shape.checkpoint_bytes
    wide = size * tokens * shape.ffn
    grouped = state * shape.kv_heads // shape.heads
    log_sum_exp = 0 if "attention" in recompute_ops else FLOAT * tokens * shape.heads
    terms = {
        **_rms_norm_terms(shape, "norm 1"),
        "input of the query, key and value projections": state,
        "queries": state,
        "keys": grouped,
        "values": grouped,
        "log-sum-exp": log_sum_exp,
        "attention output": state,
        **_rms_norm_terms(shape, "norm 2"),
        "input of the gate and up-projections": state,
        "SiLU input": wide,
        "SiLU output": wide,
        "up-projection output": wide,
        "down-projection input": wide,
    }
    return {name: term for name, term in terms.items() if term}


def llama_block_saved_bytes(shape: LlamaShape) -> int:
    """Saved bytes of one kept Llama block: the sum of :func:`llama_block_terms`."""
    return sum(llama_block_terms(shape).values())


def llama_terms(plan: Plan, shape: LlamaShape, vocab_size: int) -> dict[str, int]:
    """Saved bytes of ``LlamaForCausalLM`` at the end of forward, loss included, with its blocks under ``plan``.

    Every recomputed block also holds its other arguments: the tables of cosines and sines, there anyway, and the
    positions; each counts once.
    """
    head_size = shape.hidden // shape.heads
    block = sum(llama_block_terms(shape, plan.recompute_ops).values())
    return {
        "tokens": INTEGER * shape.batch * shape.seq_len,
        "cosines and sines": 2 * element_bytes(shape.dtype) * shape.seq_len * head_size,
        "positions": INTEGER * shape.seq_len if plan.n_regions else 0,
        "kept blocks": block * plan.actions.count("keep"),
        "checkpoints": shape.checkpoint_bytes * plan.n_regions,
        **_rms_norm_terms(shape, "final norm"),
        "head input": shape.checkpoint_bytes,
        **loss_terms(shape.batch, shape.seq_len, vocab_size),
    }


def _rms_norm_terms(shape: LlamaShape, name: str) -> dict[str, int]:
    tokens = shape.batch * shape.seq_len
    return {
        f"{name} input": FLOAT * tokens * shape.hidden,
        f"{name} statistics": FLOAT * tokens,
        f"{name} normalized": shape.checkpoint_bytes,
    }


def _check_gpt2(shape: BlockShape) -> None:
    if shape.attention != "sdpa" or shape.dropout or shape.autocast or shape.device != "cpu":
        raise ValueError(
            f"the formulas of GPT-2 cover attention='sdpa' on a CPU without dropout and autocast only, got {shape}"
        )


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        whole_number(name, value)
