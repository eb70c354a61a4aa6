"""Checks of the exercises of notebook 05: what leaves, which link is fast enough, and hooks without the classic bugs.

They follow :mod:`memsave_lib.course.checks`: a :class:`Verdict` to print, "not tried yet" for an untouched stub, and
for a wrong answer the reason why it is wrong.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memsave_lib.course.checks import NOT_TRIED, Verdict, is_untouched, right, wrong
from memsave_lib.course.costs import saved_storages
from memsave_lib.course.env import Setup
from memsave_lib.formulas import BlockShape, hiding_bandwidth
from memsave_lib.strategies import MIN_BYTES
from memsave_lib.units import exact_bytes, human_bytes

# The bytes that leave


@dataclass(frozen=True)
class LeavingCase:
    """Arguments of the exercise: what each block saves, its input first, and how many blocks at the end stay."""

    sizes: tuple[int, ...]
    n_layers: int
    keep_last: int

    def __str__(self) -> str:
        return f"sizes={list(self.sizes)}, n_layers={self.n_layers}, keep_last={self.keep_last}"

    def count(self, *, blocks: int | None = None, min_bytes: int = MIN_BYTES, first_input: bool = False) -> int:
        """Bytes that leave from the first ``blocks`` blocks; ``first_input`` counts the input of the stack too."""
        sent = max(0, self.n_layers - self.keep_last) if blocks is None else blocks
        each = [size if size >= min_bytes else 0 for size in self.sizes]
        return sent * sum(each) - (0 if first_input or not sent else each[0])


def check_bytes_that_leave(function: Callable[[list[int], int, int], int], here: Setup) -> Verdict:
    """``function(sizes, n_layers, keep_last)``: bytes that ``Offload(keep_last=...)`` sends away in one forward."""
    shape = BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
    yours = LeavingCase(saved_storages(shape), here.n_layers, 1)
    if is_untouched(function, list(yours.sizes), yours.n_layers, yours.keep_last):
        return NOT_TRIED
    cases = (yours, *_LEAVING_CASES)
    given = [function(list(case.sizes), case.n_layers, case.keep_last) for case in cases]
    if bad := [value for value in given if type(value) is not int]:
        return wrong(f"A count of bytes is an int, and your function returned {bad[0]!r} ({type(bad[0]).__name__}).")
    wanted = [case.count() for case in cases]
    if given == wanted:
        return right(f"At your parameters {exact_bytes(wanted[0])} leave; {len(_LEAVING_CASES)} other stacks agree.")
    for reason, mistake in _LEAVING_MISTAKES.items():
        if given == [mistake(case) for case in cases]:
            return wrong(reason)
    case, found, expected = next(row for row in zip(cases, given, wanted, strict=True) if row[1] != row[2])
    return wrong(f"For {case} you get {found:,} bytes; {expected:,} bytes leave.")


_LEAVING_CASES = (
    LeavingCase(saved_storages(BlockShape(2, 256, 64, 2)), 4, 0),
    LeavingCase(saved_storages(BlockShape(2, 256, 64, 2)), 4, 2),
    # The log-sum-exp takes 64 KiB exactly, which is not less than the limit.
    LeavingCase(saved_storages(BlockShape(2, 2048, 64, 4)), 3, 1),
    # Only queries, keys and values, and the two wide tensors are large enough: no block's input is.
    LeavingCase(saved_storages(BlockShape(1, 128, 64, 1)), 3, 1),
    LeavingCase(saved_storages(BlockShape(2, 256, 64, 2)), 2, 3),  # more blocks stay than there are
)

_LEAVING_MISTAKES: dict[str, Callable[[LeavingCase], int]] = {
    "You send all blocks: the last `keep_last` stay.": lambda case: case.count(blocks=case.n_layers),
    "You keep the first `keep_last` blocks: it is the last ones that stay.": (
        lambda case: case.count(first_input=case.keep_last > 0)
    ),
    "You count the small tensors too: what is smaller than 64 KiB stays.": lambda case: case.count(min_bytes=0),
    "You leave out a tensor of 64 KiB exactly: only what is smaller stays.": lambda case: case.count(
        min_bytes=MIN_BYTES + 1
    ),
    "You count the input of the first block: whoever called the stack holds it, so it stays.": (
        lambda case: case.count(first_input=True)
    ),
    "You leave out the input of every block: only the first block's is held by somebody else.": (
        lambda case: max(0, case.n_layers - case.keep_last) * sum(size for size in case.sizes[1:] if size >= MIN_BYTES)
    ),
    "You count small tensors and the input of the first block: both stay.": (
        lambda case: case.count(min_bytes=0, first_input=True)
    ),
    "You count all that is saved. Three things stay: the last `keep_last` blocks, tensors smaller than 64 KiB, and the "
    "input of the first block.": lambda case: case.n_layers * sum(case.sizes),
    "You count a negative number of blocks: with keep_last above n_layers nothing leaves.": (
        lambda case: (
            case.count()
            if case.n_layers > case.keep_last
            else (case.n_layers - case.keep_last) * sum(size for size in case.sizes if size >= MIN_BYTES)
            - (case.sizes[0] if case.sizes[0] >= MIN_BYTES else 0)
        )
    ),
    "You count the way back too: the exercise asks what leaves.": lambda case: 2 * case.count(),
}

# The slowest link behind which a copy hides


@dataclass(frozen=True)
class LinkCase:
    """Arguments of the exercise, in its order."""

    seq_len: int
    hidden: int
    gamma: float
    flops: float
    blocks_per_copy: int

    def __str__(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in vars(self).items())

    def bandwidth(self, kappa: int = 2) -> float:
        one = hiding_bandwidth(self.seq_len, self.hidden, self.gamma, self.flops, kappa)
        return one / self.blocks_per_copy


def check_slowest_link(function: Callable[[int, int, float, float, int], float]) -> Verdict:
    """``function(seq_len, hidden, gamma, flops, blocks_per_copy)``: bytes a second at which the copy just hides."""
    arguments = [tuple(vars(case).values()) for case in _LINK_CASES]
    if is_untouched(function, *arguments[0]):
        return NOT_TRIED
    given = [function(*values) for values in arguments]
    if bad := [value for value in given if isinstance(value, bool) or not isinstance(value, int | float)]:
        return wrong(f"A bandwidth is a number, and your function returned {bad[0]!r} ({type(bad[0]).__name__}).")
    wanted = [case.bandwidth() for case in _LINK_CASES]
    if _same(given, wanted):
        return right(
            f"On an A100, checkpoints of Llama-2-7B's width at 4,096 tokens need {wanted[0] / 1e9:.1f} GB/s, one for "
            f"each block, and {wanted[1] / 1e9:.2f} GB/s, one for four."
        )
    for reason, mistake in _LINK_MISTAKES.items():
        if _same(given, [mistake(case) for case in _LINK_CASES]):
            return wrong(reason)
    case, found, expected = next(row for row in zip(_LINK_CASES, given, wanted, strict=True) if not _same(*row[1:]))
    return wrong(f"For {case} you get {found:.4g} bytes a second; the copy just hides at {expected:.4g}.")


def _same(given: Any, wanted: Any) -> bool:
    pairs = zip(given, wanted, strict=True) if isinstance(given, list) else [(given, wanted)]
    return all(math.isclose(one, other, rel_tol=1e-6) for one, other in pairs)


_LINK_CASES = (
    LinkCase(4096, 4096, 2, 156e12, 1),
    LinkCase(4096, 4096, 2, 156e12, 4),
    LinkCase(131072, 4096, 45.5, 156e12, 1),
    LinkCase(1024, 768, 34, 24e12, 3),
)

_LINK_MISTAKES: dict[str, Callable[[LinkCase], float]] = {
    "You leave out `blocks_per_copy`: while one copy is on its way, that many blocks compute.": (
        lambda case: case.bandwidth() * case.blocks_per_copy
    ),
    "You multiply by `blocks_per_copy`: more blocks compute behind each copy, so a slower link will do.": (
        lambda case: case.bandwidth() * case.blocks_per_copy**2
    ),
    "You take kappa = 4: with causal attention half of the scores are skipped, kappa = 2.": (
        lambda case: case.bandwidth(kappa=4)
    ),
    "You leave out attention: `kappa*s` grows with the sequence.": lambda case: case.bandwidth(kappa=0),
    "You multiply `blocks_per_copy` into the projections alone: attention is computed in each block too.": (
        lambda case: case.gamma * case.flops / (24 * case.hidden * case.blocks_per_copy + 2 * case.seq_len)
    ),
    "You turned the fraction upside down: a faster device needs a faster link.": lambda case: 1 / case.bandwidth(),
    "You ask for bits: bandwidths here are bytes a second.": lambda case: 8 * case.bandwidth(),
    "You count the way back too: it happens in backward, which has twice the time.": lambda case: 2 * case.bandwidth(),
}

# Hooks without the classic bugs


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
        self.changeable: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        wide = nn.functional.gelu(self.up(x))
        gate = torch.sigmoid(self.gate(x))
        self.witnesses = {"wide": _witness(wide), "small": _witness(gate)}
        self.changeable = wide.detach()  # shares memory and version
        return self.down(wide * gate)


def _witness(tensor: Tensor) -> weakref.ref[torch.UntypedStorage]:
    return weakref.ref(tensor.untyped_storage())


def check_hooks(make: Callable[[nn.Module], Hooks], here: Setup) -> Verdict:
    """``make(model)`` gives ``pack`` and ``unpack``: what is large leaves, weights stay, changes are noticed."""
    with torch.random.fork_rng():
        torch.manual_seed(here.seed)
        model, x = _Gated(), torch.randn(512, 64)
        if is_untouched(lambda: make(model).pack(torch.zeros(1))):
            return NOT_TRIED
        expected = _gradients(model, x, None)
        watched = _Watched(make(model), model)
        found = _gradients(model, x, watched)
        if watched.handed_back != [Tensor]:
            return wrong(f"unpack must return a tensor, yours returned a {watched.handed_back[-1].__name__}.")
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
    if small.after_death:
        return wrong(
            "The graph is gone, and the small tensor lives on, for ever: it is the output of its own operation, and "
            "your pack hook returned its argument, which holds that operation. Hand back `tensor.detach()`."
        )
    if not _notices_change(make, model, x):
        return wrong(
            "A saved tensor was changed in place before backward, and no error came: under hooks PyTorch does not "
            "look. Keep `held.witness(tensor)` and `tensor._version`, and call `held.check_version` in unpack."
        )
    return None


class _Watched:
    """A learner's hooks, and what they do with weights."""

    def __init__(self, hooks: Hooks, model: nn.Module) -> None:
        self._hooks = hooks
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.weights_copied = 0
        self.handed_back: list[type] = []

    def pack(self, tensor: Tensor) -> tuple[object, bool]:
        return self._hooks.pack(tensor), tensor.untyped_storage().data_ptr() in self._weights

    def unpack(self, packed: tuple[object, bool]) -> Tensor:
        ticket, weight = packed
        tensor = self._hooks.unpack(ticket)
        kind = Tensor if isinstance(tensor, Tensor) else type(tensor)
        self.handed_back = list(dict.fromkeys([*self.handed_back, kind]))
        if kind is Tensor and weight:
            self.weights_copied += tensor.untyped_storage().data_ptr() not in self._weights
        # Whatever it was, backward goes on: the verdict is spoken afterwards.
        return tensor if kind is Tensor else torch.zeros(1)


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
        # A tensor of another shape or type stops PyTorch itself; gradients are missing then, and differ.
        if hooks.handed_back != [Tensor]:
            return
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
    model.changeable = None
    alive = {name: witness() is not None for name, witness in model.witnesses.items()}
    del output, hooks
    dead = {name: witness() is not None for name, witness in model.witnesses.items()}
    return tuple(_Life(alive[name], dead[name]) for name in ("wide", "small"))


def _notices_change(make: Callable[[nn.Module], Hooks], model: _Gated, x: Tensor) -> bool:
    model.zero_grad()
    hooks = make(model)
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        loss = model(x).sum()
    model.changeable.zero_()
    model.changeable = None
    try:
        loss.backward()
    except RuntimeError:  # PyTorch's own kind; plain backward has run without one before
        return True
    return False
