"""The fastest plan under a budget: keep, recompute or offload each block, and proof that it is the fastest.

    plan = plan_under_budget(costs, "40 GB", devices.A100)
    print(plan.describe(), plan.certificate)

:mod:`~memsave_lib.planner.chain` is the model of a step that plans are priced by. The same model is solved in several
ways that know nothing of each other: a dynamic programme (:mod:`~memsave_lib.planner.labels`), a mixed-integer linear
program and its relaxation (:mod:`~memsave_lib.planner.programs`), and, for few blocks, by trying every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from memsave_lib.arguments import whole_number
from memsave_lib.costs import BlockCosts, ModelCosts
from memsave_lib.devices import Device
from memsave_lib.planner.certificate import AGREEMENT, BelowTheFloor, Certificate, PlannedStrategy
from memsave_lib.planner.chain import KEEP, Chain
from memsave_lib.planner.labels import Found, fastest
from memsave_lib.planner.programs import TRIABLE, Solved, by_trying, mixed_integer_program, relax
from memsave_lib.simulation import LINKS, simulate
from memsave_lib.strategies import ACTIONS, MIN_BYTES
from memsave_lib.units import exact_bytes, parse_bytes

__all__ = [
    "BelowTheFloor",
    "Certificate",
    "PlannedStrategy",
    "fastest_in_simulation",
    "lean_plans",
    "plan_under_budget",
    "plans_over_budgets",
]

#: Some tens of tensors, which is the tensors of a few blocks: more under way at once change little.
MOST_PREFETCH = 64
#: What is set aside for tensors under way, in turn, to see which plan the simulator likes best: room for so many of the
#: largest tensor, and shares of the budget above the floor.
RESERVED_TENSORS = (1, 2, 4, 8, 16)
RESERVED_SHARES = (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6)


def plan_under_budget(
    costs: Sequence[BlockCosts] | ModelCosts,
    budget: int | str,
    device: Device,
    *,
    actions: Sequence[str] = ACTIONS,
    store: str = "host",
    min_bytes: int | str = MIN_BYTES,
    reserve: int | str = 0,
    confirm_seconds: float = 0.0,
) -> PlannedStrategy:
    """The plan with the fewest extra seconds whose peak stays within ``budget``.

    Args:
        costs: of each block in order, or of a whole model. What their needs count, the budget must hold: whole models
            as :func:`memsave_lib.profiling.model_costs` reads them count everything, down to the parameters.
        budget: bytes, or a string such as ``"14 GiB"``.
        device: FLOPs and, for offloading, bytes a second. A device without a link can keep and recompute only.
        actions: what may happen to a block.
        store: ``"host"`` or ``"disk"``: where offloaded tensors go.
        min_bytes: below which tensors stay, as it was when ``costs`` were taken.
        reserve: bytes of the budget that are left to tensors under way, so that more of them may travel at once. The
            plan is the fastest within the rest.
        confirm_seconds: let a mixed-integer solver try for so long to confirm the plan, or to find a better one. Worth
            it for many blocks that all differ, where the certificate leaves a gap without it.

    Raises:
        BelowTheFloor: a ValueError: no plan fits; it says the smallest budget that does, and what sets it.
    """
    costs, whole, reserve = ModelCosts.of(costs), parse_bytes(budget), parse_bytes(reserve)
    _seconds_given(confirm_seconds)
    limit, task = whole - reserve, _Task(costs, device, actions, store, min_bytes)
    floor, cause = task.chain.floor()
    if limit < floor:
        advice = f"; {exact_bytes(reserve)} of it are reserved" if reserve else ""
        raise BelowTheFloor(whole, floor + reserve, cause, advice)
    plan, confirmed = _solved(task.chain, limit, confirm_seconds)
    return task.strategy(plan, whole, reserve, confirmed)


def _seconds_given(seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise ValueError(f"confirm_seconds is a number of seconds of at least 0, got {seconds!r}")


def _solved(chain: Chain, limit: int, confirm_seconds: float) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The best plan of all solvers that were asked, and who says that there is no better one."""
    ways: dict[str, Found | Solved] = {"dynamic programme": fastest(chain, limit)}
    if chain.n_blocks <= TRIABLE:
        ways["every plan tried"] = by_trying(chain, limit)
    if confirm_seconds > 0:
        ways["mixed-integer program"] = mixed_integer_program(chain, limit, confirm_seconds)
    plans = [found.plan for found in ways.values() if found.plan is not None]
    seconds = chain.extra_seconds(plans, limit)  # of the plans as they are: a solver's own sum has its tolerances
    best, slack = seconds.min(), AGREEMENT * chain.plain_seconds
    confirmed = (way for way, found in ways.items() if found.proved and found.extra_seconds >= best - slack)
    return plans[int(seconds.argmin())], tuple(confirmed)


