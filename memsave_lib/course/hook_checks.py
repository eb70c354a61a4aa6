"""A check of an exercise of notebook 05: saved-tensor hooks without the classic bugs.

It follows :mod:`memsave_lib.course.checks`: a :class:`Verdict` to print, "not tried yet" for an untouched stub, and for
a wrong answer the reason why it is wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, NoneType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memsave_lib.course.checks import Verdict, answered, right, untouched_error, wrong
from memsave_lib.course.env import Setup
from memsave_lib.units import human_bytes


class Hooks(Protocol):
    """What the exercise asks for."""

    def pack(self, tensor: Tensor) -> object: ...

    def unpack(self, ticket: Any) -> Tensor: ...


class _Gated(nn.Module):
    """Saves wide activations, a weight through a view, and a small tensor that is the output of its own operation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(64, 256), nn.Linear(64, 1), nn.Linear(256, 64)
        self.witnesses: dict[str, weakref.ref[torch.UntypedStorage]] = {}
        self.changeable: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        wide = nn.functional.gelu(self.up(x))
        gate = torch.sigmoid(self.gate(x))
        self.witnesses = {"wide": _witness(wide), "small": _witness(gate)}
        # Detached tensors share memory and version.
        self.changeable = {"wide": wide.detach(), "small": gate.detach(), "weight": self.down.weight.detach()}
        return self.down(wide * gate)


def _witness(tensor: Tensor) -> weakref.ref[torch.UntypedStorage]:
    return weakref.ref(tensor.untyped_storage())


@answered
def check_hooks(make: Callable[[nn.Module], Hooks], here: Setup) -> Verdict:
    """``make(model)`` gives ``pack`` and ``unpack``: what is large leaves, weights stay, changes are noticed."""
    with torch.random.fork_rng():
        torch.manual_seed(here.seed)
        # float32, whatever the default may be: the bytes below are of that.
        model, x = _Gated().float(), torch.randn(512, 64, dtype=torch.float32)
        expected = _gradients(model, x, None)
        hooks = make(model)
        if missing := [name for name in ("pack", "unpack") if not callable(getattr(hooks, name, None))]:
            return wrong(f"There is no method {missing[0]!r}: hooks are two, pack and unpack.")
        watched = _Watched(hooks, model)
        found = _gradients(model, x, watched)
        if strange := [kind for kind in watched.handed_back if kind is not Tensor]:
            kind = "None: end it with return" if strange[0] is NoneType else f"a {strange[0].__name__}"
            return wrong(f"unpack must return a tensor, for every ticket; yours returned {kind}.")
        fault = _fault_in_hooks(make, model, x, watched, all(map(torch.equal, found, expected)))
    return fault or right(
        "Equal gradients; weights stay, large activations die, small ones do not leak, and an in-place change raises."
    )


def _fault_in_hooks(
    make: Callable[[nn.Module], Hooks], model: _Gated, x: Tensor, watched: _Watched, equal: bool
) -> Verdict | None:
    if not equal:
        return wrong("The gradients differ from plain training: unpack must return what pack was given, bit by bit.")
    if watched.weights_copied:
        return wrong(
            "A weight was sent away. It is alive anyway, so that costs memory and saves none. Weights reach you as "
            "views (`weight.T`): compare storages, not tensors."
        )
    wide, small = _left_behind(make, model, x)
    if wide.while_alive:
        return wrong(
            f"Something still holds the wide activation ({human_bytes(512 * 256 * 4)}) after forward, so nothing was "
            f"saved. Does your ticket keep the tensor, or a view such as `tensor.detach()`? A witness owns no memory."
        )
    if small.after_death and watched.argument_in_ticket:
        return wrong(
            "The graph is gone, and the small tensor lives on, for ever: it is the output of its own operation, and "
            "your pack hook returned its argument, which holds that operation. Hand back `tensor.detach()`."
        )
    if small.after_death:
        return wrong(
            "The graph is gone, and the small tensor lives on. Your tickets do not hold it: what does? A dict or a "
            "list that outlives the graph is never emptied when backward does not come. Put all into the ticket."
        )
    return _unnoticed(make, model, x)


_UNNOTICED: Mapping[str, str] = {
    "wide": (
        "A saved tensor was changed in place before backward, and no error came: under hooks PyTorch does not "
        "look. Keep `held.witness(tensor)` and `tensor._version`, and call `held.check_version` in unpack."
    ),
    "small": (
        "A small tensor was changed in place before backward, and no error came. You look at what leaves only: "
        "what stays is the same memory, so there a change is even sure to give wrong gradients."
    ),
    "weight": (
        "A weight was changed in place before backward, and no error came. Weights stay, but their versions are to be "
        "checked like all others: plain training raises there."
    ),
}


