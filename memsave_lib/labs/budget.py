"""The lab on budgets: the fastest plan that fits, and how it fills the budget."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from memsave_lib import planner
from memsave_lib.arguments import whole_number
from memsave_lib.course.costs import stack_model_costs
from memsave_lib.devices import Device
from memsave_lib.labs.component import Lab
from memsave_lib.labs.config import Job, LabConfig, Prediction, Slider, Values
from memsave_lib.labs.stack_step import StackStep, lengths_around
from memsave_lib.strategies import KeepAll
from memsave_lib.units import human_bytes

BUDGET = "budget"
PERCENT = range(20, 101, 10)
#: How fast it computes does not matter where nothing is sent away.
ANY_DEVICE = Device("any device", flops=1.0)


def budget_lab(
    n_layers: int,
    hidden: int,
    heads: int,
    batch_size: int,
    seq_len: int,
    percent: int = 60,
    device: str | torch.device = "cpu",
) -> Lab:
    """The fastest plan of kept and recomputed blocks whose peak fits a share of what keeping all needs.

    Args:
        n_layers, hidden, heads, batch_size: of the :class:`~memsave_lib.BlockStack` and its input.
        seq_len, percent: where the sliders start; the budget is this share of the peak of a step that keeps all.
        device: where the step runs. Plans are those for a CPU, which hold on a GPU up to what its kernels save more.
    """
    whole_number("percent", percent)
    start = StackStep.on(device, n_layers, hidden, heads, batch_size, seq_len)

    @cache
    def budget_bytes(seq_len: int, percent: int) -> int:
        paper = replace(start, seq_len=seq_len, device=torch.device("cpu"))
        return paper.predict(KeepAll().plan(n_layers)).peak_bytes * percent // 100

    @cache
    def plan(seq_len: int, percent: int) -> planner.PlannedStrategy | planner.BelowTheFloor:
        costs = stack_model_costs(replace(start, seq_len=seq_len, device=torch.device("cpu")).shape, n_layers)
        try:
            return planner.plan_under_budget(
                costs, budget_bytes(seq_len, percent), ANY_DEVICE, actions=("keep", "recompute")
            )
        except planner.BelowTheFloor as error:
            return error

    def predict(values: Values) -> Prediction:
        chosen = values["seq_len"], values[BUDGET]
        budget, found = budget_bytes(*chosen), plan(*chosen)
        if isinstance(found, planner.BelowTheFloor):
            share = found.floor_bytes / budget_bytes(values["seq_len"], 100)
            said = f"{found}. That is {share:.0%} of what keeping all needs."
            return Prediction(0, None, 0, budget_bytes=budget, obstacle=said)
        kept = ", ".join(str(index) for index, action in enumerate(found.actions) if action == "keep")
        said = f"Within {human_bytes(budget)} the fastest plan keeps {f'blocks {kept}' if kept else 'no block'}."
        return replace(start, seq_len=values["seq_len"]).predict(found.plan(n_layers), budget, said)

    def prepare(values: Values) -> Job:
        return replace(start, seq_len=values["seq_len"]).job(plan(values["seq_len"], values[BUDGET]))

    sliders = (
        Slider(BUDGET, PERCENT, percent, "%"),
        Slider("seq_len", lengths_around(seq_len), seq_len),
    )
    return Lab(LabConfig(sliders, BUDGET, predict, prepare, start.free_bytes, same_scale=BUDGET))
