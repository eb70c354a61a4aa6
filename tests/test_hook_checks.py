"""The hooks of notebook 05: solution right, stub untried, each plausible mistake diagnosed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from memsave_lib import held
from memsave_lib.course import hook_checks
from memsave_lib.course.env import Setup

DEFAULTS = Setup(512, 2, 6, 256, 2, 2, torch.device("cpu"))
ODD = Setup(96, 5, 7, 256, 3, 2, torch.device("cpu"), seed=3)
SMALLEST = Setup(8, 1, 1, 64, 1, 1, torch.device("cpu"))
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST], ids=["defaults", "odd", "smallest"])


def unfinished(*arguments: object) -> Any:
    raise NotImplementedError("your turn")


class Solution:
    def __init__(self, model: nn.Module) -> None:
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def stays(self, tensor: Tensor) -> bool:
        return tensor.nbytes < 65536 or tensor.untyped_storage().data_ptr() in self.weights

    def pack(self, tensor: Tensor) -> Any:
        copy = tensor.detach() if self.stays(tensor) else tensor.to("cpu", copy=True)
        return held.witness(tensor), tensor._version, tensor.device, copy

    def unpack(self, ticket: Any) -> Any:
        witness, version, device, copy = ticket
        held.check_version(witness, version, copy.shape)
        return copy.to(device)


class Stub(Solution):
    def pack(self, tensor: Tensor) -> Any:
        raise NotImplementedError("your turn")


class TenLines(Solution):
    """The hooks of the notebook's first section."""

    def pack(self, tensor: Tensor) -> Any:
        return tensor.device, tensor.to("cpu", copy=True)

    def unpack(self, ticket: Any) -> Any:
        device, copy = ticket
        return copy.to(device)


class WeightsByName(Solution):
    def __init__(self, model: nn.Module) -> None:
        self.parameters = {id(parameter) for parameter in model.parameters()}

    def stays(self, tensor: Tensor) -> bool:
        return tensor.nbytes < 65536 or id(tensor) in self.parameters


class ReturnsItsArgument(Solution):
    def pack(self, tensor: Tensor) -> Any:
        packed = super().pack(tensor)
        return (*packed[:3], tensor) if self.stays(tensor) else packed


class KeepsTheTensor(Solution):
    def pack(self, tensor: Tensor) -> Any:
        return (tensor.detach(), *super().pack(tensor)[1:])


class KeepsAll(Solution):
    def stays(self, tensor: Tensor) -> bool:
        return True


class NeverLooks(Solution):
    def unpack(self, ticket: Any) -> Any:
        return ticket[-1].to(ticket[-2])


class InHalfPrecision(Solution):
    def unpack(self, ticket: Any) -> Any:
        return super().unpack(ticket).bfloat16().float()


class FlattensIt(Solution):
    def unpack(self, ticket: Any) -> Any:
        return super().unpack(ticket).flatten()


class HandsBackTheTicket(Solution):
    def unpack(self, ticket: Any) -> Any:
        return ticket


class BareWhereItStays(Solution):
    """Versions are checked of what leaves only."""

    def pack(self, tensor: Tensor) -> Any:
        return tensor.detach() if self.stays(tensor) else super().pack(tensor)

    def unpack(self, ticket: Any) -> Any:
        return ticket if isinstance(ticket, Tensor) else super().unpack(ticket)


class BareWeights(BareWhereItStays):
    def pack(self, tensor: Tensor) -> Any:
        weight = tensor.untyped_storage().data_ptr() in self.weights
        return tensor.detach() if weight else Solution.pack(self, tensor)


class ForgetsToReturn(Solution):
    def unpack(self, ticket: Any) -> Any:
        tensor = super().unpack(ticket)
        return tensor if tensor.nbytes < 65536 else None


class InAList(ReturnsItsArgument):
    def pack(self, tensor: Tensor) -> Any:
        return [{"it": super().pack(tensor)}]

    def unpack(self, ticket: Any) -> Any:
        return super().unpack(ticket[0]["it"])


class InAClosure(ReturnsItsArgument):
    def pack(self, tensor: Tensor) -> Any:
        packed = super().pack(tensor)
        return lambda: packed

    def unpack(self, ticket: Any) -> Any:
        return super().unpack(ticket())


def in_a_shelf_that_stays() -> type[Solution]:
    """Copies lie in a dict of the class, and tickets are numbers."""

    class Shelf(Solution):
        shelf: ClassVar[dict[int, Any]] = {}

        def pack(self, tensor: Tensor) -> Any:
            self.shelf[len(self.shelf)] = super().pack(tensor)
            return len(self.shelf) - 1

        def unpack(self, ticket: Any) -> Any:
            return super().unpack(self.shelf[ticket])

    return Shelf


