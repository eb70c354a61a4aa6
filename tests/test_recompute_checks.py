"""Exercise checks of notebooks 02 and 03: solution right, stub untried, each plausible mistake diagnosed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memsave_lib as ms
from memsave_lib.course import recompute_checks
from memsave_lib.course.env import Setup

DEFAULTS = Setup(512, 2, 6, 256, 2, 2, torch.device("cpu"))
ODD = Setup(96, 5, 7, 256, 3, 2, torch.device("cpu"), seed=3)
SMALLEST = Setup(8, 1, 1, 64, 1, 1, torch.device("cpu"))
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST], ids=["defaults", "odd", "smallest"])


# 02


class Dice:
    """What all answers to the exercise of notebook 02 share."""

    shared: Tensor | None = None

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.start: Tensor | None = None


class Stub(Dice):
    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError("your turn")


class Solution(Dice):
    def __call__(self, x: Tensor) -> Tensor:
        if self.start is None:
            self.start = torch.get_rng_state().clone()
            return self.block(x)
        now = torch.get_rng_state()
        torch.set_rng_state(self.start)
        output = self.block(x)
        torch.set_rng_state(now)
        return output


class NoCare(Dice):
    def __call__(self, x: Tensor) -> Tensor:
        return self.block(x)


class StateOfEveryCall(Dice):
    def __call__(self, x: Tensor) -> Tensor:
        self.start = torch.get_rng_state()
        torch.set_rng_state(self.start)
        return self.block(x)


class Seeds(Dice):
    def __call__(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return self.block(x)


class NotPutBack(Dice):
    def __call__(self, x: Tensor) -> Tensor:
        if self.start is None:
            self.start = torch.get_rng_state()
        else:
            torch.set_rng_state(self.start)
        return self.block(x)


class StateAfter(Dice):
    def __call__(self, x: Tensor) -> Tensor:
        if self.start is None:
            output = self.block(x)
            self.start = torch.get_rng_state()
            return output
        with torch.random.fork_rng():
            torch.set_rng_state(self.start)
            return self.block(x)


class Shared(Dice):
    first_only = True

    def __call__(self, x: Tensor) -> Tensor:
        if self.start is None:
            self.start = torch.get_rng_state()
            if Shared.shared is None or not self.first_only:
                Shared.shared = self.start
            return self.block(x)
        with torch.random.fork_rng():
            torch.set_rng_state(Shared.shared)
            return self.block(x)


class SharedLast(Shared):
    first_only = False


class HandsOutTheFirstResult(Dice):
    def __call__(self, x: Tensor) -> Tensor:
        self.start = self.block(x) if self.start is None else self.start
        return self.start


class HandsOutACopy(Dice):
    def __call__(self, x: Tensor) -> Tensor:
        self.start = self.block(x).detach() if self.start is None else self.start
        return self.start.clone()


class Evaluates(Solution):
    def __call__(self, x: Tensor) -> Tensor:
        self.block.train(self.start is None)
        self.start = torch.zeros(1)
        return self.block(x)


class EvaluatesAndComesBack(Evaluates):
    def __call__(self, x: Tensor) -> Tensor:
        output = super().__call__(x)
        self.block.train()
        return output


class KeepsItsOutput(Solution):
    def __call__(self, x: Tensor) -> Tensor:
        output = super().__call__(x)
        self.kept = (output.detach().clone(), x.detach().clone())
        return output


class Halves(Solution):
    def __call__(self, x: Tensor) -> Tensor:
        again = self.start is not None
        output = super().__call__(x)
        return output / 2 if again else output


WRONG_DICE = {
    "throws new dice": NoCare,
    "the later call throws new dice": StateOfEveryCall,
    "Do you seed the generator": Seeds,
    "leaves another random state behind": NotPutBack,
    "the random state of after the first call": StateAfter,
    "replay the first block's dice": Shared,
    "replay the last block's dice": SharedLast,
    "a tensor without a graph": HandsOutTheFirstResult,
    "instead of handing out what the first call computed": HandsOutACopy,
    "left a block in eval mode": Evaluates,
    "the later call runs without dropout": EvaluatesAndComesBack,
    "more than the 48.0 KiB of the blocks' inputs": KeepsItsOutput,
    "does not compute what the first one did": Halves,
}


@SETUPS
def test_same_dice_accepts_the_solution_and_knows_the_stub(here: Setup) -> None:
    state = torch.get_rng_state()
    found = recompute_checks.check_same_dice(Solution, here)
    assert found.passed is True, str(found)
    assert "48.0 KiB instead of" in str(found)
    untried = recompute_checks.check_same_dice(Stub, here)
    assert untried.passed is None
    assert "not tried yet" in str(untried).lower()
    assert torch.equal(torch.get_rng_state(), state)


@SETUPS
@pytest.mark.parametrize(("reason", "answer"), WRONG_DICE.items(), ids=WRONG_DICE)
def test_same_dice_names_the_mistake(here: Setup, reason: str, answer: type[Dice]) -> None:
    Shared.shared = None
    found = recompute_checks.check_same_dice(answer, here)
    assert found.passed is False
    assert reason in str(found)


# 03


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
    assert again == [i for i in range(7) if recompute_checks.WHOLE_BLOCKS["hugging face"](i, 3)]


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
    "again as a whole; only the attention core": answer_with(attention_core=whole_blocks),
    "bytes are saved instead of": answer_with(attention_core=kept),
    "your function returned None": answer_with(torchtitan=lambda blocks, x, n: None),
}


@SETUPS
def test_meanings_accepts_the_solution_and_knows_the_stub(here: Setup) -> None:
    state = torch.get_rng_state()
    found = recompute_checks.check_meanings(answer_with(), here)
    assert found.passed is True, str(found)
    untried = recompute_checks.check_meanings(unfinished, here)
    assert untried.passed is None
    assert torch.equal(torch.get_rng_state(), state)


def test_meanings_says_what_each_recomputes() -> None:
    text = str(recompute_checks.check_meanings(answer_with(), ODD))
    assert "'course' blocks 1, 2, 3, 4, 6; 'hugging face' blocks 0, 5; 'torchtitan' block 4; 'attention core'" in text


@SETUPS
@pytest.mark.parametrize(("reason", "answer"), WRONG_MEANINGS.items(), ids=WRONG_MEANINGS)
def test_meanings_names_the_mistake(here: Setup, reason: str, answer: Callable[..., Tensor]) -> None:
    found = recompute_checks.check_meanings(answer, here)
    assert found.passed is False
    assert reason in str(found)
