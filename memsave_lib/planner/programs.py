"""The planner's model once more, as a mixed-integer linear program, and what can be learned from it.

- :func:`mixed_integer_program` is solved by HiGHS (``scipy.optimize.milp``): the same plan found by other means.
- :func:`relax` lets blocks be kept, recomputed and offloaded in part: no plan is faster than that. The prices that this
  puts on a byte (its dual solution) bound what any *rest* of a chain costs; :mod:`~memsave_lib.planner.labels` prunes
  with them.
- :func:`by_trying` needs no program: it prices every plan.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from memsave_lib.planner.chain import OFFLOAD, Chain

#: Up to so many blocks every plan can be tried: 3**7 = 2,187 plans.
TRIABLE = 7


@dataclass(frozen=True)
class Solved:
    """Extra seconds, ``inf`` where nothing fits; the plan; whether it is proved to be the best."""

    extra_seconds: float
    plan: tuple[int, ...] | None = None
    proved: bool = True


@dataclass(frozen=True)
class Relaxed:
    """Extra seconds that no plan undercuts, ``inf`` where nothing fits; shares of each action; the prices of bytes.

    ``prices[i] @ (1, held, leaving, ahead)`` is a lower bound on the seconds that blocks ``i`` and behind still cost.
    Where the solver gives up, the bound is 0, and there are neither shares nor prices.
    """

    extra_seconds: float
    shares: np.ndarray | None = None
    prices: np.ndarray | None = None


def by_trying(chain: Chain, budget: float) -> Solved:
    """The best of all plans, by pricing each."""
    if chain.n_blocks > TRIABLE:
        raise ValueError(f"trying every plan of {chain.n_blocks} blocks takes too long; up to {TRIABLE} it is fine")
    plans = np.array(list(itertools.product(chain.allowed, repeat=chain.n_blocks)))
    seconds = chain.extra_seconds(plans, budget)
    best = int(seconds.argmin())
    return Solved(float(seconds[best]), tuple(map(int, plans[best])) if math.isfinite(seconds[best]) else None)


def mixed_integer_program(chain: Chain, budget: float, seconds: float = 60.0) -> Solved:
    """The best plan by branch and bound; not proved when ``seconds`` were not enough."""
    if max(chain.elsewhere, chain.least_bytes) > budget:
        return Solved(math.inf)
    program = _Program(chain, budget)
    result = milp(
        program.costs,
        constraints=program.constraints(),
        integrality=program.whole,
        bounds=Bounds(0.0, program.upper),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if result.x is None:
        return Solved(math.inf, proved=result.status == 2)
    plan = tuple(int(action) for action in result.x[program.action].argmax(axis=1))
    return Solved(float(result.fun) * program.seconds, plan, proved=result.status == 0)


def relax(chain: Chain, budget: float, priced_for: float = 1.0) -> Relaxed:
    """The linear relaxation for ``budget`` bytes.

    Args:
        priced_for: take the prices of a budget so many times as large: right for any, if less sharp.
    """
    if chain.leanest(budget)[1]:
        return Relaxed(math.inf)
    program = _Program(chain, budget)
    rows, right = program.inequalities()
    # An upper bound of 1 on an action says nothing new; without it, all prices are in the rows.
    bounds = np.stack([np.zeros_like(program.upper), program.upper], axis=1)
    equal = program.matrix(program.equal)
    more = (priced_for - 1) * program.room * (right > 0)
    result = linprog(program.costs, rows, right + more, equal, np.ones(chain.n_blocks), bounds)
    if result.status != 0:
        return Relaxed(0.0)
    return Relaxed(
        max(0.0, float(result.fun)) * program.seconds,
        result.x[program.action],
        program.prices(result.ineqlin.marginals, result.eqlin.marginals),
    )


class _Program:
    """Rows and columns.

    Seconds are in units of the plain step. Bytes count beyond what is alive at any moment, in units of the room that
    the budget leaves, or of all that there is where that is less: numbers near 1, because solvers drop what is tiny.

    Columns: for each block the three actions and, for both ways, the seconds waited for before it, the backlog after
    that wait and what is left of it behind the block; for each place between blocks the bytes held there. A row belongs
    to the block that it is about, and has no column of any block before that, but for the three that describe where the
    step stands: held, leaving, ahead.
    """

    def __init__(self, chain: Chain, budget: float) -> None:
        n = chain.n_blocks
        self.chain, self.seconds = chain, chain.plain_seconds or 1.0
        room = min(budget, chain.most_bytes) - chain.least_bytes
        self.unit = max(1.0, room)
        self.room = room / self.unit
        self.action = np.arange(3 * n).reshape(n, 3)
        self.held = 3 * n + np.arange(n + 1)
        lanes = (4 * n + 1 + np.arange(6 * n)).reshape(2, 3, n)
        self.costs, self.upper = np.zeros(10 * n + 1), np.full(10 * n + 1, np.inf)
        self.upper[self.held[0]] = 0.0
        self.whole = np.zeros_like(self.costs)
        self.whole[self.action] = 1
        self.equal: list[dict[int, float]] = [dict.fromkeys(columns, 1.0) for columns in self.action]
        self._rows: list[tuple[int, dict[int, float], float]] = []  # block, coefficients, bytes at most
        for i, columns in enumerate(self.action):
            self.costs[columns] = chain.extra[i] / self.seconds
            self.upper[np.delete(columns, chain.allowed)] = 0.0
            kept = dict(zip(columns, chain.held[i] / self.unit, strict=True))
            self._at_most(i, {**kept, self.held[i]: 1.0, self.held[i + 1]: -1.0}, 0.0)
        self._at_most(n, {self.held[n]: 1.0}, self.room - (chain.turn - chain.least_bytes) / self.unit)
        forward = np.repeat(chain.forward[:, None], 3, axis=1)
        self._arriving = [
            self._copies(lanes[0], chain.out, forward, chain.need_forward),
            self._copies(lanes[1], chain.back, chain.backward, chain.need_backward),
        ]

    def _copies(self, lane: np.ndarray, link: float, seconds: np.ndarray, need: np.ndarray) -> list[int]:
        """One recursion: out in forward, or back in backward as seen from its end. Its rows with what arrives."""
        (waited, backlog, left), action = lane, self.action
        rate = link * self.seconds / self.unit if OFFLOAD in self.chain.allowed else 1.0
        sent, arriving = self.chain.sent / self.unit, []
        need = (need - self.chain.least_bytes) / self.unit
        self.costs[waited] = 1.0
        for i in range(self.chain.n_blocks):
            needs = dict(zip(action[i], need[i], strict=True))
            self._at_most(i, {**needs, self.held[i]: 1.0, backlog[i]: 1.0}, self.room)
            before = {} if i == 0 else {left[i - 1]: 1.0, **dict(zip(action[i - 1], sent[i - 1], strict=True))}
            arriving.append(len(self._rows))
            self._at_most(i, {**before, waited[i]: -rate, backlog[i]: -1.0}, 0.0)
            carried = dict(zip(action[i], -rate * seconds[i] / self.seconds, strict=True))
            self._at_most(i, {**carried, backlog[i]: 1.0, left[i]: -1.0}, 0.0)
        self.costs[left[-1]] += 1.0 / rate
        self.costs[action[-1]] += sent[-1] / rate
        return arriving

    def _at_most(self, block: int, coefficients: dict[int, float], most: float) -> None:
        self._rows.append((block, coefficients, most))

    def matrix(self, rows: list[dict[int, float]]) -> csr_array:
        entries = [(number, column, value) for number, row in enumerate(rows) for column, value in row.items()]
        numbers, columns, values = zip(*entries, strict=True)
        return csr_array((values, (numbers, columns)), shape=(len(rows), len(self.costs)))

    def inequalities(self) -> tuple[csr_array, np.ndarray]:
        return self.matrix([row for _, row, _ in self._rows]), np.array([most for _, _, most in self._rows])

    def constraints(self) -> list[LinearConstraint]:
        rows, right = self.inequalities()
        return [LinearConstraint(rows, -np.inf, right), LinearConstraint(self.matrix(self.equal), 1.0, 1.0)]

    def prices(self, duals: np.ndarray, equal: np.ndarray) -> np.ndarray:
        """What :class:`Relaxed` promises, by weak duality: rows of later blocks bind later blocks only."""
        chain, n = self.chain, self.chain.n_blocks
        constant, held = np.zeros(n + 1), np.zeros(n + 1)
        constant[:n] = equal
        for (block, row, most), dual in zip(self._rows, duals, strict=True):
            constant[block] += dual * most
            held[block] -= dual * row.get(self.held[block], 0.0)
        constant = constant[::-1].cumsum()[::-1]
        prices = np.zeros((n + 1, 4))
        prices[:, 0], prices[:, 1] = constant * self.seconds, held * self.seconds / self.unit
        for column, rows in zip((2, 3), self._arriving, strict=True):
            prices[:n, column] = -duals[rows] * self.seconds / self.unit
        prices[n] = 0.0, 0.0, 1 / chain.out, 1 / chain.back  # what is left to be copied at the end is waited for
        return prices
