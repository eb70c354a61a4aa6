"""Wrong answers to the exercise of notebook 02's dice, so that its check can tell what a learner did.

Each is a function that makes a wrapper, fresh for each run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Function = Callable[[Tensor], Tensor]


def _replay(keep: Callable[[dict[str, Tensor], Tensor, Tensor], None]) -> Callable[[nn.Module], Function]:
    """A wrapper for all blocks with one common state; ``keep`` chooses it from the states around a first call."""
    states: dict[str, Tensor] = {}

    def wrapper(block: nn.Module) -> Function:
        calls: list[Tensor] = []

        def function(x: Tensor) -> Tensor:
            if not calls:
                before = torch.get_rng_state()
                calls.append(block(x))
                keep(states, before, torch.get_rng_state())
                return calls[0]
            with torch.random.fork_rng():
                torch.set_rng_state(states["start"])
                return block(x)

        return function

    return wrapper


def _first_state_for_all() -> Callable[[nn.Module], Function]:
    return _replay(lambda states, before, after: states.setdefault("start", before))


def _last_state_for_all() -> Callable[[nn.Module], Function]:
    return _replay(lambda states, before, after: states.update(start=before))


def _state_after_the_call() -> Callable[[nn.Module], Function]:
    def wrapper(block: nn.Module) -> Function:
        return _replay(lambda states, before, after: states.update(start=after))(block)

    return wrapper


def _state_when_made() -> Callable[[nn.Module], Function]:
    def wrapper(block: nn.Module) -> Function:
        made = torch.get_rng_state()
        return _replay(lambda states, before, after: states.update(start=made))(block)

    return wrapper


def _initial_seed() -> Callable[[nn.Module], Function]:
    def keep(states: dict[str, Tensor], before: Tensor, after: Tensor) -> None:
        states["start"] = torch.Generator().manual_seed(torch.initial_seed()).get_state()

    return lambda block: _replay(keep)(block)


def _made_state_always() -> Callable[[nn.Module], Function]:
    def wrapper(block: nn.Module) -> Function:
        made = torch.get_rng_state()

        def function(x: Tensor) -> Tensor:
            torch.set_rng_state(made)
            return block(x)

        return function

    return wrapper


def _never_advances() -> Callable[[nn.Module], Function]:
    def wrapper(block: nn.Module) -> Function:
        def function(x: Tensor) -> Tensor:
            with torch.random.fork_rng():
                return block(x)

        return function

    return wrapper


def _no_care() -> Callable[[nn.Module], Function]:
    return lambda block: block


def _no_dropout_later() -> Callable[[nn.Module], Function]:
    def wrapper(block: nn.Module) -> Function:
        calls: list[bool] = []

        def function(x: Tensor) -> Tensor:
            block.train(not calls)
            calls.append(True)
            output = block(x)
            block.train()
            return output

        return function

    return wrapper


#: What makes another output.
OUTPUT_MISTAKES: dict[str, Callable[[], Callable[[nn.Module], Function]]] = {
    "the generator does not advance over the first call. Put the state back only after later calls.": _never_advances,
    "the state was taken when the wrapper was made; take it when it is first called.": _made_state_always,
}
#: What makes other gradients.
GRADIENT_MISTAKES: dict[str, Callable[[], Callable[[nn.Module], Function]]] = {
    "the later call throws new dice. Bring back the random state of before the first call.": _no_care,
    "all wrappers replay the first block's dice. Keep the state in self, one for each wrapper.": _first_state_for_all,
    "all wrappers replay the last block's dice. Keep the state in self, one for each wrapper.": _last_state_for_all,
    "the state was taken when the wrapper was made; take it when it is first called.": _state_when_made,
    "torch.initial_seed() says how the generator was seeded once, not where it is now. Keep torch.get_rng_state().": (
        _initial_seed
    ),
    "you kept the random state of after the first call; its dice come from the state before it.": _state_after_the_call,
    "the later call runs without dropout. It must drop what the first call dropped.": _no_dropout_later,
}
