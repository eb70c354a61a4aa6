"""The closed form of notebook 02: it is what the meter finds, and each plausible mistake has its diagnosis."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import memsave_lib as ms
from memsave_lib import formulas
from memsave_lib.course.checks import NOT_FINISHED, Verdict
from memsave_lib.course.env import Setup
from memsave_lib.course.peak_checks import check_checkpointed_peak
from memsave_lib.formulas import BlockShape

DEFAULTS = Setup(512, 2, 6, 256, 2, 2, torch.device("cpu"))
ODD = Setup(96, 5, 7, 256, 3, 2, torch.device("cpu"), seed=3)
SMALLEST = Setup(8, 1, 1, 64, 1, 1, torch.device("cpu"))
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST], ids=["defaults", "odd", "smallest"])


def solution(n_layers: int, shape: BlockShape) -> int:
    return (n_layers - 1) * shape.checkpoint_bytes + formulas.block_saved_bytes(shape)


def unfinished(n_layers: int, shape: BlockShape) -> int:
    raise NotImplementedError("your turn")


def parameters(n_layers: int, shape: BlockShape) -> int:
    return 4 * n_layers * formulas.block_parameters(shape.hidden)


WRONG: dict[str, Callable[[int, BlockShape], object]] = {
    "You forgot the live block": lambda n, shape: n * shape.checkpoint_bytes,
    "You counted the live block's input twice": (
        lambda n, shape: n * shape.checkpoint_bytes + formulas.block_saved_bytes(shape)
    ),
    "input away twice": lambda n, shape: (n - 2) * shape.checkpoint_bytes + formulas.block_saved_bytes(shape),
    "You kept every block": lambda n, shape: n * formulas.block_saved_bytes(shape),
    "This is the live block alone": lambda n, shape: formulas.block_saved_bytes(shape),
    "You have two blocks alive at once": (
        lambda n, shape: (n - 2) * shape.checkpoint_bytes + 2 * formulas.block_saved_bytes(shape)
    ),
    "You counted elements, not bytes": lambda n, shape: solution(n, shape) // 4,
    "This is the peak of all that a step makes": (
        lambda n, shape: formulas.stack_peak_bytes(ms.FullCheckpoint().plan(n), shape)
    ),
    "You are high by exactly all parameters, which": lambda n, shape: solution(n, shape) + parameters(n, shape),
    "You are high by exactly all parameters and their gradients": (
        lambda n, shape: solution(n, shape) + 2 * parameters(n, shape)
    ),
    "high by exactly all parameters, which are no activations; and high by exactly one hidden state": (
        lambda n, shape: solution(n, shape) + parameters(n, shape) + shape.checkpoint_bytes
    ),
    "You are low by exactly the LayerNorm statistics and the log-sum-exp": (
        lambda n, shape: (n + 15) * shape.checkpoint_bytes
    ),
    "is an int, and your function returned None (NoneType)": lambda n, shape: None,
    "(float): a float is exact only up to a point": lambda n, shape: float(solution(n, shape)),
    "is an int, and your function returned True (bool)": lambda n, shape: True,
    "returned tensor(3) (Tensor): use int()": lambda n, shape: torch.tensor(3),
    "For n_layers=5, batch=3, seq_len=40, hidden=96, heads=4 you get 7 bytes, and 925,440 are alive: you are low": (
        lambda n, shape: 7
    ),
}


@SETUPS
def test_accepts_the_solution_and_knows_the_stub(here: Setup) -> None:
    found = check_checkpointed_peak(solution, here)
    assert found.passed is True, str(found)
    shape = BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
    assert f"({solution(here.n_layers, shape):,} bytes) of saved activations are alive." in str(found)
    untried: Verdict = check_checkpointed_peak(unfinished, here)
    assert untried.passed is None
    assert "Not tried yet" in str(untried)


def test_an_answer_for_many_layers_alone_is_unfinished() -> None:
    def in_part(n_layers: int, shape: BlockShape) -> int:
        return solution(n_layers, shape) if n_layers > 2 else unfinished(n_layers, shape)

    assert check_checkpointed_peak(in_part, DEFAULTS) is NOT_FINISHED


def test_pytorchs_own_error_goes_through() -> None:
    with pytest.raises(NotImplementedError, match="missing the required"):
        check_checkpointed_peak(lambda n_layers, shape: torch.nn.Module()(n_layers), DEFAULTS)


@SETUPS
def test_accepts_a_sum_over_blocks_and_numpy_integers(here: Setup) -> None:
    def summed(n_layers: int, shape: BlockShape) -> np.int64:
        waiting = np.full(n_layers, shape.checkpoint_bytes)
        return waiting[1:].sum() + formulas.block_saved_bytes(shape)

    assert check_checkpointed_peak(summed, here).passed is True


@SETUPS
@pytest.mark.parametrize(("reason", "answer"), WRONG.items(), ids=WRONG)
def test_names_the_mistake(here: Setup, reason: str, answer: Callable[[int, BlockShape], int]) -> None:
    found = check_checkpointed_peak(answer, here)
    assert found.passed is False
    assert reason in str(found)


@pytest.mark.parametrize(
    ("n_layers", "shape"),
    [(3, BlockShape(2, 32, 64, 1)), (1, BlockShape(1, 8, 64, 1)), (4, BlockShape(3, 24, 128, 2))],
    ids=["three", "one", "four"],
)
def test_is_what_the_meter_finds(n_layers: int, shape: BlockShape) -> None:
    stack = ms.BlockStack(n_layers, shape.hidden, shape.heads)
    x = torch.randn(shape.batch, shape.seq_len, shape.hidden)
    with ms.apply(stack, ms.FullCheckpoint()), ms.MemoryMeter(stack) as meter:
        stack(x).sum().backward()
    assert meter.trace.frame()[["activation", "recomputed"]].sum(axis=1).max() == solution(n_layers, shape)
