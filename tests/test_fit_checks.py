"""Exercise checks of notebook 06: solution right, stub untried, each plausible mistake diagnosed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

import memsave_lib as ms
from memsave_lib.costs import BlockCosts, ModelCosts, Needs
from memsave_lib.course import attack_cases, fit_checks, guide
from memsave_lib.course.env import Setup
from memsave_lib.course.fit_checks import FloorCase
from memsave_lib.devices import Device
from memsave_lib.planner.chain import Chain

DEFAULTS = Setup(512, 2, 6, 256, 2, 2, torch.device("cpu"))
ODD = Setup(96, 5, 7, 256, 3, 2, torch.device("cpu"), seed=3)
SMALLEST = Setup(8, 1, 1, 64, 1, 1, torch.device("cpu"))
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST], ids=["defaults", "odd", "smallest"])


def unfinished(*arguments: object) -> Any:
    raise NotImplementedError("your turn")


# The floor


def smallest(held: list[tuple[int, int, int]], need: list[int], turn: int) -> int:
    most = there = 0
    for one, at_work in zip(held, need, strict=True):
        most = max(most, there + at_work)
        there += min(one)
    return max(most, there + turn)


def with_held(column: int) -> Callable[..., int]:
    return lambda held, need, turn: smallest([(one[column],) * 3 for one in held], need, turn)


WRONG_FLOORS: dict[str, Callable[..., Any]] = {
    "You forgot the turn": lambda held, need, turn: smallest(held, need, 0),
    "You forgot the block at work": lambda held, need, turn: sum(map(min, held)) + turn,
    "You took every block recomputed": with_held(1),
    "You took every block offloaded": with_held(2),
    "You took every block kept": with_held(0),
    "You chose one action for all blocks": lambda *given: min(with_held(column)(*given) for column in range(3)),
    "You let all blocks hold while one is at work": lambda held, need, turn: sum(map(min, held)) + max(*need, turn),
    "You count a block twice": lambda held, need, turn: smallest(
        held, [at_work + min(one) for one, at_work in zip(held, need, strict=True)], turn
    ),
    "You added up the needs of all blocks": lambda held, need, turn: sum(need) + turn,
    "You left out what is held": lambda held, need, turn: max(*need, turn),
    "is an int, and your function returned 0.5 (float)": lambda held, need, turn: 0.5,
    "the smallest budget is": lambda held, need, turn: smallest(held, need, turn) + 1,
}


@SETUPS
def test_floor_accepts_the_solution_and_knows_the_stub(here: Setup) -> None:
    found = fit_checks.check_floor(smallest, here)
    assert found.passed is True, str(found)
    assert fit_checks.check_floor(unfinished, here).passed is None


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint64], ids=lambda kind: kind.__name__)
def test_floor_accepts_whole_numbers_of_numpy(kind: Callable[[int], Any]) -> None:
    found = fit_checks.check_floor(lambda *case: kind(smallest(*case)), DEFAULTS)
    assert found.passed is True, str(found)
    found = fit_checks.check_floor(lambda held, need, turn: kind(smallest(held, need, 0)), DEFAULTS)
    assert found.passed is False and "You forgot the turn" in str(found)


@SETUPS
@pytest.mark.parametrize(("reason", "answer"), WRONG_FLOORS.items(), ids=WRONG_FLOORS)
def test_floor_names_the_mistake(here: Setup, reason: str, answer: Callable[..., Any]) -> None:
    found = fit_checks.check_floor(answer, here)
    assert found.passed is False
    assert reason in str(found)


@pytest.mark.parametrize("case", [*fit_checks._FLOOR_CASES, fit_checks._your_floor(DEFAULTS)], ids=range(5))
def test_the_floor_is_the_planners(case: FloorCase) -> None:
    """A block that holds ``held[2]`` bytes when offloaded has sent the rest away."""
    blocks = [
        BlockCosts(1.0, 2.0, None, (kept - stays,), min(kept, inputs), kept, inputs, needs=Needs(*[need] * 4))
        for (kept, inputs, stays), need in zip(case.held, case.need, strict=True)
    ]
    device = Device("any", flops=1.0, copy_out=1.0, copy_in=1.0)
    assert Chain.of(ModelCosts(tuple(blocks), turn=case.turn), device, "host").floor()[0] == case.floor()


# What to attack first


YOURS = {
    "blocks": attack_cases.AttackCase("yours", 2, 64, 256, 2, 512),
    "weights": attack_cases.AttackCase("yours", 2, 64, 256, 2, 32),
    "loss": attack_cases.AttackCase("yours", 1, 64, 8192, 2, 64),
    # What its peak is made of says something else than its bottleneck.
    "blocks, beside a large loss": attack_cases.AttackCase("yours", 1, 64, 4096, 2, 256),
}


@pytest.fixture(params=YOURS)
def yours(request: pytest.FixtureRequest) -> tuple[ms.Estimate, ms.Estimate]:
    """Estimates as a learner may have them: each with another answer."""
    return YOURS[request.param].estimates()


@pytest.mark.parametrize("name", YOURS)
def test_learners_may_have_any_answer(name: str) -> None:
    pair, answer = YOURS[name].estimates(), name.split(",")[0]
    assert guide.bottleneck(*pair) == answer
    assert f"For yours, attack the {answer} first." in str(fit_checks.check_attack_first(first, *pair))


@pytest.fixture(scope="module", autouse=True)
def _estimated_once() -> Iterator[None]:
    """A check estimates its models each time; here every answer meets the same ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attack_cases.AttackCase, "estimates", cache(attack_cases.AttackCase.estimates))
        yield


