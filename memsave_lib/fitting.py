"""A budget, your model: profile it, plan, and verify the plan before anything is trained.

``fit`` does all of that on a fake copy of the model (:mod:`memsave_lib.fake`), so neither the model nor the memory of
the device is touched. What it hands back is a strategy for :func:`memsave_lib.apply`, with the peak that the fake run
of that very strategy had: the peak that the real step will have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memsave_lib import _compat, devices, estimation, fake
from memsave_lib.comparison import start_over, step_seconds
from memsave_lib.costs import ModelCosts
from memsave_lib.devices import Device
from memsave_lib.flops import count_flops
from memsave_lib.models import find_blocks
from memsave_lib.placement import check_applicable
from memsave_lib.planner import (
    BelowTheFloor,
    PlannedStrategy,
    check_device,
    check_options,
    fastest_in_simulation,
    lean_plans,
)
from memsave_lib.profiling import model_costs
from memsave_lib.runner import apply
from memsave_lib.strategies import ACTIONS, MIN_BYTES, FullCheckpoint, KeepAll, Strategy
from memsave_lib.trace import Trace
from memsave_lib.units import human_bytes, parse_bytes

#: How often a plan that turned out too large is planned again for a smaller budget.
ATTEMPTS = 8
#: Real steps of which the fastest counts: the first one warms up.
REPEATS = 3


def fit(
    model: nn.Module,
    batch: Any,
    budget: int | str,
    device: Device | None = None,
    *,
    loss: fake.Loss | None = None,
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] | Optimizer | None = "adamw",
    blocks: Sequence[nn.Module] | None = None,
    actions: Sequence[str] = ACTIONS,
    store: str = "host",
    min_bytes: int | str = MIN_BYTES,
) -> PlannedStrategy:
    """The fastest strategy with which one training step of ``model`` stays within ``budget`` bytes.

        strategy = ms.fit(model, {"input_ids": tokens, "labels": tokens}, "14 GiB")
        with ms.apply(model, strategy):
            train(model)

    The budget holds the whole step: parameters, gradients that start from None, the optimizer's state, activations and
    temporaries, as :class:`~memsave_lib.MemoryMeter` counts them. The step is that of a plain loop: one forward, of
    which the loss alone is kept, and one backward. Whoever holds on to the output keeps its logits too; gradients that
    wait for a second forward, and autocast around or inside the model, change the peak: measure such a step.

    It is planned for the mode that the model is in: call ``model.train()`` first. Hooks of your own stay behind when
    the model is copied. A block that is recomputed counts batch statistics twice, as :func:`memsave_lib.apply` says.

    Args:
        model: any model of a stack of blocks, in the mode in which it will be trained: call ``model.train()`` first
            where it has dropout. Nothing of it changes.
        batch: what it is called with in training: a dict of keyword arguments, a tuple, or one tensor.
        budget: bytes, or a string such as ``"14 GiB"``.
        device: what FLOPs and copies cost. None: this machine, whose copies :func:`memsave_lib.devices.measure` times,
            and whose FLOPs are those that real steps of this model reach, every block recomputed. A preset such as
            ``devices.A100`` runs nothing.
        loss: ``loss(output, batch)``, one number. Default: the loss that the output carries.
        optimizer: that will train it: a name, a function from parameters to an optimizer, an optimizer of the like, or
            None where nothing of it is to be counted.
        blocks: as for :func:`memsave_lib.apply`.
        actions: what may happen to a block: ``("keep", "recompute")`` to offload nothing.
        store: ``"host"`` or ``"disk"``: where offloaded tensors go.
        min_bytes: smaller tensors stay.

    Raises:
        BelowTheFloor: a ValueError: no plan fits; it says the smallest budget that one was found to fit, what sets it,
            and what the peak is made of there.
        TypeError: ``device`` is no :class:`~memsave_lib.Device`, or a size is neither a number nor a string.
        ValueError: the model decides by values of tensors, which fake tensors do not have; one of ``blocks`` is no part
            of it; or an option is none.
    """
    limit, options = parse_bytes(budget), {"actions": actions, "store": store, "min_bytes": parse_bytes(min_bytes)}
    check_options(actions, store)
    if device is not None:
        check_device(device)
    found = find_blocks(model) if blocks is None else list(blocks)
    check_applicable(model, KeepAll(), KeepAll().plan(len(found)), found)
    places = {module: name for name, module in model.named_modules()}
    made = fake.copy_of(model, batch, loss)
    copies = [made.model.get_submodule(places[block]) for block in found]
    with made.running():
        chosen = estimation.optimizer_with_state(optimizer, made.model, model)
        costs = model_costs(made.model, made.step, copies, min_bytes, chosen)

        def run(strategy: Strategy) -> Trace:
            return estimation.run(made, strategy, chosen, lambda _: copies).trace

        fits = device is None and run(FullCheckpoint()).peak_bytes <= limit
    if device is None:
        reached = _reached(model, batch, made, found, copies) if fits else None
        device = this_machine(next(model.parameters()).device, reached)
    with made.running():
        return _verified(costs, limit, device, run, options)


def this_machine(place: torch.device, reached: float | None = None) -> Device:
    """What this machine's link carries, and ``reached`` FLOPs a second; None: those of large matrix products."""
    machine = devices.measure(place, seconds=0.5)
    if reached is None:
        return machine
    return replace(machine, flops=reached, source={**machine.source, "flops": "reached by steps of this model"})