class NoUnpack:
    def __init__(self, model: nn.Module) -> None: ...

    def pack(self, tensor: Tensor) -> Any:
        return tensor.detach()


class Nothing:
    def __init__(self, model: nn.Module) -> None: ...


WRONG_HOOKS = {
    "A small tensor was changed in place before backward, and no error came": BareWhereItStays,
    "A weight was changed in place before backward, and no error came": BareWeights,
    "for every ticket; yours returned None: end it with return.": ForgetsToReturn,
    "your pack hook returned its argument, which holds that operation": InAList,
    "your pack hook returned its argument, which": InAClosure,
    "A dict or a list that outlives the graph is never emptied": in_a_shelf_that_stays(),
    "There is no method 'unpack'": NoUnpack,
    "There is no method 'pack'": Nothing,
    "There is no method 'pack': hooks are two": lambda model: None,
    "A weight was sent away": TenLines,
    "compare storages, not tensors": WeightsByName,
    "your pack hook returned its argument": ReturnsItsArgument,
    "A witness owns no memory": KeepsTheTensor,
    "still holds the wide activation (512.0 KiB)": KeepsAll,
    "under hooks PyTorch does not look": NeverLooks,
    "unpack must return what pack was given": InHalfPrecision,
    "unpack must return a tensor, for every ticket; yours returned a tuple": HandsBackTheTicket,
    "must return what pack was given, bit by bit": FlattensIt,
}


@SETUPS
def test_hooks_accept_the_solution_and_know_the_stub(here: Setup) -> None:
    state = torch.get_rng_state()
    found = hook_checks.check_hooks(Solution, here)
    assert found.passed is True, str(found)
    assert hook_checks.check_hooks(Stub, here).passed is None
    assert torch.equal(torch.get_rng_state(), state)


@SETUPS
@pytest.mark.parametrize(("reason", "answer"), WRONG_HOOKS.items(), ids=WRONG_HOOKS)
def test_hooks_name_the_mistake(here: Setup, reason: str, answer: Callable[[nn.Module], Any]) -> None:
    found = hook_checks.check_hooks(answer, here)
    assert found.passed is False
    assert reason in str(found)


def test_an_error_of_their_own_is_theirs_to_read() -> None:
    class Mistyped(Solution):
        def unpack(self, ticket: Any) -> Any:
            raise RuntimeError("a mistake of mine")

    with pytest.raises(RuntimeError, match="a mistake of mine"):
        hook_checks.check_hooks(Mistyped, DEFAULTS)


@pytest.mark.parametrize(
    "error", [RuntimeError, ValueError, AssertionError, NotImplementedError], ids=lambda error: error.__name__
)
def test_a_check_of_their_own_notices_changes_too(error: type[Exception]) -> None:
    class OwnError(Solution):
        def unpack(self, ticket: Any) -> Any:
            if ticket[0]._version != ticket[1]:
                raise error("changed since it was packed")
            return ticket[-1].to(ticket[-2])

    assert hook_checks.check_hooks(OwnError, DEFAULTS).passed is True


def test_hooks_in_part_are_not_finished() -> None:
    class OnlyPack(Solution):
        def unpack(self, ticket: Any) -> Any:
            raise NotImplementedError("your turn")

    class NotWhereItChanged(Solution):
        def unpack(self, ticket: Any) -> Any:
            return super().unpack(ticket) if ticket[0]._version == ticket[1] else unfinished()

    for hooks in (OnlyPack, NotWhereItChanged):
        found = hook_checks.check_hooks(hooks, DEFAULTS)
        assert found.passed is False and "Not finished" in str(found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_the_default_type_does_not_matter(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        assert hook_checks.check_hooks(Solution, DEFAULTS).passed is True
        assert "(512.0 KiB)" in str(hook_checks.check_hooks(KeepsAll, DEFAULTS))
    finally:
        torch.set_default_dtype(torch.float32)


def test_copies_may_lie_in_a_dict_of_the_hooks() -> None:
    class Shelf(Solution):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            self.shelf: dict[int, Any] = {}

        def pack(self, tensor: Tensor) -> Any:
            self.shelf[len(self.shelf)] = super().pack(tensor)
            return len(self.shelf) - 1

        def unpack(self, ticket: Any) -> Any:
            return super().unpack(self.shelf[ticket])

    assert hook_checks.check_hooks(Shelf, DEFAULTS).passed is True
