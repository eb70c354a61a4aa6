"""The fastest plan of a chain, by dynamic programming over labels.

A *label* is what matters of a beginning of a plan: seconds spent, bytes held, bytes still leaving (``Q``), bytes ahead
of use (``R``). From block to block each label branches into the three actions. Two rules keep them few:

- *Dominance.* Waiting turns backlog into seconds at the price of the link. So a label that holds no more than another,
  and that even after waiting its backlogs down to the other's has spent no more, makes the other superfluous.
- *Bounds.* The linear relaxation of the same model puts prices on bytes that are held, leaving, or ahead of use. They
  bound from below what any completion of a label costs. A label that cannot beat a plan that is known goes.

Such a plan comes from rounding the relaxation and changing one or two blocks for as long as it helps, or from a sweep
over the few most promising labels. The sweep after that is exact, unless it meets ``max_labels``; then it keeps the
most promising ones only, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memsave_lib.planner.chain import KEEP, OFFLOAD, Chain
from memsave_lib.planner.programs import relax

SECONDS, HELD, LEAVING, AHEAD = range(4)
#: Seconds apart by less are the same: sums of floats in another order differ.
TOLERANCE = 1e-12
#: Of many blocks only near ones are exchanged: about so many pairs are tried in a round.
MOST_EXCHANGES = 4_000
#: Prices are taken from relaxations for these multiples of the room that there is: labels hold more than the first of
#: them foresees, or less.
PRICED_FOR = (1.0, 0.97, 1.03, 0.9, 1.1)


@dataclass(frozen=True)
class Found:
    """A plan, its extra seconds, and whether no other is faster; ``plan`` is None where none was found."""

    plan: tuple[int, ...] | None
    extra_seconds: float
    proved: bool
    labels: int  # the most at one block


def fastest(chain: Chain, budget: float, max_labels: int = 150, beam: int = 60) -> Found:
    """The plan with the fewest extra seconds within ``budget`` bytes."""
    leanest, lacking = chain.leanest(budget)
    if lacking:
        return Found(None, np.inf, True, 0)
    relaxed = [relax(chain, budget, priced_for) for priced_for in PRICED_FOR]
    known = [one.prices for one in relaxed if one.prices is not None]
    prices = np.stack(known or [np.zeros((chain.n_blocks + 1, 4))], axis=1)
    shares = relaxed[0].shares
    rounded = leanest if shares is None else _rounded(chain, budget, shares, leanest)
    polished = _polished(chain, budget, rounded)
    known = min(polished, _sweep(chain, budget, prices, np.inf, beam), key=lambda found: found.extra_seconds)
    swept = _sweep(chain, budget, prices, known.extra_seconds, max_labels)
    best = min(known, swept, key=lambda found: found.extra_seconds)
    return replace(best, plan=_calmed(chain, budget, best), proved=swept.proved, labels=swept.labels)


def _rounded(chain: Chain, budget: float, shares: np.ndarray, leanest: tuple[int, ...]) -> tuple[int, ...]:
    """A plan near the relaxation: where a block was treated in part, its largest share, or what holds least."""
    largest, whole = shares.argmax(axis=1), shares.max(axis=1) > 1 - 1e-6
    plans = np.stack([largest, np.where(whole, largest, leanest), leanest])
    return tuple(map(int, plans[chain.extra_seconds(plans, budget).argmin()]))


def _polished(chain: Chain, budget: float, plan: tuple[int, ...]) -> Found:
    """The plan with single blocks changed and pairs exchanged, the best change first, until none helps."""
    plan, best = np.array(plan), np.inf
    while True:
        changed = np.concatenate([_single_changes(plan, chain.allowed), _exchanges(plan)])
        seconds = chain.extra_seconds(changed, budget)
        if not seconds.min() < best - TOLERANCE * chain.plain_seconds:
            return Found(tuple(map(int, plan)) if np.isfinite(best) else None, best, False, 0)
        plan, best = changed[seconds.argmin()], float(seconds.min())


def _calmed(chain: Chain, budget: float, found: Found) -> tuple[int, ...] | None:
    """The same plan without the copies that gain nothing: blocks that are kept in as many seconds."""
    plan = found.plan
    for i in reversed(range(chain.n_blocks if plan else 0)):
        kept = (*plan[:i], KEEP, *plan[i + 1 :])
        if plan[i] == OFFLOAD and KEEP in chain.allowed:
            slack = TOLERANCE * chain.plain_seconds
            plan = kept if chain.extra_seconds([kept], budget)[0] <= found.extra_seconds + slack else plan
    return plan


def _single_changes(plan: np.ndarray, allowed: tuple[int, ...]) -> np.ndarray:
    """The plan itself, and with each block treated in each way."""
    blocks = np.repeat(np.arange(len(plan)), len(allowed))
    changed = np.repeat(plan[None], len(blocks) + 1, axis=0)
    changed[np.arange(len(blocks)), blocks] = np.tile(allowed, len(plan))
    return changed


def _exchanges(plan: np.ndarray) -> np.ndarray:
    """The plan with the actions of two blocks exchanged, for each pair that differs and is not too far apart."""
    first, second = np.triu_indices(len(plan), k=1)
    differ = (plan[first] != plan[second]) & (second - first <= max(8, MOST_EXCHANGES // len(plan)))
    first, second = first[differ], second[differ]
    changed = np.repeat(plan[None], len(first), axis=0)
    changed[np.arange(len(first)), first], changed[np.arange(len(first)), second] = plan[second], plan[first]
    return changed


def _sweep(chain: Chain, budget: float, prices: np.ndarray, limit: float, max_labels: int) -> Found:
    """All labels that may end below ``limit`` seconds, block by block; the ``max_labels`` most promising of them."""
    labels, steps, proved, most = np.zeros((1, 4)), [], True, 1
    slack = TOLERANCE * chain.plain_seconds
    for i in range(chain.n_blocks):
        branches = [_branch(chain, budget, labels, i, action) for action in chain.allowed]
        labels = np.concatenate([grown for grown, _ in branches])
        parents = np.concatenate([parents for _, parents in branches])
        actions = np.repeat(chain.allowed, [len(parents) for _, parents in branches])
        bounds = _lower_bounds(labels, prices[i + 1])
        promising = np.flatnonzero(bounds < limit - slack)
        promising = promising[np.argsort(bounds[promising], kind="stable")]
        chosen = promising[_undominated(labels[promising], chain, slack)]
        if len(chosen) > max_labels:
            chosen, proved = chosen[:max_labels], False
        labels, most = labels[chosen], max(most, len(chosen))
        steps.append((parents[chosen], actions[chosen]))
    if not len(labels):
        return Found(None, np.inf, proved, most)
    total = labels[:, SECONDS] + labels[:, LEAVING] / chain.out + labels[:, AHEAD] / chain.back
    at = int(total.argmin())
    plan, end = [], at
    for parents, actions in reversed(steps):
        plan.append(int(actions[at]))
        at = parents[at]
    return Found(tuple(reversed(plan)), float(total[end]), proved, most)


def _branch(chain: Chain, budget: float, labels: np.ndarray, i: int, action: int) -> tuple[np.ndarray, np.ndarray]:
    """The labels behind block ``i`` when it is treated so, and the number of the label that each came from."""
    need = max(chain.need_forward[i, action], chain.need_backward[i, action])
    fits = labels[:, HELD] + need <= budget
    if i == chain.n_blocks - 1:
        fits &= labels[:, HELD] + chain.held[i, action] + chain.turn <= budget
    parents = np.flatnonzero(fits)
    seconds, held, leaving, ahead = labels[parents].T
    still = np.minimum(leaving, budget - held - chain.need_forward[i, action])
    early = np.minimum(ahead, budget - held - chain.need_backward[i, action])
    waiting = (leaving - still) / chain.out + (ahead - early) / chain.back
    grown = [
        seconds + chain.extra[i, action] + waiting,
        held + chain.held[i, action],
        np.maximum(0.0, still - chain.out * chain.forward[i]) + chain.sent[i, action],
        np.maximum(0.0, early - chain.back * chain.backward[i, action]) + chain.sent[i, action],
    ]
    return np.stack(grown, axis=1), parents


def _lower_bounds(labels: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """For each label: no completion costs fewer seconds in all."""
    state = np.concatenate([np.ones((len(labels), 1)), labels[:, HELD:]], axis=1)
    return labels[:, SECONDS] + np.maximum(0.0, (state @ prices.T).max(axis=1))


def _undominated(labels: np.ndarray, chain: Chain, slack: float) -> np.ndarray:
    """Numbers of the labels that no other makes superfluous, in order."""
    # Who dominates holds no more and has spent no more, all backlog waited for: in this order it comes first.
    spent = labels[:, SECONDS] + labels[:, LEAVING] / chain.out + labels[:, AHEAD] / chain.back
    order = np.lexsort((spent, labels[:, HELD]))
    seconds, _, leaving, ahead = labels[order].T
    waited = seconds[:, None] + np.maximum(0.0, leaving[:, None] - leaving) / chain.out
    waited += np.maximum(0.0, ahead[:, None] - ahead) / chain.back
    dominates = np.triu(waited <= seconds + slack, k=1)
    return np.sort(order[~dominates.any(axis=0)])