def state(estimate: ms.Estimate, names: tuple[str, ...] = ("parameter", "gradient", "optimizer")) -> float:
    return sum(estimate.at_peak[name] for name in names) / estimate.peak_bytes


def first(kept: ms.Estimate, checkpointed: ms.Estimate) -> str:
    if checkpointed.peak_bytes <= 0.9 * kept.peak_bytes:
        return "blocks"
    return "weights" if state(checkpointed) >= 0.5 else "loss"


def by_category(kept: ms.Estimate, checkpointed: ms.Estimate) -> str:
    largest = max(kept.at_peak, key=kept.at_peak.get)
    return {"activation": "blocks", "optimizer": "weights"}.get(largest, "loss")


WRONG_FIRST: dict[str, Callable[..., Any]] = {
    "they always fall": lambda kept, done: "blocks" if done.saved_bytes < kept.saved_bytes else "loss",
    "You call any fall of the peak worthwhile": lambda kept, done: (
        "blocks" if done.peak_bytes < kept.peak_bytes else "weights"
    ),
    "You go by the moment of the peak": lambda kept, done: (
        "loss" if "log_softmax" in str(kept.peak_at) else first(kept, done)
    ),
    "You go by what the peak is made of": by_category,
    "even where most of it is weights and their state": lambda kept, done: (
        "weights" if state(kept) >= 0.5 else first(kept, done)
    ),
    "You count only a part": lambda kept, done: (
        "blocks" if first(kept, done) == "blocks" else "weights" if state(done, ("parameter",)) > 0.5 else "loss"
    ),
    "You swapped the two": lambda kept, done: first(done, kept),
    "your function returned None": lambda kept, done: None,
    "you say 'loss', but checkpointing takes 65% off the peak": lambda kept, done: "loss",
}


def test_first_accepts_the_solution_and_knows_the_stub(yours: tuple[ms.Estimate, ms.Estimate]) -> None:
    found = fit_checks.check_attack_first(first, *yours)
    assert found.passed is True, str(found)
    assert fit_checks.check_attack_first(unfinished, *yours).passed is None


@pytest.mark.parametrize(("reason", "answer"), WRONG_FIRST.items(), ids=WRONG_FIRST)
def test_first_names_the_mistake(
    yours: tuple[ms.Estimate, ms.Estimate], reason: str, answer: Callable[..., Any]
) -> None:
    found = fit_checks.check_attack_first(answer, *yours)
    assert found.passed is False
    assert reason in str(found)


def test_the_models_to_attack_are_what_they_claim_to_be() -> None:
    answers = [guide.bottleneck(*case.estimates()) for case in attack_cases.REAL_CASES]
    assert answers == ["blocks", "blocks", "loss", "weights", "weights"]


def test_steps_made_by_hand_are_what_they_say() -> None:
    cases = attack_cases.MADE_CASES
    pairs = [case.estimates() for case in cases]
    assert [guide.bottleneck(*pair) for pair in pairs] == ["loss", *["weights"] * 7, "blocks"]
    for case, (kept, done) in zip(cases, pairs, strict=True):
        assert (kept.peak_bytes, done.peak_bytes) == (case.kept_peak * 10**6, case.peak * 10**6)
        assert tuple(done.at_peak[name] for name in guide.STATE) == tuple(size * 10**6 for size in case.state)
        assert min(kept.at_peak.values()) >= 0 and sum(kept.at_peak.values()) == kept.peak_bytes
        assert done.saved_bytes < kept.saved_bytes
        assert ("softmax" in str(done.peak_at)) is ("softmax" in str(kept.peak_at)) is case.at_the_loss
    shares = [[round(state(one), 2) for one in pair] for pair in pairs[:4]]
    assert shares == [[0.53, 0.45], [0.41, 0.55], [0.48, 0.52], [0.5, 0.51]]