def lean_plans(
    costs: Sequence[BlockCosts] | ModelCosts,
    device: Device,
    *,
    actions: Sequence[str] = ACTIONS,
    store: str = "host",
    min_bytes: int | str = MIN_BYTES,
) -> tuple[PlannedStrategy, ...]:
    """Plans that need little, whatever they cost: the one that needs least, and all blocks treated alike.

    Every copy is waited for on the spot. The planner takes all tensors of an offloaded block to be there at once while
    it runs. Where they come back one by one, a plan that looks worse may need less: a fake run tells.
    """
    task = _Task(ModelCosts.of(costs), device, actions, store, min_bytes)
    chain, tensors = task.chain, [block.saved for block in task.costs.blocks]
    least = chain.leanest(chain.floor()[0])[0]
    plans = dict.fromkeys([least, *((action,) * chain.n_blocks for action in chain.allowed)])
    return tuple(replace(task.strategy(plan, chain.peak_bytes(plan, tensors, 0)), prefetch=0) for plan in plans)


def check_device(device: object) -> None:
    """Raises TypeError where it is none."""
    if not isinstance(device, Device):
        raise TypeError(f"device is a Device such as devices.A100, got {device!r}")


def check_options(actions: object, store: object) -> None:
    """Raises ValueError where a plan cannot have them."""
    listed = isinstance(actions, Sequence) and not isinstance(actions, str)
    if not listed or not actions or not all(action in ACTIONS for action in actions):
        raise ValueError(f"actions are some of {', '.join(map(repr, ACTIONS))}, got {actions!r}")
    if not isinstance(store, str) or store not in LINKS:
        raise ValueError(f'store is "host" or "disk", got {store!r}')


class _Task:
    """What plans are made of, checked, and how a plan becomes a strategy."""

    def __init__(
        self, costs: ModelCosts, device: Device, actions: Sequence[str], store: str, min_bytes: int | str
    ) -> None:
        check_device(device)
        check_options(actions, store)
        self.costs, self.device, self.store, self.min_bytes = costs, device, store, parse_bytes(min_bytes)
        self.chain = Chain.of(costs, device, store, actions)
        if not self.chain.allowed:
            raise ValueError(
                f"{device.name} has no link to {store} that anybody knows, and actions={actions!r} need one"
            )

    def strategy(
        self, plan: Sequence[int], budget: int, reserve: int = 0, confirmed: tuple[str, ...] = ()
    ) -> PlannedStrategy:
        """That plan, with as many tensors under way at once as the budget has room for, and its certificate."""
        chain, limit, costs = self.chain, budget - reserve, self.costs
        peaks = [chain.peak_bytes(plan, [block.saved for block in costs.blocks], n) for n in range(MOST_PREFETCH + 1)]
        prefetch = max((n for n, peak in enumerate(peaks) if peak <= budget), default=0)
        actions = tuple(ACTIONS[action] for action in plan)
        planned = PlannedStrategy(actions, self.store, self.min_bytes, prefetch, budget, peaks[prefetch])
        lanes = simulate(costs.blocks, planned.plan(chain.n_blocks), self.device, prefetch=prefetch, link=self.store)
        extra = float(chain.extra_seconds([plan], limit)[0])
        certificate = Certificate(
            extra_seconds=extra,
            plain_seconds=costs.step_flops / self.device.need("flops"),
            bound_seconds=min(extra, relax(chain, limit).extra_seconds),
            confirmed_by=confirmed,
            simulated_seconds=max(0.0, lanes.step_seconds - chain.plain_seconds),
            reserve=reserve,
        )
        return replace(planned, certificate=certificate)