def _unnoticed(make: Callable[[nn.Module], Hooks], model: _Gated, x: Tensor) -> Verdict | None:
    for name, reason in _UNNOTICED.items():
        if not _notices_change(make, model, x, name):
            return wrong(reason)
    return None


class _Watched:
    """A learner's hooks, and what they do with weights."""

    def __init__(self, hooks: Hooks, model: nn.Module) -> None:
        self._hooks = hooks
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.weights_copied = 0
        self.raised = False
        self.handed_back: list[type] = []
        self.argument_in_ticket = False

    def pack(self, tensor: Tensor) -> tuple[object, bool]:
        ticket = self._hooks.pack(tensor)
        # A leaf has no operation that could hold it.
        self.argument_in_ticket |= tensor.grad_fn is not None and _holds(ticket, tensor)
        return ticket, tensor.untyped_storage().data_ptr() in self._weights

    def unpack(self, packed: tuple[object, bool]) -> Tensor:
        ticket, weight = packed
        self.raised = True
        tensor = self._hooks.unpack(ticket)
        self.raised = False
        kind = Tensor if isinstance(tensor, Tensor) else type(tensor)
        self.handed_back = list(dict.fromkeys([*self.handed_back, kind]))
        if kind is Tensor and weight:
            self.weights_copied += tensor.untyped_storage().data_ptr() not in self._weights
        # Whatever it was, backward goes on: the verdict is spoken afterwards.
        return tensor if kind is Tensor else torch.zeros(1)


def _holds(ticket: object, tensor: Tensor, depth: int = 4) -> bool:
    """Whether a ticket is this very tensor, or a container, an object or a closure with it."""
    if ticket is tensor or isinstance(ticket, Tensor) or not depth:
        return ticket is tensor
    if isinstance(ticket, Mapping):
        parts = list(ticket.values())
    elif isinstance(ticket, list | tuple | set | frozenset):
        parts = list(ticket)
    elif isinstance(ticket, FunctionType):
        parts = [*(cell.cell_contents for cell in ticket.__closure__ or ()), *(ticket.__defaults__ or ())]
    elif isinstance(ticket, partial):
        parts = [*ticket.args, *ticket.keywords.values()]
    else:
        parts = list(getattr(ticket, "__dict__", {}).values())
    return any(_holds(part, tensor, depth - 1) for part in parts)


def _gradients(model: _Gated, x: Tensor, hooks: _Watched | None) -> list[Tensor]:
    model.zero_grad()
    if hooks is None:
        model(x).sum().backward()
    else:
        with saved_tensors_hooks(hooks.pack, hooks.unpack):
            loss = model(x).sum()
        _backward(loss, hooks)
    return [parameter.grad if parameter.grad is not None else torch.zeros(0) for parameter in model.parameters()]


def _backward(loss: Tensor, hooks: _Watched) -> None:
    try:
        loss.backward()
    except RuntimeError:
        # A tensor of another shape or type stops PyTorch itself; gradients are missing then, and differ. What the
        # learner's own hook raises is the learner's to read.
        if hooks.raised:
            raise


@dataclass(frozen=True)
class _Life:
    """Whether a storage is there between forward and backward, and when the graph is gone."""

    while_alive: bool
    after_death: bool


def _left_behind(make: Callable[[nn.Module], Hooks], model: _Gated, x: Tensor) -> tuple[_Life, _Life]:
    hooks = make(model)
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        output = model(x)
    model.changeable = {}
    alive = {name: witness() is not None for name, witness in model.witnesses.items()}
    del output, hooks
    dead = {name: witness() is not None for name, witness in model.witnesses.items()}
    return tuple(_Life(alive[name], dead[name]) for name in ("wide", "small"))


def _notices_change(make: Callable[[nn.Module], Hooks], model: _Gated, x: Tensor, name: str) -> bool:
    """Whether backward fails when the tensor of this name is changed in place before."""
    model.zero_grad()
    hooks = make(model)
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        loss = model(x).sum()
    changed, before = model.changeable[name], model.changeable[name].clone()
    changed.zero_()
    model.changeable = {}
    try:
        loss.backward()
    except NotImplementedError as error:
        if untouched_error(error):
            raise
        return True
    except Exception:  # whatever kind the learner chose (an assert will do): backward without a change has run before
        return True
    finally:
        changed.copy_(before)
    return False