def part_of(*names: str) -> Callable[..., str]:
    return lambda kept, done: first(kept, done) if first(kept, done) == "blocks" else rest(state(done, names))


def rest(share: float, limit: float = 0.5) -> str:
    return "weights" if share >= limit else "loss"


def with_share(limit: float) -> Callable[..., str]:
    return lambda kept, done: "blocks" if first(kept, done) == "blocks" else rest(state(done), limit)


def with_fall(limit: float) -> Callable[..., str]:
    return lambda kept, done: "blocks" if done.peak_bytes <= limit * kept.peak_bytes else rest(state(done))


NEARLY_RIGHT: dict[str, tuple[str, Callable[..., str]]] = {
    **{f"share {limit}": ("You say weights at less than half", with_share(limit)) for limit in (0.0, 0.3, 0.4, 0.45)},
    **{
        f"share {limit}": ("You say weights only at more than", with_share(limit)) for limit in (0.53, 0.6, 0.7, 0.9, 2)
    },
    **{f"fall {limit}": ("You ask for more than a tenth", with_fall(limit)) for limit in (0.5, 0.7, 0.8, 0.85)},
    "fall 0.93": ("You ask for less than a tenth", with_fall(0.93)),
    "fall 0.95": ("You ask for less than a tenth", with_fall(0.95)),
    "fall 0.98": ("You ask for less than a tenth", with_fall(0.98)),
    "never blocks": ('You never say "blocks"', with_fall(0)),
    "state of keep-all": (
        "You take the state from keep-all's peak",
        lambda kept, done: "blocks" if first(kept, done) == "blocks" else rest(state(kept)),
    ),
    "by keep-all's peak": (
        "You compare the state with keep-all's peak",
        lambda kept, done: (
            "blocks" if first(kept, done) == "blocks" else rest(state(done) * done.peak_bytes / kept.peak_bytes)
        ),
    ),
    "moment": (
        "that the loss is at work does not say what is alive",
        lambda kept, done: (
            "blocks" if first(kept, done) == "blocks" else "loss" if "softmax" in str(done.peak_at) else "weights"
        ),
    ),
    "largest": (
        "parameters, gradients and optimizer state count together",
        lambda kept, done: (
            "blocks"
            if first(kept, done) == "blocks"
            else "weights"
            if max(done.at_peak, key=done.at_peak.get) in guide.STATE
            else "loss"
        ),
    ),
    **{
        f"only {' and '.join(names)}": ("You count only a part of", part_of(*names))
        for count in (1, 2)
        for names in combinations(guide.STATE, count)
    },
}


@pytest.mark.parametrize(("reason", "answer"), NEARLY_RIGHT.values(), ids=NEARLY_RIGHT)
def test_first_refuses_what_real_models_leave_open(
    yours: tuple[ms.Estimate, ms.Estimate], reason: str, answer: Callable[..., Any]
) -> None:
    found = fit_checks.check_attack_first(answer, *yours)
    assert found.passed is False
    assert reason in str(found)


@pytest.mark.parametrize("bad", [np.array(["blocks", "loss"]), ["blocks"], 3], ids=["array", "list", "number"])
def test_first_wants_a_word(bad: Any) -> None:
    found = fit_checks.check_attack_first(lambda kept, done: bad, *YOURS["loss"].estimates())
    assert found.passed is False and "Return one of 'blocks', 'weights', 'loss'" in str(found)


def test_answers_in_part_are_not_finished_and_other_errors_go_through() -> None:
    def partly(kept: ms.Estimate, done: ms.Estimate) -> str:
        return "blocks" if first(kept, done) == "blocks" else unfinished()

    found = fit_checks.check_attack_first(partly, *YOURS["blocks"].estimates())
    assert found.passed is False and "Not finished" in str(found)
    found = fit_checks.check_floor(lambda *case: smallest(*case) if case[2] == 40 else unfinished(), DEFAULTS)
    assert found.passed is False and "Not finished" in str(found)

    def of_others(*case: Any) -> Any:
        raise NotImplementedError("no such kernel")

    with pytest.raises(NotImplementedError, match="no such kernel"):
        fit_checks.check_attack_first(of_others, *YOURS["blocks"].estimates())
    with pytest.raises(NotImplementedError, match="no such kernel"):
        fit_checks.check_floor(of_others, DEFAULTS)
