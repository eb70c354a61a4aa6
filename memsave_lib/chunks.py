"""A region of several blocks inside a model that calls its blocks one by one.

The first block of the region (the leader) runs all of them under one checkpoint and returns the region's output. The
model then calls the others (the followers), each with what the one before returned: they hand it on. That is right only
if every follower's first input is the region's output itself, all else is what the leader got, and the model draws no
random numbers between its blocks, so all three are checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memsave_lib import _compat
from memsave_lib.placement import BLOCK_BY_BLOCK
from memsave_lib.plan import Segment
from memsave_lib.regions import Counts, Stack, run_segments
from memsave_lib.strategies import Strategy


@dataclass
class Chunk:
    """A region that has run in its leader's call; its followers still have to be called."""

    segment: Segment
    names: Sequence[str]  # what errors call each block of the stack
    output: Any  # of the region: mostly one tensor
    handed: Any  # what stands for the output of every block but the last
    handed_leaves: list[Any]  # its leaves, before the model could exchange some
    fixed: list[Any]  # leaves of all arguments but the first
    rests: dict[int, Any]  # follower -> what its block returned behind its output
    random_state: bytes  # of the CPU, once all blocks have run

    @classmethod
    def run(
        cls,
        segment: Segment,
        call_block: Callable[..., Any],
        blocks: Sequence[object],
        names: Sequence[str],
        counts: Counts,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> tuple[Chunk, Any]:
        """Run all blocks; returns the chunk and what its leader is to return.

        Args:
            call_block: ``call_block(index, *args, **kwargs)`` calls that block of the stack.
            args, kwargs: the leader's; the first one, whatever its name, is what blocks hand to each other.
        """

        def call(index: int, state: tuple[Any, tuple], *fixed: Any) -> tuple[Any, tuple]:
            hidden, rests = state
            args, kwargs = _with_first(hidden, *fixed)
            output = call_block(index, *args, **kwargs)
            hidden, rest = _split_output(output, names[index]) if isinstance(hidden, Tensor) else (output, None)
            return hidden, (*rests, rest)

        hidden, *fixed = _split_first(args, kwargs)
        hidden, rests = run_segments((segment,), Stack(call, blocks, counts), (hidden, ()), *fixed)
        followers = dict(enumerate(rests[1:], start=segment.start + 1))
        handed = _handed_on(hidden, names[segment.start], names[segment.stop - 1])
        chunk = cls(segment, names, hidden, handed, _leaves(handed), _leaves(fixed), followers, _random_state())
        return chunk, _join_output(handed, rests[0])

    def follow(self, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What block ``index`` returns, now that its work is done; an error if the model asks for other work."""
        if index != next(iter(self.rests)):
            raise RuntimeError(self.skipped(f"{self.names[index]} was called"))
        hidden, *fixed = _split_first(args, kwargs)
        obstacle = None
        if not _same(_leaves(hidden), self.handed_leaves):
            obstacle = "a changed input"
        elif not _same(_leaves(fixed), self.fixed):
            obstacle = "other arguments"
        elif _random_state() != self.random_state:
            obstacle = "other random numbers (the model draws some between its blocks)"
        if obstacle:
            raise ValueError(
                f"{self.names[index]} got {obstacle} compared with {self.names[self.segment.start]}, so blocks "
                f"{self.segment.start} to {self.segment.stop - 1} cannot run as one region; {BLOCK_BY_BLOCK}"
            )
        rest = self.rests.pop(index)
        return _join_output(self.handed if self.rests else self.output, rest)

    def skipped(self, when: str) -> str:
        missing = self.names[next(iter(self.rests))]
        return f"{missing} was not called (before {when}), but has run already in its region; {BLOCK_BY_BLOCK}"


class _HandedOn(Tensor):
    """Stands for the output of a block inside a region, which is gone by the time the region has run.

    A model that does more with it than hand it to the next block (adds it up, keeps it for a skip connection) would
    compute with the output of the whole region instead, and nobody would notice.
    """

    first: str
    last: str

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        handed = next(leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, cls))
        raise ValueError(
            f"the output of a block between {handed.first} and {handed.last} was used by more than the next block "
            f"({getattr(function, '__name__', function)}), and these blocks run as one region, which has no such "
            f"output; {BLOCK_BY_BLOCK}"
        )


_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda")
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__")),
}


def _handed_on(hidden: Any, first: str, last: str) -> Any:
    """A stand-in of the same shape for a plain tensor; anything else (fake tensors, tuples) is handed on as it is."""
    if type(hidden) is not Tensor:
        return hidden
    handed = hidden.detach().requires_grad_(hidden.requires_grad).as_subclass(_HandedOn)
    handed.first, handed.last = first, last
    return handed


def _split_first(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
    """A block's first input, whether named or not, and all other arguments with None in its place."""
    if args:
        return args[0], (None, *args[1:]), kwargs
    name = next(iter(kwargs))
    return kwargs[name], (), {**kwargs, name: None}


def _with_first(hidden: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): hidden}


def _split_output(output: Any, name: str) -> tuple[Tensor, Any]:
    """What a block hands to the next one, and the rest of a tuple that it returned."""
    if isinstance(output, Tensor):
        return output, None
    if type(output) in (tuple, list) and output and isinstance(output[0], Tensor):
        return output[0], output[1:]
    raise TypeError(
        f"{name} returned {type(output).__name__}; a block inside a region returns a tensor, or a tuple or list "
        f"that starts with one"
    )


def _join_output(hidden: Any, rest: Any) -> Any:
    return hidden if rest is None else type(rest)((hidden, *rest))


def _leaves(tree: Any) -> list[Any]:
    return _compat.tree_flatten(tree)[0]


def _same(ours: list[Any], theirs: list[Any]) -> bool:
    plain = (int, float, complex, str, bytes, torch.dtype, torch.device)
    return len(ours) == len(theirs) and all(
        a is b or (isinstance(a, plain) and type(a) is type(b) and a == b) for a, b in zip(ours, theirs, strict=True)
    )


def _random_state() -> bytes:
    state = torch.get_rng_state()
    # Read by address: an operation on it would show in a meter, and would be refused where tensors are fake.
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def refuse_missing_hidden_states(output: Any, strategy: Strategy) -> None:
    """Models that collect hidden states between their block calls have collected what regions do not hand out."""
    # With return_dict=False the hidden states are one of the entries of a plain tuple.
    entries = output if isinstance(output, tuple) else (getattr(output, "hidden_states", None),)
    collected = [states for states in entries if isinstance(states, tuple)]
    if any(_is_missing(a, b) for states in collected for a, b in zip(states, states[1:], strict=False)):
        raise ValueError(
            f"output_hidden_states=True needs every block's output, which {strategy} does not hand out; "
            f"{BLOCK_BY_BLOCK}"
        )


def _is_missing(state: Any, next_state: Any) -> bool:
    return isinstance(state, _HandedOn) or (isinstance(state, Tensor) and state is next_state)
