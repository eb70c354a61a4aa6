"""What each operation of a training step takes and gives back, in the order in which PyTorch on a CPU runs it.

Autograd's order is fixed and every block is alike, so the bytes alive at each operation follow from arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memsave_lib.formulas.blocks import BlockShape, element_bytes
from memsave_lib.plan import Plan, Segment


@dataclass(frozen=True)
class Moment:
    """Right after one operation: what it was, in which block (-1: the loss), and the bytes alive then."""

    phase: str
    block: int
    op: str
    live_bytes: int


class Step:
    """Follows the bytes alive through one step. Methods take and give bytes in the order of PyTorch's operations."""

    def __init__(self, plan: Plan, shape: BlockShape, input_requires_grad: bool, new_gradients: bool) -> None:
        self.ops, self.shape = plan.recompute_ops, shape
        self.input_requires_grad, self.new_gradients = input_requires_grad, new_gradients
        self.size = element_bytes(shape.dtype)
        self.state = shape.checkpoint_bytes
        self.wide = self.state * shape.ffn_mult
        self.statistics = 2 * self.size * shape.batch * shape.seq_len
        self.scores = self.size * shape.batch * shape.heads * shape.seq_len**2
        self.mask = self.size * shape.seq_len**2
        # A batched matrix product copies queries, keys and values, unless views of the QKV tensor will do.
        self.operand = self.state if shape.batch > 1 and shape.heads > 1 else 0
        self.log_sum_exp = max(4, self.size) * shape.batch * shape.heads * shape.seq_len
        self.moments: list[Moment] = []
        self.live = 0
        self.phase, self.block = "forward", 0
        self.output_gradient = self.state

    def take(self, op: str, size: int) -> None:
        self.live += size
        self.moments.append(Moment(self.phase, self.block, op, self.live))

    def give(self, size: int) -> None:
        self.live -= size

    def again(self, op: str, size: int) -> None:
        """An operation inside a block that is recomputed in backward."""
        self.phase = "recompute"
        self.take(op, size)
        self.phase = "backward"

    # Forward

    def forward(self, segments: Sequence[Segment], saved: bool, stop_early: bool = False) -> None:
        """Run segments whose input is alive already, and stays so; leaves their output, and what is saved."""
        units = list(_units(segments))
        for position, unit in enumerate(units):
            last_of_recomputation = stop_early and position == len(units) - 1
            if isinstance(unit, int):
                self.block_forward(unit, saved, last_of_recomputation)
            elif not last_of_recomputation:
                self.forward(unit.body(), saved=False)
            if not saved and position:
                self.give(self.state)

    def block_forward(self, block: int, saved: bool, stop_early: bool) -> None:
        self.block = block
        state, wide = self.state, self.wide
        norm = saved and "norm" not in self.ops
        activation = saved and "activation" not in self.ops
        self.take("norm 1", state + self.statistics)
        self.give(0 if norm else self.statistics)
        self.take("QKV projection", 3 * state)
        self.give(0 if norm else state)
        qkv_saved = self.attention_forward(saved and "attention" not in self.ops, saved)
        self.take("attention projection", state)
        self.take("residual 1", state)
        self.give(state)
        self.take("norm 2", state + self.statistics)
        self.give(0 if norm else self.statistics)
        self.take("up-projection", wide)
        self.give(0 if norm else state)
        self.take("GELU", wide)
        if not stop_early:
            self.take("down-projection", state)
            self.give((0 if activation else wide) + (0 if saved else wide))
            self.take("residual 2", state)
            self.give(state)
        # Local variables die with the call: queries, keys and values, the attention's output, the state after it.
        self.give((0 if qkv_saved else 3 * state) + (0 if saved else 2 * state))

    def attention_forward(self, saved: bool, block_saved: bool) -> bool:
        """Leaves the attention output, in the layout of the projection; says whether the QKV tensor itself is saved."""
        state, scores = self.state, self.scores
        if self.shape.attention == "sdpa":
            self.take("attention", state + self.log_sum_exp)
            self.give(0 if saved else self.log_sum_exp)
            return block_saved
        self.math_weights(saved)
        self.take("attention output", state)
        self.give(scores + self.mask + (0 if saved else scores + self.operand))
        if self.shape.heads > 1 and self.shape.seq_len > 1:
            self.take("attention output, heads side by side", state)
            self.give(state)
        return block_saved and (not saved or not self.operand)

    def math_weights(self, saved: bool) -> None:
        """Everything before the last product; leaves scores, mask, weights, values, and queries and keys if saved."""
        scores = self.scores
        if self.operand:
            self.take("queries copied", self.operand)
            self.take("keys copied", self.operand)
        self.take("scores", scores)
        self.give(0 if saved else 2 * self.operand)
        self.take("mask filled", self.mask)
        self.take("mask", self.mask)
        self.give(self.mask)
        self.take("scores scaled and masked", scores)
        self.give(scores)
        self.take("softmax", scores)
        if self.operand:
            self.take("values copied", self.operand)

    # Loss

    def loss(self, loss: str, hold_output: bool) -> None:
        state = self.state
        self.block = -1
        freed_output = 0 if hold_output else state
        if loss == "sum":
            self.take("sum", self.size)
            self.give(freed_output)
            self.phase = "backward"
            self.take("ones", self.size)
            self.output_gradient = 0
            return
        if loss == "square":
            self.take("square", state)
            self.take("mean", self.size)
            self.give(state)
        else:
            # PyTorch's CPU kernel reduces in place: the loss, one number, owns a storage of the output's size.
            self.take("squared error", state)
        self.phase = "backward"
        self.take("ones", self.size)
        if loss == "square":
            self.take("mean backward", state)
            self.take("square backward: power", state)
            self.take("square backward: factor", state)
            self.take("square backward", state)
            self.give(3 * state + freed_output)
        else:
            self.take("squared error backward", state)
            self.give(freed_output)

    # Backward

    def backward(self, segments: Sequence[Segment], recomputed: bool = False) -> None:
        """Run segments backward; their output's gradient is alive and turns into that of their input."""
        for unit in reversed(list(_units(segments))):
            if isinstance(unit, int):
                self.phase, self.block = "backward", unit
                self.block_backward(recomputed)
            else:
                self.phase = "recompute"
                self.forward(unit.body(), saved=True, stop_early=True)
                self.backward(unit.body(), recomputed=True)

    def block_backward(self, recomputed: bool) -> None:
        state, wide, hidden, ffn = self.state, self.wide, self.size * self.shape.hidden, self.shape.ffn
        norm, activation = "norm" in self.ops, "activation" in self.ops
        input_gradient = self.block > 0 or self.input_requires_grad
        output_gradient, self.output_gradient = self.output_gradient, state
        if activation:
            self.again("GELU", wide)
        self.linear_backward("down-projection", wide, hidden * ffn, hidden, wide, recomputed or activation)
        self.take("GELU backward", wide)
        self.give(2 * wide)
        if norm:
            self.again("norm 2", state + self.statistics)
        self.linear_backward("up-projection", state, hidden * ffn, self.size * ffn, state, recomputed or norm)
        self.give(wide)
        self.take("norm 2 backward", state + 2 * hidden)
        self.give(2 * state + self.statistics)
        self.take("residual 2 backward", state)
        self.give(output_gradient + state)
        self.accumulated(2 * hidden)
        square = hidden * self.shape.hidden
        freed = 0 if self.shape.attention == "sdpa" and "attention" not in self.ops else state
        self.linear_backward("attention projection", state, square, hidden, freed, recomputed)
        self.give(0 if input_gradient else state)
        self.attention_backward()
        if norm:
            self.again("norm 1", state + self.statistics)
        self.linear_backward("QKV projection", state, 3 * square, 3 * hidden, state, recomputed or norm)
        self.give(3 * state)
        self.take("norm 1 backward", 2 * hidden + (state if input_gradient else 0))
        # The first block's input belongs to the caller.
        self.give(state + self.statistics + (state if self.block else 0))
        if input_gradient:
            self.take("residual 1 backward", state)
            self.give(2 * state)
        self.accumulated(2 * hidden)

    def linear_backward(
        self, name: str, input_gradient: int, weight: int, bias: int, saved_input: int, recomputed: bool
    ) -> None:
        """Gradients of input, weight, bias. A recomputed input is let go before the bias's turn, a saved one after."""
        self.take(f"{name} backward: input", input_gradient)
        self.take(f"{name} backward: weight", weight)
        self.give(saved_input if recomputed else 0)
        self.take(f"{name} backward: bias", bias)
        self.give(0 if recomputed else saved_input)
        self.accumulated(weight + bias)

    def accumulated(self, gradient: int) -> None:
        """A weight's gradient becomes ``.grad``, or is added to it and freed."""
        self.give(0 if self.new_gradients else gradient)

    def attention_backward(self) -> None:
        """Turns the gradient of the attention output into that of the QKV tensor."""
        state, shape = self.state, self.shape
        if shape.attention == "sdpa":
            if "attention" in self.ops:
                self.again("attention", state + self.log_sum_exp)
            self.take("attention backward", 3 * state)
            self.give(5 * state + self.log_sum_exp)
        else:
            self.math_backward()
        self.take("queries, keys, values stacked", 3 * state)
        self.give(3 * state)
        if shape.batch > 1 or shape.seq_len > 1:
            self.take("queries, keys, values side by side", 3 * state)
            self.give(3 * state)

    def math_backward(self) -> None:
        """Leaves the gradients of queries, keys and values in place of the gradient of the attention output."""
        state, scores = self.state, self.scores
        again = "attention" in self.ops
        if self.operand and self.shape.seq_len > 1:
            self.take("attention output backward, heads apart", state)
            self.give(state)
        if again:
            self.phase = "recompute"
            self.math_weights(saved=True)
            self.phase = "backward"
            self.give(scores + self.mask)
        self.take("values backward", state)
        self.take("weights backward", scores)
        self.give(state + self.operand)
        self.take("softmax backward", scores)
        self.give(2 * scores)
        self.take("scale backward", scores)
        self.give(scores)
        self.take("keys backward", state)
        self.take("queries backward", state)
        qkv_output = 3 * state if again or not self.operand else 0
        self.give(scores + 2 * self.operand + qkv_output)


def _units(segments: Sequence[Segment]) -> Iterator[int | Segment]:
    """Blocks that are kept, and regions."""
    for segment in segments:
        if segment.recompute:
            yield segment
        else:
            yield from range(segment.start, segment.stop)
