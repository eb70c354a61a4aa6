"""torch's activation_memory_budget beside our strategies: what is the same on any version, and what the record says.

How the partitioner spends a budget is torch's affair and changes with its versions; what is asserted of live runs is
what follows from the meaning of the budgets 0 and 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch._functorch import config

import memsave_lib as ms
from memsave_lib import _compat, formulas
from memsave_lib.course import record, records
from memsave_lib.course import torch_budget as tb
from memsave_lib.course.torch_budget import BudgetRow

B, S, H, A, L = 2, 64, 32, 2, 2  # s * b = 4 * h
U = 4 * B * S * H  # bytes of a hidden state
SIZES = {"n_layers": L, "hidden": H, "heads": A, "batch": B, "seq_len": S}
SHAPE = formulas.BlockShape(B, S, H, A)


@pytest.fixture(scope="module")
def rows() -> dict[str, BudgetRow]:
    """Measured in a process that finds no C++ compiler, and that prints nothing else, warnings included."""
    program = (
        "import json\n"
        "from memsave_lib.course.torch_budget import torch_budgets\n"
        f"rows = torch_budgets(**{SIZES}, budgets=(1, 0.5, 0))\n"
        "print(json.dumps([row.figures() for row in rows]))"
    )
    environment = {"PATH": "", "CXX": "/nowhere/g++", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    return {figures["label"]: BudgetRow(**figures) for figures in json.loads(done.stdout)}


def row(budget: float | None, share: float | None, peak: int, **more: object) -> BudgetRow:
    base = BudgetRow(f"torch, budget {budget}", budget, 0, peak, "", 0.0, True, 0.0, share, share)
    return replace(base, **more)


# Live


def test_every_way_computes_the_gradients_of_keep_all(rows: dict[str, BudgetRow]) -> None:
    assert list(rows) == [
        "keep all",
        "recompute attention + activation + norm",
        "selective, k=2",
        "per block: 1 keep, 1 recompute",
        "full checkpoint",
        "torch, budget 1",
        "torch, budget 0.5",
        "torch, budget 0",
        "torch, each block, budget 0",
    ]
    assert all(one.equal_gradients and one.gradient_error == 0 for one in rows.values())


@pytest.mark.parametrize(
    ("label", "strategy"),
    [
        ("keep all", ms.KeepAll()),
        ("recompute attention + activation + norm", ms.SelectiveOps()),
        ("selective, k=2", ms.Selective(2)),
        ("full checkpoint", ms.FullCheckpoint()),
    ],
)
def test_strategies_save_what_the_closed_form_says(
    rows: dict[str, BudgetRow], label: str, strategy: ms.Strategy
) -> None:
    # The stack's input, alive anyway, is in the formula and not in the row; the loss's operand is its output.
    assert rows[label].saved_bytes - formulas.stack_saved_bytes(strategy.plan(L), SHAPE) == -U + U


def test_budget_1_costs_nothing_and_saves_no_more_than_eager(rows: dict[str, BudgetRow]) -> None:
    plain, default = rows["keep all"], rows["torch, budget 1"]
    assert default.extra_forwards == 0
    assert default.saved_bytes <= plain.saved_bytes
    assert default.saved_share == default.counted_share == 1


def test_budget_0_saves_nothing_and_repeats_the_whole_forward(rows: dict[str, BudgetRow]) -> None:
    nothing = rows["torch, budget 0"]
    assert (nothing.saved_bytes, nothing.saved_share, nothing.counted_share) == (0, 0.0, 0.0)
    assert nothing.extra_forwards == 1


def test_a_budget_between_lies_between(rows: dict[str, BudgetRow]) -> None:
    half = rows["torch, budget 0.5"]
    assert 0 < half.saved_bytes < rows["torch, budget 1"].saved_bytes
    assert 0 <= half.extra_forwards < 1
    assert 0 < half.counted_share < 1


def test_budget_0_of_each_block_is_full_checkpointing(rows: dict[str, BudgetRow]) -> None:
    by_block, ours = rows["torch, each block, budget 0"], rows["full checkpoint"]
    assert by_block.saved_bytes == ours.saved_bytes == L * U
    assert by_block.peak_bytes == ours.peak_bytes
    assert by_block.extra_forwards == ours.extra_forwards


def test_operators_taken_apart_give_gradients_that_are_close() -> None:
    model, x = ms.BlockStack(1, H, A), torch.randn(B, S, H)
    plain, default = tb.torch_budgets_of(
        model, lambda x: model(x).square().mean(), (x,), {"plain": ms.KeepAll()}, (1,), "aot_eager_decomp_partition"
    )
    assert default.gradient_error < 1e-5
    assert default.saved_bytes <= plain.saved_bytes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gpt2_with_its_own_loss() -> None:
    rows = {one.label: one for one in tb.torch_budgets_on_gpt2("tiny", batch=2, seq_len=32, budgets=(1,))}
    assert all(one.equal_gradients for one in rows.values())
    assert rows["torch, budget 1"].saved_bytes < rows["keep all"].saved_bytes  # its GELU is many small operations
    assert "recompute attention" in rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgets": (1, 1.5)}, r"a budget is a number from 0 to 1, got 1\.5"),
        ({"budgets": (1, True)}, "a budget is a number from 0 to 1, got True"),
        ({"budgets": (1, "half")}, "a budget is a number from 0 to 1, got 'half'"),
        ({"budgets": (0.5, 0)}, r"it must be among them, got \(0\.5, 0\)"),
        ({"backend": "inductor"}, "backend must be one of aot_eager, aot_eager_decomp_partition; got 'inductor'"),
    ],
    ids=["over", "bool", "word", "no 1", "backend"],
)
def test_wrong_arguments_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tb.torch_budgets(**{**SIZES, **options})


# Compiling, and what it leaves behind


def line(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).sin().cos().sum()


def test_compiled_functions_take_other_tensors() -> None:
    first, second = ([torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)] for _ in range(2))
    keep, recompute = _compat.compile_under_budgets(line, first, (1, 0), "aot_eager")
    for compiled in (keep, recompute):
        for given in (first, second):
            assert torch.equal(compiled(*given), line(*given))
    recompute(*second).backward()
    expected = torch.autograd.grad(line(*second), second[1])[0]
    assert torch.equal(second[1].grad, expected)
    assert first[1].grad is None


def test_several_budgets_at_once_are_those_one_by_one() -> None:
    model, x = ms.BlockStack(1, 16, 2), torch.randn(2, 32, 16)

    def saved(*budgets: float) -> list[int]:
        calls = _compat.compile_under_budgets(lambda x: model(x).sum(), (x,), budgets, "aot_eager")
        return [sum(tensor.nbytes for tensor in call(x).grad_fn.saved_tensors) for call in calls]

    together = saved(1, 0.5)
    assert together == [*saved(1), *saved(0.5)]
    assert together[1] < together[0]


def test_nothing_stays_set_or_compiled() -> None:
    before = config.activation_memory_budget
    x = torch.randn(3, 3, requires_grad=True)

    def own(x: Tensor) -> Tensor:
        return x.sin().sum()

    compilations = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        compilations.append(config.activation_memory_budget)
        return graph.forward

    compiled = torch.compile(own, backend=backend)
    compiled(x)
    _compat.compile_under_budgets(own, (x,), (0.25, 1), "aot_eager")
    assert config.activation_memory_budget == before
    assert torch.equal(compiled(x), own(x))
    assert compilations == [before, before]  # compiled again: reset had forgotten it
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="budget"):
        _compat.compile_under_budgets(own, (x,), (2,), "aot_eager")
    assert config.activation_memory_budget == before
    torch._dynamo.reset()


def test_the_meter_sees_what_is_compiled_only_when_called_directly() -> None:
    """Why the backend's result is taken from under torch.compile: with a mode on, nothing compiled runs."""
    x, runs = torch.randn(3, 3, requires_grad=True), []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        def run(*arguments: Tensor) -> object:
            runs.append(len(arguments))
            return graph.forward(*arguments)

        return run

    compiled = torch.compile(lambda x: x.sin().sum(), backend=backend)
    compiled(x)
    with ms.MemoryMeter():
        compiled(x)
    assert len(runs) == 1
    torch._dynamo.reset()


