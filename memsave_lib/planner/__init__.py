"""The fastest plan under a budget: keep, recompute or offload each block, and proof that it is the fastest.

    plan = plan_under_budget(costs, "40 GB", devices.A100)
    print(plan.describe(), plan.certificate)

:mod:`~memsave_lib.planner.chain` is the model of a step that plans are priced by. The same model is solved in several
ways that know nothing of each other: a dynamic programme (:mod:`~memsave_lib.planner.labels`), a mixed-integer linear
program and its relaxation (:mod:`~memsave_lib.planner.programs`), and, for few blocks, by trying every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memsave_lib.arguments import whole_number
from memsave_lib.costs import BlockCosts, ModelCosts
from memsave_lib.devices import Device
from memsave_lib.planner.chain import KEEP, Chain
from memsave_lib.planner.labels import fastest
from memsave_lib.planner.programs import TRIABLE, by_trying, mixed_integer_program, relax
from memsave_lib.simulation import LINKS, simulate
from memsave_lib.strategies import ACTIONS, MIN_BYTES, PerBlock
from memsave_lib.units import human_bytes, parse_bytes

__all__ = [
    "BelowTheFloor",
    "Certificate",
    "PlannedStrategy",
    "fastest_in_simulation",
    "leanest_plan",
    "plan_under_budget",
    "plans_over_budgets",
]

#: Some tens of tensors, which is the tensors of a few blocks: more under way at once change little.
MOST_PREFETCH = 64
#: What is set aside for tensors under way, in turn, to see which plan the simulator likes best: room for so many of the
#: largest tensor, and shares of the budget above the floor.
RESERVED_TENSORS = (1, 2, 4, 8, 16)
RESERVED_SHARES = (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6)
#: Two solvers agree when their seconds differ by less than this share of the plain step.
AGREEMENT = 1e-6


class BelowTheFloor(ValueError):
    """No plan fits the budget: ``floor_bytes`` is the smallest that one fits, ``cause`` is what sets it."""

    def __init__(self, budget: int, floor_bytes: int, cause: str, advice: str = "") -> None:
        self.budget, self.floor_bytes, self.cause = budget, floor_bytes, cause
        super().__init__(
            f"a budget of {human_bytes(budget)} ({budget:,} bytes) is below the floor of {human_bytes(floor_bytes)} "
            f"({floor_bytes:,} bytes), which is set by {cause}{advice}"
        )


@dataclass(frozen=True)
class Certificate:
    """What is known about a plan's time, in the planner's own model.

    Args:
        extra_seconds: recomputation and waiting, beyond the plain step.
        plain_seconds: of the step without both.
        bound_seconds: no plan has fewer extra seconds: the linear relaxation.
        confirmed_by: the solvers that found no faster plan, each by itself.
        simulated_seconds: extra seconds by :func:`memsave_lib.simulate`, which moves whole tensors and lets
            ``prefetch`` of them travel at once.
    """

    extra_seconds: float
    plain_seconds: float
    bound_seconds: float
    confirmed_by: tuple[str, ...]
    simulated_seconds: float

    @property
    def proved(self) -> bool:
        """Whether the plan is the fastest: by one exact solver at least, or by meeting the bound."""
        return bool(self.confirmed_by) or self.gap < AGREEMENT

    @property
    def overhead(self) -> float:
        """Extra seconds as a share of the plain step; one more forward of everything is 1/3."""
        return self.extra_seconds / self.plain_seconds if self.plain_seconds else 0.0

    @property
    def bound(self) -> float:
        """The overhead that no plan undercuts."""
        return self.bound_seconds / self.plain_seconds if self.plain_seconds else 0.0

    @property
    def simulated_overhead(self) -> float:
        """The overhead that whole tensors have."""
        return self.simulated_seconds / self.plain_seconds if self.plain_seconds else 0.0

    @property
    def gap(self) -> float:
        """How much faster another plan could be at most, as a share of the plain step."""
        return max(0.0, self.overhead - self.bound)

    def __str__(self) -> str:
        if self.confirmed_by:
            known = f"no plan is faster ({', '.join(self.confirmed_by)})"
        else:
            known = f"another plan is faster by {self.gap:.2%} of a step at most"
        return (
            f"{self.overhead:.2%} over the plain step, {known}; linear relaxation {self.bound:.2%}; "
            f"{self.simulated_overhead:.2%} when whole tensors travel"
        )


@dataclass(frozen=True)
class PlannedStrategy(PerBlock):
    """A strategy for one stack, as :func:`plan_under_budget` and :func:`memsave_lib.fit` find it.

    Args:
        actions, store, min_bytes, prefetch: as in :class:`~memsave_lib.strategies.PerBlock`.
        budget: that it was made for, in bytes.
        peak_bytes: what it needs: of the planner's model, or, from ``fit``, of a fake run.
        certificate: what is known about its time.
    """

    budget: int = field(default=0, compare=False)
    peak_bytes: int = field(default=0, compare=False)
    certificate: Certificate | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        return f"planned for {human_bytes(self.budget)}: {super().label.removeprefix('per block: ')}"

    def describe(self) -> str:
        """One line a block."""
        return self.plan(len(self.actions)).describe()


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
    costs, whole = ModelCosts.of(costs), parse_bytes(budget)
    limit = whole - parse_bytes(reserve)
    chain = _chain(costs, device, actions, store)
    floor, cause = chain.floor()
    if limit < floor:
        raise BelowTheFloor(limit, floor, cause)
    found = fastest(chain, limit)
    plan, extra = found.plan, found.extra_seconds
    confirmed = ["dynamic programme"] if found.proved else []
    slack = AGREEMENT * chain.plain_seconds
    if chain.n_blocks <= TRIABLE and by_trying(chain, limit).extra_seconds >= extra - slack:
        confirmed.append("every plan tried")
    if confirm_seconds > 0:
        solved = mixed_integer_program(chain, limit, confirm_seconds)
        if solved.plan is not None and solved.extra_seconds < extra - slack:
            plan, extra = solved.plan, float(chain.extra_seconds([solved.plan], limit)[0])
        if solved.proved:
            confirmed.append("mixed-integer program")
    prefetch = _prefetch(chain, plan, costs, whole)
    return _strategy(
        costs, device, chain, plan, prefetch, whole, store, min_bytes, _Known(extra, tuple(confirmed), limit)
    )


def leanest_plan(
    costs: Sequence[BlockCosts] | ModelCosts,
    device: Device,
    *,
    actions: Sequence[str] = ACTIONS,
    store: str = "host",
    min_bytes: int | str = MIN_BYTES,
) -> PlannedStrategy:
    """The plan that needs least, whatever it costs: every copy is waited for on the spot."""
    costs = ModelCosts.of(costs)
    chain = _chain(costs, device, actions, store)
    floor, _ = chain.floor()
    plan, _ = chain.leanest(floor)
    extra = float(chain.extra_seconds([plan], floor)[0])
    return _strategy(costs, device, chain, plan, 0, floor, store, min_bytes, _Known(extra, (), floor))


@dataclass(frozen=True)
class _Known:
    extra_seconds: float
    confirmed_by: tuple[str, ...]
    limit: int


def _chain(costs: ModelCosts, device: Device, actions: Sequence[str], store: str) -> Chain:
    unknown = [action for action in actions if action not in ACTIONS]
    if isinstance(actions, str) or unknown or not actions:
        raise ValueError(f"actions are some of {', '.join(map(repr, ACTIONS))}, got {actions!r}")
    if store not in LINKS:
        raise ValueError(f'store is "host" or "disk", got {store!r}')
    chain = Chain.of(costs, device, store, actions)
    if not chain.allowed:
        raise ValueError(f"{device.name} has no link to {store} that anybody knows, and actions={actions!r} need one")
    return chain


def _strategy(
    costs: ModelCosts,
    device: Device,
    chain: Chain,
    plan: Sequence[int],
    prefetch: int,
    budget: int,
    store: str,
    min_bytes: int | str,
    known: _Known,
) -> PlannedStrategy:
    planned = PlannedStrategy(tuple(ACTIONS[action] for action in plan), store, min_bytes, prefetch, budget)
    lanes = simulate(costs.blocks, planned.plan(chain.n_blocks), device, prefetch=prefetch, link=store)
    certificate = Certificate(
        extra_seconds=known.extra_seconds,
        plain_seconds=costs.step_flops / device.need("flops"),
        bound_seconds=min(known.extra_seconds, relax(chain, known.limit).extra_seconds),
        confirmed_by=known.confirmed_by,
        simulated_seconds=max(0.0, lanes.step_seconds - chain.plain_seconds),
    )
    peak = chain.peak_bytes(plan, [block.saved for block in costs.blocks], prefetch)
    return replace(planned, peak_bytes=peak, certificate=certificate)


def fastest_in_simulation(
    costs: Sequence[BlockCosts] | ModelCosts, budget: int | str, device: Device, **options: Any
) -> PlannedStrategy:
    """The plan that the simulator finds fastest, of those for several reserves for tensors under way.

    The planner's fluid needs no room to travel in. Whole tensors do: a plan that fills the budget with what it keeps
    leaves them none, and waits.

    Args:
        options: of :func:`plan_under_budget`, ``reserve`` left out.
    """
    costs, limit = ModelCosts.of(costs), parse_bytes(budget)
    plans = [plan_under_budget(costs, limit, device, **options)]
    leanest = leanest_plan(costs, device, **{name: options[name] for name in options if name != "confirm_seconds"})
    largest = max(max(block.saved, default=0) for block in costs.blocks)
    spare = limit - leanest.budget
    reserves = {count * largest for count in RESERVED_TENSORS} | {int(share * spare) for share in RESERVED_SHARES}
    for reserve in sorted(reserve for reserve in reserves if 0 < reserve <= spare):
        plans.append(plan_under_budget(costs, limit, device, reserve=reserve, **options))
    return min(plans, key=lambda plan: (plan.certificate.simulated_seconds, plan.actions.count("offload")))


def plans_over_budgets(
    costs: Sequence[BlockCosts] | ModelCosts, device: Device, n_budgets: int = 16, **options: Any
) -> tuple[PlannedStrategy, ...]:
    """Plans from the smallest budget that one fits to the largest that any needs, in even steps of bytes.

    A plan for a smaller budget fits a larger one too: where many blocks differ and a plan is not proved, the faster one
    of its neighbours takes its place, so that extra seconds never rise with the budget.

    Args:
        options: of :func:`plan_under_budget`.
    """
    whole_number("n_budgets", n_budgets, at_least=2)
    costs = ModelCosts.of(costs)
    chain = _chain(costs, device, options.get("actions", ACTIONS), options.get("store", "host"))
    low, high = chain.floor()[0], chain.peak_bytes([KEEP] * chain.n_blocks, [()] * chain.n_blocks, 0)
    plans: list[PlannedStrategy] = []
    for number in range(n_budgets):
        budget = low + (max(high, low) - low) * number // (n_budgets - 1)
        planned = plan_under_budget(costs, budget, device, **options)
        before = plans[-1] if plans else planned
        if before.certificate.extra_seconds < planned.certificate.extra_seconds:
            planned = replace(before, budget=budget)
        plans.append(planned)
    return tuple(plans)


def _prefetch(chain: Chain, plan: Sequence[int], costs: ModelCosts, budget: int) -> int:
    """As many tensors under way at once as the budget has room for."""
    tensors = [block.saved for block in costs.blocks]
    return next(n for n in range(MOST_PREFETCH, -1, -1) if n == 0 or chain.peak_bytes(plan, tensors, n) <= budget)
