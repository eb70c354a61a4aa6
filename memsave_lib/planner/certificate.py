"""What the planner hands back: a strategy, and what is known about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from memsave_lib.strategies import PerBlock
from memsave_lib.units import human_bytes

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
        reserve: bytes of the budget that were set aside for tensors under way. What is proved is proved for the rest.
    """

    extra_seconds: float
    plain_seconds: float
    bound_seconds: float
    confirmed_by: tuple[str, ...]
    simulated_seconds: float
    reserve: int = 0

    @property
    def proved(self) -> bool:
        """Whether the plan is the fastest: by one exact solver at least, or by meeting the bound."""
        return bool(self.confirmed_by) or self.extra_seconds - self.bound_seconds <= AGREEMENT * self.plain_seconds

    @property
    def overhead(self) -> float:
        """Extra seconds as a share of the plain step; one more forward of everything is 1/3."""
        return self._share(self.extra_seconds)

    @property
    def bound(self) -> float:
        """The overhead that no plan undercuts."""
        return self._share(self.bound_seconds)

    @property
    def simulated_overhead(self) -> float:
        """The overhead that whole tensors have."""
        return self._share(self.simulated_seconds)

    @property
    def gap(self) -> float:
        """How much faster another plan could be at most, as a share of the plain step: 0 where the plan is proved."""
        return 0.0 if self.proved else self.overhead - self.bound

    def _share(self, seconds: float) -> float:
        return seconds / self.plain_seconds if self.plain_seconds else 0.0

    def __str__(self) -> str:
        rest = f" that leaves {human_bytes(self.reserve)} to tensors under way" if self.reserve else ""
        if self.proved:
            known = f"no plan{rest} is faster ({', '.join(self.confirmed_by) or 'it meets the bound'})"
        else:
            known = f"another plan{rest} may be faster, by {self.gap:.2%} of a step at most"
        return (
            f"{self.overhead:.2%} over the plain step in the planner's model, in which {known}; linear relaxation "
            f"{self.bound:.2%}; {self.simulated_overhead:.2%} when whole tensors travel"
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
