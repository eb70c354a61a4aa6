"""Exercise checks of notebook 06: solution right, stub untried, each plausible mistake diagnosed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

import memsave_lib as ms
from memsave_lib.costs import BlockCosts, ModelCosts, Needs
from memsave_lib.course import fit_checks, guide
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
    "blocks": fit_checks.AttackCase("yours", 2, 64, 256, 2, 512),
    "weights": fit_checks.AttackCase("yours", 2, 64, 256, 2, 32),
    "loss": fit_checks.AttackCase("yours", 1, 64, 8192, 2, 64),
    # What its peak is made of says something else than its bottleneck.
    "blocks, beside a large loss": fit_checks.AttackCase("yours", 1, 64, 4096, 2, 256),
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
        patch.setattr(fit_checks.AttackCase, "estimates", cache(fit_checks.AttackCase.estimates))
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
    "You count parameters alone": lambda kept, done: (
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
    answers = [guide.bottleneck(*case.estimates()) for case in fit_checks._ATTACK_CASES]
    assert answers == ["blocks", "blocks", "loss", "weights", "weights"]
