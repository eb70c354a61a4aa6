"""The dice of notebook 02: solution right, stub untried, each plausible mistake diagnosed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memsave_lib.course import recompute_checks
from memsave_lib.course.checks import NOT_FINISHED
from memsave_lib.course.env import Setup

DEFAULTS = Setup(512, 2, 6, 256, 2, 2, torch.device("cpu"))
ODD = Setup(96, 5, 7, 256, 3, 2, torch.device("cpu"), seed=3)
SMALLEST = Setup(8, 1, 1, 64, 1, 1, torch.device("cpu"))
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST], ids=["defaults", "odd", "smallest"])


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


class LeavesTheBlockOut(Solution):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) if self.start is None else x * 1


class ReturnsNothing(Dice):
    def __call__(self, x: Tensor) -> None:
        self.block(x)


class ReturnsNothingLater(Solution):
    def __call__(self, x: Tensor) -> Tensor | None:
        return super().__call__(x) if self.start is None else None


class ForgetsAfterReplay(Solution):
    """The third call is a first one again."""

    def __call__(self, x: Tensor) -> Tensor:
        again = self.start is not None
        output = super().__call__(x)
        if again:
            self.start = None
        return output


class NewStateAfterReplay(Solution):
    def __call__(self, x: Tensor) -> Tensor:
        again = self.start is not None
        output = super().__call__(x)
        if again:
            self.start = torch.get_rng_state()
        return output


class ForksTheFirstCallToo(Dice):
    def __call__(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            if self.start is None:
                self.start = torch.get_rng_state()
            torch.set_rng_state(self.start)
            return self.block(x)


class PutsBackAfterEveryCall(Dice):
    def __call__(self, x: Tensor) -> Tensor:
        now = torch.get_rng_state()
        if self.start is None:
            self.start = now
        torch.set_rng_state(self.start)
        output = self.block(x)
        torch.set_rng_state(now)
        return output


class StateOfMaking(Dice):
    """Replays it in later calls."""

    always = False

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.start = torch.get_rng_state()
        self.called = self.always

    def __call__(self, x: Tensor) -> Tensor:
        if not self.called:
            self.called = True
            return self.block(x)
        with torch.random.fork_rng():
            torch.set_rng_state(self.start)
            return self.block(x)


class StateOfMakingAlways(StateOfMaking):
    always = True


class InitialSeed(Dice):
    def __call__(self, x: Tensor) -> Tensor:
        if self.start is None:
            self.start = torch.initial_seed()
            return self.block(x)
        with torch.random.fork_rng():
            torch.manual_seed(self.start)
            return self.block(x)


class RecordsNothing(Solution):
    def __call__(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.start is None):
            return super().__call__(x)


class SumsLater(Solution):
    def __call__(self, x: Tensor) -> Tensor:
        again = self.start is not None
        output = super().__call__(x)
        return output.sum() if again else output


class Sums(Solution):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).sum()


class ReturnsATuple(Solution):
    def __call__(self, x: Tensor) -> tuple[Tensor]:
        return (super().__call__(x),)


class FirstBranchOnly(Dice):
    def __call__(self, x: Tensor) -> Tensor:
        if self.start is None:
            self.start = torch.get_rng_state()
            return self.block(x)
        raise NotImplementedError("your turn")


class WithoutForward(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()


class AsModule(nn.Module):
    """The solution in another form."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.start = block, None

    def forward(self, x: Tensor) -> Tensor:
        return Solution.__call__(self, x)


NOT_ADVANCED = "the generator does not advance over the first call. Put the state back only after later calls."
WHEN_MADE = "the state was taken when the wrapper was made; take it when it is first called."
WRONG_DICE = {
    "The third call of one wrapper gives another output": ForgetsAfterReplay,
    "The third call of one wrapper gives another": NewStateAfterReplay,
    f"The output differs from the plain block's: {NOT_ADVANCED}": ForksTheFirstCallToo,
    NOT_ADVANCED: PutsBackAfterEveryCall,
    f"Equal output, but the gradients differ: {WHEN_MADE}": StateOfMaking,
    f"The output differs from the plain block's: {WHEN_MADE}": StateOfMakingAlways,
    "torch.initial_seed() says how the generator was seeded once": InitialSeed,
    "it runs the block again, but under no_grad(), or detached": RecordsNothing,
    "returned a tensor of shape () and torch.float32: every call": SumsLater,
    "returned a tensor of shape () and torch.float32": Sums,
    "returned an object of type tuple: every call": ReturnsATuple,
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
    "gradients differ: the later call does not compute what": LeavesTheBlockOut,
    "A call of your wrapper returned None": ReturnsNothing,
    "wrapper returned None (NoneType): every call must return the block's output": ReturnsNothingLater,
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


def test_the_first_branch_alone_is_unfinished() -> None:
    assert recompute_checks.check_same_dice(FirstBranchOnly, DEFAULTS) is NOT_FINISHED


def test_pytorchs_own_error_goes_through() -> None:
    with pytest.raises(NotImplementedError, match="missing the required"):
        recompute_checks.check_same_dice(WithoutForward, DEFAULTS)


def test_a_module_or_a_function_may_be_the_wrapper() -> None:
    assert recompute_checks.check_same_dice(AsModule, DEFAULTS).passed is True
    assert recompute_checks.check_same_dice(lambda block: Solution(block), DEFAULTS).passed is True


@SETUPS
@pytest.mark.parametrize(("reason", "answer"), WRONG_DICE.items(), ids=WRONG_DICE)
def test_same_dice_names_the_mistake(here: Setup, reason: str, answer: type[Dice]) -> None:
    Shared.shared = None
    found = recompute_checks.check_same_dice(answer, here)
    assert found.passed is False
    assert reason in str(found)
