"""The meanings of notebook 03: solution right, stub untried, each plausible mistake diagnosed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memsave_lib as ms
from memsave_lib.course import selection_checks
from memsave_lib.course.checks import NOT_FINISHED
from memsave_lib.course.env import Setup
from tests.asking import double_precision

DEFAULTS = Setup(512, 2, 6, 256, 2, 2, torch.device("cpu"))
ODD = Setup(96, 5, 7, 256, 3, 2, torch.device("cpu"), seed=3)
SMALLEST = Setup(8, 1, 1, 64, 1, 1, torch.device("cpu"))
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST], ids=["defaults", "odd", "smallest"])


def recomputed(chosen: Callable[[int, int], bool]) -> Callable[[Sequence[nn.Module], Tensor, int], Tensor]:
    def run(blocks: Sequence[nn.Module], x: Tensor, n: int) -> Tensor:
        for i, block in enumerate(blocks):
            x = checkpoint(block, x, use_reentrant=False) if chosen(i, n) else block(x)
        return x

    return run


MEANINGS = {
    "course": recomputed(lambda i, n: i % n > 0),
    "hugging face": recomputed(lambda i, n: i % n == 0),
    "torchtitan": recomputed(lambda i, n: i % n == n - 1),
    "attention core": lambda blocks, x, n: ms.run(blocks, x, ms.SelectiveOps("attention")),
}


def test_hugging_face_means_what_the_exercise_says() -> None:
    model = ms.gpt2("tiny", n_layer=7)
    try:
        ms.models.hugging_face_checkpointing(model, every_n_layers=3)
    except TypeError:
        pytest.skip("this version of transformers has no every_n_layers")
    again = [i for i, block in enumerate(model.transformer.h) if block.gradient_checkpointing]
    assert again == [i for i in range(7) if selection_checks.WHOLE_BLOCKS["hugging face"](i, 3)]


def answer_with(**changed: Callable[[Sequence[nn.Module], Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """The solution with some meanings exchanged; underscores in names stand for spaces."""
    meanings = MEANINGS | {name.replace("_", " "): run for name, run in changed.items()}
    return lambda meaning, blocks, x, n: meanings[meaning](blocks, x, n)


def unfinished(meaning: str, blocks: Sequence[nn.Module], x: Tensor, n: int) -> Tensor:
    raise NotImplementedError("your turn")


def closing_over(blocks: Sequence[nn.Module], x: Tensor, n: int) -> Tensor:
    for i, block in enumerate(blocks):
        x = checkpoint(lambda v: block(v), x, use_reentrant=False) if i % n else block(x)  # noqa: B023 (the mistake)
    return x


def skips_what_it_recomputes(blocks: Sequence[nn.Module], x: Tensor, n: int) -> Tensor:
    for block in blocks[::n]:
        x = block(x)
    return x


def cuts_the_first_block_off(blocks: Sequence[nn.Module], x: Tensor, n: int) -> Tensor:
    x = blocks[0](x).detach()
    for i, block in enumerate(blocks[1:], start=1):
        x = checkpoint(block, x, use_reentrant=False) if i % n else block(x)
    return x


def cuts_all_off(blocks: Sequence[nn.Module], x: Tensor, n: int) -> Tensor:
    with torch.no_grad():
        return MEANINGS["course"](blocks, x, n)


whole_blocks = recomputed(lambda i, n: True)
kept = recomputed(lambda i, n: False)
WRONG_MEANINGS = {
    "That is what 'course' means.": answer_with(hugging_face=MEANINGS["course"]),
    "That is what 'hugging face' means.": answer_with(course=MEANINGS["hugging face"]),
    "recompute blocks 0, 3, 6; it recomputes blocks 2, 5. That is": answer_with(torchtitan=MEANINGS["hugging face"]),
    "you recompute blocks 1, 2, 4, 5; it recomputes": answer_with(torchtitan=MEANINGS["course"]),
    "recompute blocks 1, 4; it recomputes blocks 2, 5.": answer_with(torchtitan=recomputed(lambda i, n: i % n == 1)),
    "it recomputes blocks 1, 2, 4, 5. Nothing is recomputed.": answer_with(course=kept),
    "Does a lambda look up the loop variable too late?": answer_with(course=closing_over),
    "the output differs from a plain run": answer_with(course=skips_what_it_recomputes),
    "cut off from autograd": answer_with(course=cuts_the_first_block_off),
    "is all of the run cut off from autograd?": answer_with(hugging_face=cuts_all_off),
    "again as a whole; only the attention core": answer_with(attention_core=whole_blocks),
    "bytes are saved instead of": answer_with(attention_core=kept),
    "That recomputes the core, and GELU and LayerNorm too: see": answer_with(
        attention_core=lambda blocks, x, n: ms.run(blocks, x, ms.SelectiveOps())
    ),
    "That keeps the core, and recomputes LayerNorm: see": answer_with(
        attention_core=lambda blocks, x, n: ms.run(blocks, x, ms.SelectiveOps("norm"))
    ),
    "your function returned an object of type tuple, not": answer_with(course=lambda blocks, x, n: (x, x)),
    "your function returned None": answer_with(torchtitan=lambda blocks, x, n: None),
}


@SETUPS
def test_meanings_accepts_the_solution_and_knows_the_stub(here: Setup) -> None:
    state = torch.get_rng_state()
    found = selection_checks.check_meanings(answer_with(), here)
    assert found.passed is True, str(found)
    untried = selection_checks.check_meanings(unfinished, here)
    assert untried.passed is None
    assert torch.equal(torch.get_rng_state(), state)


def test_meanings_says_what_each_recomputes() -> None:
    text = str(selection_checks.check_meanings(answer_with(), ODD))
    assert "'course' blocks 1, 2, 3, 4, 6; 'hugging face' blocks 0, 5; 'torchtitan' block 4; 'attention core'" in text


@pytest.mark.parametrize("meaning", MEANINGS)
def test_one_meaning_unwritten_is_unfinished(meaning: str) -> None:
    rest = answer_with(**{meaning: lambda blocks, x, n: unfinished(meaning, blocks, x, n)})
    found = selection_checks.check_meanings(rest, ODD)
    assert found.passed is False
    assert str(found) == f"{NOT_FINISHED} It is {meaning!r}; what you have is right so far."


def test_a_fault_comes_before_what_is_unwritten() -> None:
    rest = answer_with(course=lambda blocks, x, n: unfinished("", blocks, x, n), torchtitan=MEANINGS["course"])
    assert "That is what 'course' means." in str(selection_checks.check_meanings(rest, ODD))


def test_pytorchs_own_error_goes_through() -> None:
    with pytest.raises(NotImplementedError, match="missing the required"):
        selection_checks.check_meanings(lambda meaning, blocks, x, n: nn.Module()(x), ODD)


def test_the_default_type_does_not_matter() -> None:
    with double_precision():
        assert selection_checks.check_meanings(answer_with(), SMALLEST).passed is True


@SETUPS
@pytest.mark.parametrize(("reason", "answer"), WRONG_MEANINGS.items(), ids=WRONG_MEANINGS)
def test_meanings_names_the_mistake(here: Setup, reason: str, answer: Callable[..., Tensor]) -> None:
    found = selection_checks.check_meanings(answer, here)
    assert found.passed is False
    assert reason in str(found)