# Reading rows


def test_overruns_and_rises_are_found() -> None:
    found = [row(0, 0.0, 90), row(1, 1.0, 100), row(0.25, 0.27, 60, counted_share=0.249), row(0.5, 0.5, 61)]
    found.append(row(None, None, 500))
    assert [one.budget for one in tb.overruns(found)] == [0.25]
    assert [(larger.budget, smaller.budget) for larger, smaller in tb.rises(found)] == [(0.25, 0)]
    assert tb.findings(found).splitlines() == [
        "Budget 0.25 saves 27.0% of what budget 1 saves: more than it allows. "
        "As torch counts, tensor by tensor, it is 24.9%.",
        "From budget 0.25 to 0 the peak rises by 30 B to 90 B.",
    ]


def test_nothing_found_is_said_too() -> None:
    found = [row(1, 1.0, 100), row(0.5, 0.5, 100), row(0, 0.0, 10)]
    assert tb.findings(found) == "Every budget is kept.\nThe peak falls with the budget."


def test_the_table_is_for_the_eye() -> None:
    found = [
        row(0.5, 0.25, 2048, saved_bytes=1024, extra_forwards=1 / 3),
        row(None, None, 1, equal_gradients=False, gradient_error=2.7e-7),
    ]
    table = tb.budget_table(found)
    assert list(table.loc["torch, budget 0.5"]) == ["1.00 KiB", "25.0%", "2.00 KiB", "0.333", "bit-equal"]
    assert list(table.loc["torch, budget None"]) == ["0 B", "", "1 B", "0.000", "within 3e-07"]


