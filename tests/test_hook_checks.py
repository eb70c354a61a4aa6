"""The hooks of notebook 05: solution right, stub untried, each plausible mistake diagnosed."""

from __future__ import annotations

from typing import Any

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


WRONG_HOOKS = {
    "A weight was sent away": TenLines,
    "compare storages, not tensors": WeightsByName,
    "your pack hook returned its argument": ReturnsItsArgument,
    "A witness owns no memory": KeepsTheTensor,
    "still holds the wide activation (512.0 KiB)": KeepsAll,
    "under hooks PyTorch does not look": NeverLooks,
    "unpack must return what pack was given": InHalfPrecision,
    "unpack must return a tensor, yours returned a tuple": HandsBackTheTicket,
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
def test_hooks_name_the_mistake(here: Setup, reason: str, answer: type[Solution]) -> None:
    found = hook_checks.check_hooks(answer, here)
    assert found.passed is False
    assert reason in str(found)


def test_an_error_of_their_own_is_theirs_to_read() -> None:
    class Mistyped(Solution):
        def unpack(self, ticket: Any) -> Any:
            raise RuntimeError("a mistake of mine")

    with pytest.raises(RuntimeError, match="a mistake of mine"):
        hook_checks.check_hooks(Mistyped, DEFAULTS)


def test_a_check_of_their_own_notices_changes_too() -> None:
    class OwnError(Solution):
        def unpack(self, ticket: Any) -> Any:
            if ticket[0]._version != ticket[1]:
                raise RuntimeError("changed since it was packed")
            return ticket[-1].to(ticket[-2])

    assert hook_checks.check_hooks(OwnError, DEFAULTS).passed is True
