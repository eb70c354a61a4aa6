"""torch.compile's own knob for the same trade, ``activation_memory_budget``, beside this course's strategies.

    rows = torch_budgets()
    budget_table(rows)
    print(findings(rows))

    budget_table(recorded(STACK))       # larger, and in steps of a tenth: measured once, see records

The knob (``torch._functorch.config.activation_memory_budget``, from 0 to 1) belongs to AOTAutograd's min-cut
partitioner, which cuts the joint graph of forward and backward in two and decides what one leaves for the other. 1 is
its default, a budget below 1 is meant as a share of what the default saves, and 0 saves the graph's inputs alone.

What is compiled is one graph, loss included, with the backend ``"aot_eager"``: it has the partitioner that Inductor
uses, needs no C++ compiler, and leaves operators whole, so that gradients and temporaries can be compared with eager
ones. ``"aot_eager_decomp_partition"`` takes operators apart first, as Inductor does; but nothing fuses the parts again,
and the temporaries between them are in every peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import memsave_lib as ms
from memsave_lib import _compat
from memsave_lib.course import records
from memsave_lib.flops import count_flops
from memsave_lib.strategies import Strategy
from memsave_lib.units import human_bytes

if TYPE_CHECKING:
    import pandas as pd

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
BACKENDS = ("aot_eager", "aot_eager_decomp_partition")
STACK, GPT2 = "stack of 6 blocks", "GPT-2 mini"
Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class BudgetRow:
    """One way to save less: what a step of it holds and costs. Bytes are beyond what was alive before the step."""

    label: str
    budget: float | None  # None where there is no choice: this course's strategies, and blocks one by one
    saved_bytes: int  # storages alive between forward and backward, the loss itself apart
    peak_bytes: int
    peak_at: str
    extra_forwards: float  # matrix products beyond keep-all's, in forward passes
    equal_gradients: bool  # bit-equal to keep-all's
    gradient_error: float  # largest difference from keep-all's, in units of the largest gradient
    saved_share: float | None = None  # of what budget 1 saves, which is what a budget is a promise of
    counted_share: float | None = None  # the same as the partitioner counts: tensors one by one, and not storages

    def figures(self) -> dict[str, Any]:
        """As a row of a record or a frame."""
        return asdict(self)


def torch_budgets(
    n_layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    batch: int = 4,
    seq_len: int = 128,
    budgets: Sequence[float] = BUDGETS,
    backend: str = BACKENDS[0],
) -> list[BudgetRow]:
    """The comparison on a stack of blocks: our strategies, torch's budgets, and budget 0 for each block by itself.

    In the last row the compiler never sees more than a block, and so its budget of 0 cuts the stack where
    checkpointing does.
    """
    torch.manual_seed(0)
    model = ms.BlockStack(n_layers, hidden, heads)
    x = torch.randn(batch, seq_len, hidden)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    rows = torch_budgets_of(model, loss, (x,), _strategies(n_layers, ms.SelectiveOps()), budgets, backend)
    by_block = _with_each_block_compiled(model, x, 0.0, backend)
    return [*rows, _Reference.of(model, loss, (x,)).row("torch, each block, budget 0", by_block)]


def torch_budgets_on_gpt2(
    size: str = "tiny", batch: int = 4, seq_len: int = 128, budgets: Sequence[float] = BUDGETS
) -> list[BudgetRow]:
    """The comparison on Hugging Face's GPT-2 with its own loss."""
    torch.manual_seed(0)
    model = ms.gpt2(size, n_positions=seq_len).train()
    tokens = torch.randint(model.config.vocab_size, (batch, seq_len))

    def loss(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    strategies = _strategies(model.config.n_layer, ms.SelectiveOps("attention"))
    return torch_budgets_of(model, loss, (tokens,), strategies, budgets)


def torch_budgets_of(
    model: nn.Module,
    loss: Loss,
    inputs: Sequence[Tensor],
    strategies: Mapping[str, Strategy],
    budgets: Sequence[float] = BUDGETS,
    backend: str = BACKENDS[0],
) -> list[BudgetRow]:
    """The comparison on any model: each strategy applied to it, then ``loss`` compiled under each budget.

    Args:
        model: whose gradients are compared. They are None afterwards.
        loss: ``loss(*inputs)`` runs the model's forward pass; it must compile to one graph.
        inputs: tensors that are alive anyway.
        strategies: by label.
        budgets: from 0 to 1, and 1 among them: the others are shares of what it saves.
        backend: one of ``BACKENDS``.
    """
    _check(budgets, backend)
    reference = _Reference.of(model, loss, inputs)
    rows = []
    for label, strategy in strategies.items():
        with ms.apply(model, strategy):
            rows.append(reference.row(label, loss))
    compiled = _compat.compile_under_budgets(loss, inputs, budgets, backend)
    budgeted = [
        reference.row(f"torch, budget {budget:g}", call, budget) for budget, call in zip(budgets, compiled, strict=True)
    ]
    counted = [reference.counted_bytes(call) for call in compiled]
    return rows + _with_shares(budgeted, counted)


def full_size() -> list[dict[str, Any]]:
    """Both models at the size of the record, budgets in steps of a tenth."""
    budgets = [tenths / 10 for tenths in range(10, -1, -1)]
    rows = {
        STACK: torch_budgets(n_layers=6, hidden=256, heads=4, batch=4, seq_len=256, budgets=budgets),
        GPT2: torch_budgets_on_gpt2("mini", batch=4, seq_len=256, budgets=budgets),
    }
    return [{"model": model} | row.figures() for model, found in rows.items() for row in found]


def recorded(model: str) -> list[BudgetRow]:
    """The rows of one model, ``STACK`` or ``GPT2``, from the record ``torch_budget``."""
    rows = records.load("torch_budget").rows
    if model not in (known := dict.fromkeys(row["model"] for row in rows)):
        raise ValueError(f"the record holds {', '.join(known)}; got {model!r}")
    names = [field.name for field in fields(BudgetRow)]
    return [BudgetRow(**{name: row[name] for name in names}) for row in rows if row["model"] == model]


def budget_table(rows: Iterable[BudgetRow]) -> pd.DataFrame:
    """For the eye: bytes with units, FLOPs in forward passes."""
    import pandas as pd

    return pd.DataFrame(
        {
            "way": row.label,
            "saved": human_bytes(row.saved_bytes),
            "of budget 1": "" if row.saved_share is None else f"{row.saved_share:.1%}",
            "peak": human_bytes(row.peak_bytes),
            "extra forwards": f"{row.extra_forwards:.3f}",
            "gradients": "bit-equal" if row.equal_gradients else f"within {row.gradient_error:.0e}",
        }
        for row in rows
    ).set_index("way")


def overruns(rows: Iterable[BudgetRow]) -> list[BudgetRow]:
    """The budgets that are not kept: a larger share is saved than they allow."""
    return [row for row in rows if row.budget is not None and row.saved_share > row.budget]


def rises(rows: Iterable[BudgetRow]) -> list[tuple[BudgetRow, BudgetRow]]:
    """Neighbouring budgets of which the smaller one has the larger peak."""
    falling = sorted((row for row in rows if row.budget is not None), key=lambda row: -row.budget)
    return [(larger, smaller) for larger, smaller in pairwise(falling) if smaller.peak_bytes > larger.peak_bytes]


def findings(rows: Sequence[BudgetRow]) -> str:
    """Whether the budgets were kept and whether the peak follows them, a line for each that is not so."""
    kept = [
        f"Budget {row.budget:g} saves {row.saved_share:.1%} of what budget 1 saves: more than it allows. "
        f"As torch counts, tensor by tensor, it is {row.counted_share:.1%}."
        for row in overruns(rows)
    ]
    followed = [
        f"From budget {larger.budget:g} to {smaller.budget:g} the peak rises by "
        f"{human_bytes(smaller.peak_bytes - larger.peak_bytes)} to {human_bytes(smaller.peak_bytes)}."
        for larger, smaller in rises(rows)
    ]
    return "\n".join((kept or ["Every budget is kept."]) + (followed or ["The peak falls with the budget."]))


@dataclass(frozen=True)
class _Reference:
    """The uncompiled step that keeps all; what every other one is held against."""

    model: nn.Module
    inputs: Sequence[Tensor]
    forward_flops: int
    step_flops: int
    gradients: list[Tensor]

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, inputs: Sequence[Tensor]) -> _Reference:
        model.zero_grad(set_to_none=True)
        forward = count_flops(lambda: loss(*inputs))
        step = count_flops(lambda: loss(*inputs).backward())
        return cls(model, inputs, forward, step, _take_gradients(model))

    def row(self, label: str, loss: Loss, budget: float | None = None) -> BudgetRow:
        with ms.MemoryMeter(self.model) as meter:
            value = loss(*self.inputs)
            held = meter.live_bytes - value.nbytes
            value.backward()
            del value
        gradients = _take_gradients(self.model)
        flops = count_flops(lambda: loss(*self.inputs).backward())
        _take_gradients(self.model)
        return BudgetRow(
            label=label,
            budget=budget,
            # Not trace.saved_bytes: a compiled backward lets go of what it unpacks before its first operation.
            saved_bytes=held - meter.trace.start_bytes,
            peak_bytes=meter.trace.peak_bytes - meter.trace.start_bytes,
            peak_at=str(meter.trace.peak_at),
            extra_forwards=(flops - self.step_flops) / self.forward_flops,
            equal_gradients=all(map(torch.equal, gradients, self.gradients)),
            gradient_error=_largest(map(torch.sub, gradients, self.gradients)) / _largest(self.gradients),
        )

    def counted_bytes(self, compiled: Loss) -> int:
        """What a compiled forward leaves for backward, each tensor by its own size, less what is alive anyway."""
        alive = {_storage(tensor) for tensor in (*self.model.parameters(), *self.model.buffers(), *self.inputs)}
        left = compiled(*self.inputs).grad_fn.saved_tensors
        return sum(tensor.nbytes for tensor in left if _storage(tensor) not in alive)