def test_figures_are_the_fields() -> None:
    one = row(0.5, 0.25, 7)
    assert one.figures() == {field.name: getattr(one, field.name) for field in fields(BudgetRow)}
    assert BudgetRow(**one.figures()) == one


# The record: figures of the version that it names


def test_the_record_holds_both_models() -> None:
    assert records.load("torch_budget").about == record.EXPERIMENTS["torch_budget"].about
    for model, ways in ((tb.STACK, 17), (tb.GPT2, 16)):
        found = tb.recorded(model)
        assert len(found) == ways
        assert all(one.equal_gradients for one in found)
        assert [one.budget for one in found if one.budget is not None] == [tenth / 10 for tenth in range(10, -1, -1)]
    with pytest.raises(ValueError, match="the record holds stack of 6 blocks, GPT-2 mini; got 'llama'"):
        tb.recorded("llama")


@pytest.mark.parametrize("model", [tb.STACK, tb.GPT2])
def test_recorded_budgets_are_kept_as_torch_counts_and_overrun_in_storages(model: str) -> None:
    found = tb.recorded(model)
    assert all(one.counted_share <= one.budget for one in found if one.budget is not None)
    assert {0.1, 0.2, 0.3, 0.4} <= {one.budget for one in tb.overruns(found)}


@pytest.mark.parametrize("model", [tb.STACK, tb.GPT2])
def test_recorded_peaks_do_not_follow_the_budget(model: str) -> None:
    rows = {one.label: one for one in tb.recorded(model)}
    assert (0.1, 0.0) in [(larger.budget, smaller.budget) for larger, smaller in tb.rises(rows.values())]
    assert rows["torch, budget 0"].peak_bytes >= rows["keep all"].peak_bytes
    assert rows["full checkpoint"].peak_bytes < min(one.peak_bytes for one in rows.values() if one.budget is not None)


def test_the_recorded_stack_saves_what_the_closed_form_says() -> None:
    rows = {one.label: one for one in tb.recorded(tb.STACK)}
    shape = formulas.BlockShape(4, 256, 256, 4)
    for strategy in (ms.KeepAll(), ms.SelectiveOps(), ms.Selective(2), ms.FullCheckpoint()):
        expected = formulas.stack_saved_bytes(strategy.plan(6), shape)
        assert rows[strategy.label].saved_bytes - expected == 0, strategy.label


def test_the_experiment_names_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(tb, "torch_budgets", lambda **sizes: asked.append(sizes) or [row(1, 1.0, 3)])
    monkeypatch.setattr(tb, "torch_budgets_on_gpt2", lambda size, **sizes: asked.append(sizes) or [row(0, 0.0, 5)])
    assert [(one["model"], one["peak_bytes"]) for one in tb.full_size()] == [(tb.STACK, 3), (tb.GPT2, 5)]
    assert all(sizes["budgets"] == [tenth / 10 for tenth in range(10, -1, -1)] for sizes in asked)
