"""The predictions and the exercise of notebook 07: right, untried, and each plausible mistake with its diagnosis."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import memsave_lib as ms
from asking import assert_diagnoses
from memsave_lib import formulas
from memsave_lib.course import ranks
from memsave_lib.course.checks import NOT_FINISHED
from memsave_lib.course.env import Setup
from memsave_lib.course.questions import ranks as questions
from memsave_lib.course.rank_checks import check_rank_bytes

DEFAULTS = Setup(128, 2, 6, 128, 2, 2, torch.device("cpu"))
ODD = Setup(96, 5, 7, 128, 3, 2, torch.device("cpu"))
SMALLEST = Setup(8, 1, 1, 64, 1, 1, torch.device("cpu"))
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST], ids=["defaults", "odd", "smallest"])


def job_of(here: Setup) -> ranks.Training:
    return ranks.Training((), here.n_layers, here.hidden, here.heads, here.batch_size, here.seq_len)


@SETUPS
def test_saved_bytes_do_not_shrink(here: Setup) -> None:
    ddp, fsdp2 = (
        ranks.expected(ranks.Run(wrapper, ms.KeepAll()), job_of(here)).saved_bytes for wrapper in ("DDP", "FSDP2")
    )
    assert_diagnoses(questions.times_fewer_saved(), ddp / fsdp2, right=1)


@SETUPS
def test_all_gathers(here: Setup) -> None:
    found = ranks.expected(ranks.Run("FSDP2", ms.FullCheckpoint()), job_of(here)).all_gathers
    assert_diagnoses(questions.all_gathers(here), found, right=2 * here.n_layers)


def solution(weights: int, n_blocks: int, n_ranks: int, chunk: int, activations: int) -> int:
    return 4 * weights // n_ranks + chunk * (weights // n_blocks) + activations


def unfinished(weights: int, n_blocks: int, n_ranks: int, chunk: int, activations: int) -> int:
    raise NotImplementedError("your turn")


WRONG: dict[str, Callable[[int, int, int, int, int], object]] = {
    "You share the activations out": lambda w, blocks, ranks, m, a: (4 * w + a) // ranks + m * w // blocks,
    "You forgot the whole weights": lambda w, blocks, ranks, m, a: 4 * w // ranks + a,
    "the whole weights of one block": lambda w, blocks, ranks, m, a: 4 * w // ranks + w // blocks + a,
    "the whole weights of the whole model": lambda w, blocks, ranks, m, a: 4 * w // ranks + w + a,
    "You share nothing out": lambda w, blocks, ranks, m, a: 4 * w + a,
    "You share out parameters alone": lambda w, blocks, ranks, m, a: w // ranks + 3 * w + m * w // blocks + a,
    "You share out parameters and gradients": lambda w, blocks, ranks, m, a: (
        2 * w // ranks + 2 * w + m * w // blocks + a
    ),
    "You gather what the other ranks have": lambda w, blocks, ranks, m, a: (
        4 * w // ranks + m * w // blocks - m * w // blocks // ranks + a
    ),
    "You count one average of Adam's": lambda w, blocks, ranks, m, a: 3 * w // ranks + m * w // blocks + a,
    "You forgot Adam's averages": lambda w, blocks, ranks, m, a: 2 * w // ranks + m * w // blocks + a,
    "You count the parameters alone": lambda w, blocks, ranks, m, a: w // ranks + m * w // blocks + a,
    "You share the chunk's whole weights out": lambda w, blocks, ranks, m, a: (
        4 * w // ranks + m * w // blocks // ranks + a
    ),
    "The activations are missing": lambda w, blocks, ranks, m, a: 4 * w // ranks + m * w // blocks,
    "high by exactly a share of the weights": lambda w, blocks, ranks, m, a: 5 * w // ranks + m * w // blocks + a,
    "Divide with // if you divide": lambda w, blocks, ranks, m, a: 4 * w / ranks + m * w / blocks + a,
    "returned None (NoneType): end it with return": lambda w, blocks, ranks, m, a: None,
    "For weights=24,000, n_blocks=6, n_ranks=2, chunk=3, activations=1,000,000 you get 7 bytes, and a rank holds "
    "1,060,000": lambda w, blocks, ranks, m, a: 7,
}


@SETUPS
def test_rank_bytes_stub_and_solution(here: Setup) -> None:
    def untouched(*arguments: int) -> int:
        raise NotImplementedError("your turn")

    assert check_rank_bytes(untouched, here).passed is None
    verdict = check_rank_bytes(solution, here)
    assert verdict.passed is True and str(verdict).startswith("Right. At your parameters, with two ranks")


@SETUPS
@pytest.mark.parametrize("reason", WRONG)
def test_rank_bytes_wrong_answers_are_told_apart(here: Setup, reason: str) -> None:
    verdict = check_rank_bytes(WRONG[reason], here)
    assert verdict.passed is False
    assert reason in str(verdict)


def test_a_right_answer_of_another_kind_of_integer_passes() -> None:
    assert check_rank_bytes(lambda *arguments: np.int64(solution(*arguments)), DEFAULTS).passed is True


def test_a_part_of_an_answer_is_not_finished() -> None:
    def small_chunks_only(w, blocks, ranks, m, a) -> int:
        return unfinished(w, blocks, ranks, m, a) if m == 1 else solution(w, blocks, ranks, m, a)

    assert check_rank_bytes(small_chunks_only, DEFAULTS) == NOT_FINISHED


@SETUPS
def test_the_numbers_of_the_check_are_those_of_a_rank(here: Setup) -> None:
    """Shares as in a forecast, and activations as the closed forms of notebook 02 have them."""
    run, weights = ranks.Run("FSDP2", ms.FullCheckpoint()), 4 * here.n_layers * formulas.block_parameters(here.hidden)
    expected = ranks.expected(run, job_of(here))
    shares = expected.parameter_bytes + expected.gradient_bytes + expected.average_bytes
    shape = formulas.BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
    alive = (here.n_layers - 1) * shape.checkpoint_bytes + formulas.block_saved_bytes(shape)
    whole = expected.whole_blocks * weights // here.n_layers
    held = solution(weights, here.n_layers, 2, 1, alive)
    assert held == shares + whole + alive
    assert f"{held:,} bytes" in str(check_rank_bytes(solution, here))