def _with_shares(rows: Sequence[BudgetRow], counted: Sequence[int]) -> list[BudgetRow]:
    full = next(index for index, row in enumerate(rows) if row.budget == 1)
    return [
        replace(row, saved_share=row.saved_bytes / rows[full].saved_bytes, counted_share=nbytes / counted[full])
        for row, nbytes in zip(rows, counted, strict=True)
    ]


def _with_each_block_compiled(model: ms.BlockStack, x: Tensor, budget: float, backend: str) -> Loss:
    """The stack's loss, its blocks compiled by themselves: one graph serves all, given the parameters of each."""
    names, parameters = zip(*model.blocks[0].named_parameters(), strict=True)

    def block(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(model.blocks[0], dict(zip(names, parameters, strict=True)), (x,))

    def compiled(x: Tensor) -> Callable[..., Tensor]:
        return _compat.compile_under_budgets(block, (x, *parameters), (budget,), backend)[0]

    # The first block computes no gradient of its input, and so its backward is another graph.
    first, other = compiled(x), compiled(x.clone().requires_grad_())

    def loss(x: Tensor) -> Tensor:
        for index, layer in enumerate(model.blocks):
            x = (other if index else first)(x, *layer.parameters())
        return x.square().mean()

    return loss


def _strategies(n_layers: int, inside_blocks: Strategy) -> dict[str, Strategy]:
    every_other = tuple("keep" if block % 2 else "recompute" for block in range(n_layers))
    chosen = (ms.KeepAll(), inside_blocks, ms.Selective(2), ms.PerBlock(every_other), ms.FullCheckpoint())
    return {strategy.label: strategy for strategy in chosen}


def _take_gradients(model: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return gradients


def _largest(tensors: Iterable[Tensor]) -> float:
    return max(tensor.abs().max().item() for tensor in tensors)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check(budgets: Sequence[float], backend: str) -> None:
    for budget in budgets:
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
            raise ValueError(f"a budget is a number from 0 to 1, got {budget!r}")
    if 1 not in budgets:
        raise ValueError(f"budgets are shares of what budget 1 saves: it must be among them, got {tuple(budgets)!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
