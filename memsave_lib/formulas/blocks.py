"""Saved bytes of the course's block and of a stack of blocks, in closed form."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from memsave_lib.arguments import whole_number
from memsave_lib.plan import Plan
from memsave_lib.strategies import MIN_BYTES, OPS

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def element_bytes(dtype: str) -> int:
    """Bytes per element of ``"float32"``, ``"bfloat16"`` and their like; a ``torch.dtype`` works too."""
    name = str(dtype).removeprefix("torch.")
    if name not in ELEMENT_BYTES:
        raise ValueError(f"dtype is one of {', '.join(ELEMENT_BYTES)}, got {dtype!r}")
    return ELEMENT_BYTES[name]


@dataclass(frozen=True)
class BlockShape:
    """What the memory of a :class:`~memsave_lib.models.TransformerBlock` in training depends on.

    Args:
        batch, seq_len, hidden: shape of the input.
        heads, ffn_mult, dropout, causal, attention: as in the block. ``causal`` changes no saved byte.
        dtype: of parameters and input.
        autocast: ``"bfloat16"`` or ``"float16"`` when the step runs under ``torch.autocast``; ``dtype`` is
            then float32.
        device: ``"cpu"``, or ``"cuda"`` for formulas that have not been run on a GPU yet.
    """

    batch: int
    seq_len: int
    hidden: int
    heads: int
    ffn_mult: int = 4
    dropout: float = 0.0
    causal: bool = True
    attention: str = "sdpa"
    dtype: str = "float32"
    autocast: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len", "hidden", "heads", "ffn_mult"):
            whole_number(name, getattr(self, name))
        if self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden: {self.hidden} is not a multiple of {self.heads}")
        dropout = self.dropout
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a number of at least 0 and below 1, got {dropout!r}")
        if self.attention not in ("sdpa", "math"):
            raise ValueError(f'attention must be "sdpa" or "math", got {self.attention!r}')
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f'device must be "cpu" or "cuda", got {self.device!r}')
        element_bytes(self.dtype)
        if self.autocast is not None and (element_bytes(self.autocast) != 2 or element_bytes(self.dtype) != 4):
            raise ValueError(f"autocast is bfloat16 or float16 over float32, got {self.autocast!r} over {self.dtype!r}")

    @property
    def ffn(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn_mult * self.hidden

    @property
    def elements(self) -> int:
        """Elements of one hidden state: ``sbh``."""
        return self.batch * self.seq_len * self.hidden

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one hidden state between two blocks: what a recomputed region keeps."""
        return element_bytes(self.dtype) * self.elements

    @property
    def work_bytes(self) -> int:
        """Bytes per element inside the projections: autocast's, where there is autocast."""
        return element_bytes(self.autocast or self.dtype)


def block_terms(shape: BlockShape, recompute_ops: Collection[str] = ()) -> dict[str, int]:
    """Saved bytes of one kept transformer block, by tensor, in the order in which the block runs.

    Sums to ``16*c*sbh`` for f = 4h, plus LayerNorm statistics and what attention keeps. Terms that are zero
    are left out.

    Args:
        shape: the block and its input.
        recompute_ops: operations that :class:`~memsave_lib.strategies.SelectiveOps` recomputes inside the
            block.
    """
    unknown = set(recompute_ops) - set(OPS)
    if unknown:
        raise ValueError(f"recompute_ops knows {', '.join(OPS)}; got {', '.join(sorted(map(str, unknown)))}")
    keep_norm = "norm" not in recompute_ops
    keep_activation = "activation" not in recompute_ops
    work, hidden_state = shape.work_bytes, shape.work_bytes * shape.elements
    wide = work * shape.batch * shape.seq_len * shape.ffn
    mask = _dropout_mask_bytes(shape, shape.elements)
    attention = (
        _attention_terms(shape) if "attention" not in recompute_ops else {"queries, keys, values": 3 * hidden_state}
    )
    terms = {
        "norm 1 input": shape.checkpoint_bytes,
        "norm 1 statistics": _statistics_bytes(shape) * keep_norm,
        "QKV input": hidden_state * keep_norm,
        **attention,
        "attention output": hidden_state,
        "attention dropout mask": mask,
        "norm 2 input": shape.checkpoint_bytes,
        "norm 2 statistics": _statistics_bytes(shape) * keep_norm,
        "up-projection input": hidden_state * keep_norm,
        "GELU input": wide,
        "down-projection input": wide * keep_activation,
        "feed-forward dropout mask": mask,
        "weight copies of autocast": _weight_copy_bytes(shape, keep_norm, keep_activation),
    }
    return {name: size for name, size in terms.items() if size}


def block_saved_bytes(shape: BlockShape, recompute_ops: Collection[str] = ()) -> int:
    """Saved bytes of one kept transformer block: the sum of :func:`block_terms`."""
    return sum(block_terms(shape, recompute_ops).values())