def _chain(costs: ModelCosts, device: Device, actions: Sequence[str] = ACTIONS, store: str = "host", **_: Any) -> Chain:
    """What plans with these options of :func:`plan_under_budget` are priced by."""
    return _Task(costs, device, actions, store, MIN_BYTES).chain


def fastest_in_simulation(
    costs: Sequence[BlockCosts] | ModelCosts, budget: int | str, device: Device, **options: Any
) -> PlannedStrategy:
    """The plan that the simulator finds fastest, of those for several reserves for tensors under way.

    The planner's fluid needs no room to travel in. Whole tensors do: a plan that fills the budget with what it keeps
    leaves them none, and waits. Ten reserves are tried, not all: with a larger budget another ten, so that simulated
    seconds may rise by a little with the budget, where those of the planner's own model never do.

    Args:
        options: of :func:`plan_under_budget`, ``reserve`` left out.
    """
    costs, limit = ModelCosts.of(costs), parse_bytes(budget)
    first = plan_under_budget(costs, limit, device, **options)
    known = first.certificate
    if known.simulated_seconds <= known.extra_seconds + AGREEMENT * known.plain_seconds:
        return first  # no tensor waits for want of room
    plans = [first]
    chain = _chain(costs, device, **options)
    largest = max(max(block.saved, default=0) for block in costs.blocks)
    spare = limit - chain.floor()[0]
    reserves = {count * largest for count in RESERVED_TENSORS} | {int(share * spare) for share in RESERVED_SHARES}
    for reserve in sorted(reserve for reserve in reserves if 0 < reserve <= spare):
        plans.append(plan_under_budget(costs, limit, device, reserve=reserve, **options))
    return min(plans, key=lambda plan: (plan.certificate.simulated_seconds, plan.actions.count("offload")))


def plans_over_budgets(
    costs: Sequence[BlockCosts] | ModelCosts, device: Device, n_budgets: int = 16, **options: Any
) -> tuple[PlannedStrategy, ...]:
    """Plans from the smallest budget that one fits to the largest that any needs, in even steps of bytes.

    A plan for a smaller budget fits a larger one too: where many blocks differ and a plan is not proved, the faster one
    of its neighbours takes its place, with the bound of its new budget, so that extra seconds never rise with the
    budget.

    Args:
        options: of :func:`plan_under_budget`.
    """
    whole_number("n_budgets", n_budgets, at_least=2)
    costs = ModelCosts.of(costs)
    chain = _chain(costs, device, **options)
    low, high = chain.floor()[0], chain.peak_bytes([KEEP] * chain.n_blocks, [()] * chain.n_blocks, 0)
    plans: list[PlannedStrategy] = []
    for number in range(n_budgets):
        budget = low + (max(high, low) - low) * number // (n_budgets - 1)
        planned = plan_under_budget(costs, budget, device, **options)
        before = plans[-1] if plans else planned
        if before.certificate.extra_seconds < planned.certificate.extra_seconds:
            planned = replace(before, budget=budget, certificate=_inherited(before.certificate, planned.certificate))
        plans.append(planned)
    return tuple(plans)


def _inherited(before: Certificate, own: Certificate) -> Certificate:
    """The seconds of a plan for a smaller budget, and what is known about this one."""
    return replace(
        own,
        extra_seconds=before.extra_seconds,
        bound_seconds=min(before.extra_seconds, own.bound_seconds),
        simulated_seconds=before.simulated_seconds,
    )