def _reached(
    model: nn.Module, batch: Any, made: fake.FakeModel, blocks: list[nn.Module], copies: list[nn.Module]
) -> float:
    """FLOPs a second of real steps with every block recomputed; how many they are is counted on the fake copy."""
    with made.running(), apply(made.model, FullCheckpoint(), blocks=copies):
        flops = count_flops(made.step, attention=True)
    made.model.zero_grad(set_to_none=True)
    return flops / _seconds(model, batch, made.loss, blocks)


def _seconds(model: nn.Module, batch: Any, loss: fake.Loss, blocks: list[nn.Module]) -> float:
    """Of a real step with every block recomputed; model and batch are put back as they were."""
    leaves = [leaf for leaf in _compat.tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.is_leaf]
    gradients = [leaf.grad for leaf in leaves]

    def step() -> None:
        loss(fake.call(model, batch), batch).backward()

    try:
        with start_over(model) as restart, apply(model, FullCheckpoint(), blocks=blocks):
            return min(step_seconds(step, restart) for _ in range(REPEATS))
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


def _verified(
    costs: ModelCosts, limit: int, machine: Device, run: Callable[[Strategy], Trace], options: dict[str, Any]
) -> PlannedStrategy:
    """Plan, run the plan on fake tensors, and plan for less where the planner's model of memory was too kind."""
    aim = limit
    for _ in range(ATTEMPTS):
        try:
            planned = fastest_in_simulation(costs, aim, machine, **options)
        except BelowTheFloor as error:
            return _leanest(error.cause, costs, limit, machine, run, options)
        peak = run(planned).peak_bytes
        if peak <= limit:
            return replace(planned, budget=limit, peak_bytes=peak)
        aim = max(0, planned.peak_bytes - (peak - limit))  # the planner errs by as much for a plan that is near
    return _leanest("more than the planner's model of memory foresees", costs, limit, machine, run, options)


def _leanest(
    cause: str,
    costs: ModelCosts,
    limit: int,
    machine: Device,
    run: Callable[[Strategy], Trace],
    options: dict[str, Any],
) -> PlannedStrategy:
    """The plan that needs least, if it fits after all: the planner takes tensors to be there together that are not.

    Raises:
        BelowTheFloor: it does not; with the peak as the fake run finds it, and what memory is made of there.
    """
    traces = {plan: run(plan) for plan in lean_plans(costs, machine, **options)}
    leanest, trace = min(traces.items(), key=lambda item: item[1].peak_bytes)
    if trace.peak_bytes <= limit:
        return replace(leanest, budget=limit, peak_bytes=trace.peak_bytes)
    parts = sorted(((size, name) for name, size in trace.at_peak.items() if size), reverse=True)
    made_of = ", ".join(f"{name} {human_bytes(size)}" for size, name in parts[:4])
    advice = (
        f". There the peak is in {trace.peak_at} and made of {made_of}. A shorter sequence, a smaller batch, or "
        "smaller weights and optimizer state lower it; no choice for the blocks that the planner knows does"
    )
    raise BelowTheFloor(limit, trace.peak_bytes, cause, advice) from None