def block_storages(shape: BlockShape, recompute_ops: Collection[str] = ()) -> tuple[int, ...]:
    """Bytes of each storage that one kept block saves, in the order in which the block runs; its input is the first.

    Args:
        shape: of the block and its input; dropout 0, no autocast.
        recompute_ops: as for :func:`block_terms`, of which this is the sum again.
    """
    if shape.dropout or shape.autocast:
        raise ValueError("storages are listed for dropout 0 without autocast: other blocks save other storages")
    # Queries, keys and values lie in one storage, but a batched matrix product copies its operands: attention that is
    # written out keeps three, unless there is one sequence or one head.
    written_out = shape.attention == "math" and "attention" not in recompute_ops
    operands = 3 if written_out and shape.batch > 1 and shape.heads > 1 else 1
    pieces = {"norm 1 statistics": 2, "norm 2 statistics": 2, "queries, keys, values": operands}
    return tuple(
        size // pieces.get(name, 1)
        for name, size in block_terms(shape, recompute_ops).items()
        for _ in range(pieces.get(name, 1))
    )


def stack_saved_bytes(plan: Plan, shape: BlockShape, min_bytes: int = MIN_BYTES) -> int:
    """Saved bytes of a :class:`~memsave_lib.models.BlockStack` at the end of forward, under any plan.

    A kept block holds its own tensors, its input among them; a recomputed region holds its input only,
    however many blocks and nested regions it contains. Nothing is counted twice: each hidden state between
    two blocks is the input of the block behind it. The output of the last block is not saved: an addition
    needs nothing for backward. What a plan offloads has left by then.

    Args:
        plan, shape: strategy and blocks.
        min_bytes: of the strategy, if it offloads.
    """
    not_recomputed = plan.n_blocks - plan.actions.count("recompute")
    here = not_recomputed * block_saved_bytes(shape, plan.recompute_ops) + plan.n_regions * shape.checkpoint_bytes
    return here - offloaded_bytes(plan, shape, min_bytes) if plan.offloads else here


def offloaded_bytes(plan: Plan, shape: BlockShape, min_bytes: int = MIN_BYTES) -> int:
    """Bytes that one forward of a :class:`~memsave_lib.models.BlockStack` sends away, by an offloading plan.

    Of an offloaded block every saved storage of at least ``min_bytes`` leaves, of an offloaded region its input; the
    input of the whole stack stays, because whoever made it holds it.

    Args:
        plan: of any strategy; 0 bytes leave by one that does not offload.
        shape: of the blocks and their input; dropout 0, no autocast.
        min_bytes: of the strategy.
    """
    sizes = block_storages(shape, plan.recompute_ops)
    checkpoint = shape.checkpoint_bytes if shape.checkpoint_bytes >= min_bytes else 0
    block = sum(size for size in sizes if size >= min_bytes)
    others = plan.n_blocks - 1
    return plan.offloaded_bytes([block - checkpoint, *[block] * others], [0, *[checkpoint] * others])


def _attention_terms(shape: BlockShape) -> dict[str, int]:
    """What the attention core keeps: its inputs, and the scores or their log-sum-exp; not its output."""
    work, hidden_state = shape.work_bytes, shape.work_bytes * shape.elements
    score_count = shape.batch * shape.heads * shape.seq_len**2
    if shape.attention == "sdpa" and not (shape.dropout and shape.device == "cpu"):
        # The fused kernel keeps one number per row of the scores, in float32 unless it computes in float64.
        positions = shape.seq_len if shape.device == "cpu" else -(-shape.seq_len // 32) * 32
        log_sum_exp = max(4, work) * shape.batch * shape.heads * positions
        return {"queries, keys, values": 3 * hidden_state, "log-sum-exp": log_sum_exp}
    # PyTorch's own fallback for dropout on a CPU computes the same as attention="math", but never below
    # float32, and scales queries and keys where our block scales the scores.
    fallback = shape.attention == "sdpa"
    size = max(4, work) if fallback else work
    operands = 3 * size * shape.elements
    if fallback and size == work and (shape.batch == 1 or shape.heads == 1):
        # A batched matrix product copies its operands, but with one sequence or one head it can use a view of the
        # values in the QKV projection's output, which keeps queries and keys with them. Those are there twice then,
        # because they were scaled. In float32 made from a narrower type all three are new tensors anyway; and in
        # attention="math", which scales later, all three are views.
        operands = 5 * size * shape.elements
    dropped = bool(shape.dropout)
    return {
        "queries, keys, values": operands,
        "attention weights": size * score_count,
        "attention weights' dropout mask": _dropout_mask_bytes(shape, score_count, size),
        "attention weights after dropout": size * score_count * dropped,
    }


def _statistics_bytes(shape: BlockShape) -> int:
    """Mean and reciprocal deviation of each position; CUDA keeps them in float32 at least."""
    size = element_bytes(shape.dtype)
    return 2 * (size if shape.device == "cpu" else max(4, size)) * shape.batch * shape.seq_len


def _dropout_mask_bytes(shape: BlockShape, elements: int, size: int | None = None) -> int:
    """A CPU keeps dropout masks in the dtype of the data, CUDA in one byte per element."""
    if not shape.dropout:
        return 0
    return elements * ((size or shape.work_bytes) if shape.device == "cpu" else 1)


def _weight_copy_bytes(shape: BlockShape, keep_norm: bool, keep_activation: bool) -> int:
    """Autocast converts each weight matrix; backward needs the copy, unless the projection is recomputed."""
    if shape.autocast is None:
        return 0
    hidden, ffn = shape.hidden, shape.ffn
    kept = hidden * hidden + (3 * hidden * hidden + hidden * ffn) * keep_norm + ffn * hidden * keep_activation
    return shape.work_bytes * kept
