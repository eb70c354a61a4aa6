"""Exercise checks: the solution passes, the stub is untried, and each plausible mistake gets its own diagnosis."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import memsave_lib as ms
from memsave_lib.course import checks
from memsave_lib.course.env import Setup
from tests.helpers import saved_bytes

DEFAULTS = Setup(512, 2, 6, 256, 2, 2, torch.device("cpu"))
ODD = Setup(96, 5, 7, 256, 3, 2, torch.device("cpu"))
SMALLEST = Setup(8, 1, 1, 64, 1, 1, torch.device("cpu"))
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST], ids=["defaults", "odd", "smallest"])


def stub(*arguments: object) -> int:
    raise NotImplementedError("your turn")


# stubs


class Unfinished:
    """Of its two methods the first is written."""

    def first(self, number: int) -> int:
        return number

    def second(self, number: int) -> int:
        return stub(number)


class Uncalled:
    def __call__(self, number: int) -> int:
        return stub(number)


def in_part(number: int) -> int:
    return number if number < 2 else stub(number)


@checks.answered
def check_numbers(function: Callable[[int], int], last: int) -> checks.Verdict:
    """What the function makes of all numbers up to ``last``."""
    given = [function(number) for number in range(last + 1)]
    return checks.right(f"{given}") if given == list(range(last + 1)) else checks.wrong(f"{given}")


@checks.answered
def check_object(make: Callable[[], Uncalled]) -> checks.Verdict:
    return checks.right(str(make()(1)))


@checks.answered
def check_methods(make: Callable[[], Unfinished], *names: str) -> checks.Verdict:
    made = make()
    return checks.right(str([getattr(made, name)(1) for name in names]))


def test_a_stub_is_untried_and_a_part_of_one_unfinished() -> None:
    assert check_numbers(stub, 3) is checks.NOT_TRIED
    assert check_numbers(in_part, 3) is checks.NOT_FINISHED
    assert str(checks.NOT_FINISHED) == "Not finished: a part of it still raises NotImplementedError."
    assert checks.NOT_FINISHED.passed is False
    assert check_numbers(in_part, last=1).passed is True
    assert check_numbers(lambda number: -number, 1).passed is False
    assert check_numbers.__doc__ == "What the function makes of all numbers up to ``last``."


def test_a_class_is_tried_when_a_call_of_its_objects_has_returned() -> None:
    assert check_object(Uncalled) is checks.NOT_TRIED
    assert check_methods(Unfinished, "second") is checks.NOT_TRIED
    assert check_methods(Unfinished, "first", "second") is checks.NOT_FINISHED
    assert str(check_methods(Unfinished, "first")) == "Right. [1]"


@pytest.mark.parametrize(
    ("text", "untouched"),
    [
        ("your turn", True),
        ("find the bugs, then delete this line", True),
        ("", False),
        ("It is your turn", False),
        ('Module [M] is missing the required "forward" function', False),
    ],
)
def test_only_the_stubs_own_errors_are_theirs(text: str, untouched: bool) -> None:
    assert checks.untouched_error(NotImplementedError(text)) is untouched


def test_pytorchs_own_error_is_the_learners_to_read() -> None:
    with pytest.raises(NotImplementedError, match="missing the required"):
        check_numbers(nn.Module(), 1)


def test_what_is_no_function_goes_on_as_it_is() -> None:
    with pytest.raises(TypeError, match="'int' object is not callable"):
        check_numbers(3, 1)


# 00


def model(here: Setup) -> nn.Module:
    return ms.gpt2("tiny", n_positions=here.seq_len, n_layer=here.n_layers)


@SETUPS
def test_parameter_bytes_accepts_the_solution_and_knows_the_stub(here: Setup) -> None:
    def solution(model: nn.Module) -> int:
        total = 0
        for parameter in model.parameters():
            total += parameter.numel() * parameter.element_size()
        return total

    found = checks.check_parameter_bytes(solution, model(here))
    assert found.passed is True
    assert f"({solution(model(here)):,} bytes)" in str(found)
    untried = checks.check_parameter_bytes(stub, model(here))
    assert untried.passed is None
    assert "not tried yet" in str(untried).lower()


WRONG_PARAMETER_BYTES = {
    "You counted elements, not bytes": lambda m: sum(p.numel() for p in m.parameters()),
    "You took 4 bytes for every element": lambda m: 4 * sum(p.numel() for p in m.parameters()),
    "state_dict() lists names": lambda m: sum(t.numel() * t.element_size() for t in m.state_dict().values()),
    "a shared weight once for each layer": (
        lambda m: sum(p.nbytes for part in m.modules() for p in part.parameters(recurse=False))
    ),
    "You took the type of the first parameter for all": (
        lambda m: sum(p.numel() for p in m.parameters()) * next(m.parameters()).element_size()
    ),
    "You took the type of the last parameter for all": (
        lambda m: sum(p.numel() for p in m.parameters()) * list(m.parameters())[-1].element_size()
    ),
    "You left out frozen parameters": lambda m: sum(p.nbytes for p in m.parameters() if p.requires_grad),
    "parameters alone": lambda m: sum(t.nbytes for t in [*m.parameters(), *m.buffers()]),
    "You left out the biases": lambda m: sum(p.nbytes for name, p in m.named_parameters() if p.dim() >= 2),
    "an int, and your function returned 48.0 (float): a float is exact only up to a point.": lambda m: 48.0,
    "is an int, and your function returned None (NoneType): end it with return": lambda m: None,
    "returned tensor(48) (Tensor): use int()": lambda m: torch.tensor(48),
    "your function returned an object of type tuple.": lambda m: (torch.zeros(9, 9), 3),
    "is an int, and your function returned True (bool).": lambda m: True,
    "For your model you get 7 bytes": lambda m: 7,
}


@SETUPS
@pytest.mark.parametrize(("reason", "answer"), WRONG_PARAMETER_BYTES.items(), ids=WRONG_PARAMETER_BYTES)
def test_parameter_bytes_names_the_mistake(here: Setup, reason: str, answer: Callable[[nn.Module], int]) -> None:
    found = checks.check_parameter_bytes(answer, model(here))
    assert found.passed is False
    assert reason in str(found)


@pytest.mark.parametrize("answer", [stub, lambda m: 7], ids=["stub", "answer"])
def test_the_check_draws_no_random_numbers(answer: Callable[[nn.Module], int]) -> None:
    tried, state = nn.Linear(3, 4), torch.get_rng_state()
    checks.check_parameter_bytes(answer, tried)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_whole_number_of_any_type_is_a_count_of_bytes() -> None:
    counted = checks.check_parameter_bytes(lambda m: np.int64(sum(p.nbytes for p in m.parameters())), nn.Linear(3, 4))
    assert counted.passed is True
    assert checks.no_count([np.int32(3), 4]) is None
    assert "returned tensor(3) (Tensor)" in checks.no_count([4, torch.tensor(3)])


# 01


def solution(batch: int, seq_len: int, hidden: int, heads: int, n_layers: int) -> int:
    states = 4 * 16 * seq_len * batch * hidden
    crumbs = 16 * seq_len * batch + 4 * heads * seq_len * batch
    return n_layers * (states + crumbs)


@pytest.mark.parametrize("case", checks._STACK_CASES, ids=str)
def test_saved_bytes_wants_what_autograd_holds(case: checks.StackCase) -> None:
    stack = ms.BlockStack(case.n_layers, case.hidden, case.heads)
    x = torch.randn(case.batch, case.seq_len, case.hidden, requires_grad=True)
    assert case.saved_bytes == saved_bytes(lambda: stack(x), stack) == solution(**vars(case))


@SETUPS
def test_saved_bytes_accepts_the_solution_and_knows_the_stub(here: Setup) -> None:
    found = checks.check_saved_bytes(solution, here)
    assert found.passed is True
    wanted = solution(here.batch_size, here.seq_len, here.hidden, here.heads, here.n_layers)
    assert f"{wanted:,} bytes" in str(found)
    untried = checks.check_saved_bytes(stub, here)
    assert untried.passed is None
    assert "not tried yet" in str(untried).lower()


WRONG_SAVED_BYTES = {
    "You counted elements, not bytes": lambda b, s, h, a, n: solution(b, s, h, a, n) // 4,
    "This is one block": lambda b, s, h, a, n: solution(b, s, h, a, 1),
    "This is one sequence": lambda b, s, h, a, n: solution(1, s, h, a, n),
    "2 bytes an element": lambda b, s, h, a, n: solution(b, s, h, a, n) // 2,
    "Those are the elements of sixteen hidden states a block": lambda b, s, h, a, n: 16 * b * s * h * n,
    "You are low by exactly 4asb: the log-sum-exp of each block.": lambda b, s, h, a, n: (
        n * (64 * s * b * h + 16 * s * b)
    ),
    "You are low by exactly 16sb: the statistics": lambda b, s, h, a, n: n * (64 * s * b * h + 4 * a * s * b),
    "low by exactly 4asb: the log-sum-exp of each block; and low by exactly 16sb": (
        lambda b, s, h, a, n: n * 64 * s * b * h
    ),
    "You are high by exactly 4sbh, once: the output of the last block": (
        lambda b, s, h, a, n: solution(b, s, h, a, n) + 4 * s * b * h
    ),
    "You are low by exactly 4sbh, once: the input of the first block, which is saved too": (
        lambda b, s, h, a, n: solution(b, s, h, a, n) - 4 * s * b * h
    ),
    "You are low by exactly 4(a-1)sb in each block: the log-sum-exp is one number a row for each head": (
        lambda b, s, h, a, n: n * (64 * s * b * h + 20 * s * b)
    ),
    "high by exactly 4sbh, once: the output of the last block, which nothing needs in backward; and high": (
        lambda b, s, h, a, n: solution(b, s, h, a, n) + 4 * s * b * h + 4 * a * s * s * b * n
    ),
    "You are low by exactly 8sb: two of the four statistics": lambda b, s, h, a, n: (
        n * (64 * s * b * h + 8 * s * b + 4 * a * s * b)
    ),
    "You are high by exactly 4as²b": lambda b, s, h, a, n: solution(b, s, h, a, n) + 4 * a * s * s * b * n,
    "You are low by exactly 12sbh": lambda b, s, h, a, n: solution(b, s, h, a, n) - 12 * s * b * h * n,
    "You are low by exactly 16sbh: four hidden states in each block, as many as one": lambda b, s, h, a, n: (
        solution(b, s, h, a, n) - 16 * s * b * h * n
    ),
    "is an int, and your function returned 1.5 (float)": lambda b, s, h, a, n: 1.5,
    "is an int, and your function returned None (NoneType)": lambda b, s, h, a, n: None,
    "For batch=3, seq_len=40, hidden=96, heads=4, n_layers=2 you get 1 bytes": lambda b, s, h, a, n: 1,
}


@SETUPS
@pytest.mark.parametrize(("reason", "answer"), WRONG_SAVED_BYTES.items(), ids=WRONG_SAVED_BYTES)
def test_saved_bytes_names_the_mistake(here: Setup, reason: str, answer: Callable[..., int]) -> None:
    found = checks.check_saved_bytes(answer, here)
    assert found.passed is False
    assert reason in str(found)


def test_a_gap_that_no_two_terms_explain_is_not_explained() -> None:
    assert checks.explain_gaps([3, 5], {"one": [1, 1], "two": [2, 4]}) == (
        "You are low by exactly one; and low by exactly two."
    )
    assert checks.explain_gaps([3, 6], {"one": [1, 1], "two": [2, 4]}) is None


def test_what_can_only_be_missing_is_not_too_much() -> None:
    low, high = {"its input": [2, 3]}, {"its output": [2, 3]}
    assert checks.explain_gaps([2, 3], {}, low, high) == "You are low by exactly its input."
    assert checks.explain_gaps([-2, -3], {}, low, high) == "You are high by exactly its output."
