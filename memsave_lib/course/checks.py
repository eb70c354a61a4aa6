"""Checks of the exercises: each says what is right, or what exactly is wrong and why that happens.

A check tries a learner's function on several cases and returns a :class:`Verdict`; print it. An untouched stub raises
NotImplementedError("your turn"), and the verdict is "not tried yet" (:func:`answered`). Any other error is the
learner's own to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import combinations
from numbers import Integral
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor, nn

from memsave_lib.course.env import Setup
from memsave_lib.formulas import BlockShape, block_saved_bytes
from memsave_lib.units import exact_bytes

P = ParamSpec("P")


@dataclass(frozen=True)
class Verdict:
    """What a check found: ``passed`` is None for an untouched stub."""

    passed: bool | None
    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


NOT_TRIED = Verdict(None, "Not tried yet: replace the line that raises NotImplementedError, then run this cell again.")

NOT_FINISHED = Verdict(False, "Not finished: a part of it still raises NotImplementedError.")


def wrong(text: str) -> Verdict:
    return Verdict(False, f"Not yet. {text}")


def right(text: str) -> Verdict:
    return Verdict(True, f"Right. {text}")


def untouched_error(error: NotImplementedError) -> bool:
    """Whether it is a stub's own: PyTorch raises NotImplementedError too, for a module without forward, say."""
    text = str(error)
    return text == "your turn" or text.startswith("find the bugs")


def answered(
    check: Callable[Concatenate[Callable[..., Any], P], Verdict],
) -> Callable[Concatenate[Callable[..., Any], P], Verdict]:
    """Let a check answer to stubs: its first argument is the learner's function or class.

    A stub's own NotImplementedError at the first call makes :data:`NOT_TRIED`, and :data:`NOT_FINISHED` when a call
    has returned before. Making an object of a class is no call; calls of the object and of its methods are. Any other
    error goes through.

        @answered
        def check_double(function: Callable[[int], int]) -> Verdict:
            given = [function(number) for number in (0, 3)]
            return right("Six.") if given == [0, 6] else wrong(f"You get {given}.")
    """

    @wraps(check)
    def checked(function: Callable[..., Any], *arguments: P.args, **named: P.kwargs) -> Verdict:
        calls = _Calls()
        try:
            return check(calls.counting(function) if callable(function) else function, *arguments, **named)
        except NotImplementedError as error:
            if not untouched_error(error):
                raise
            return NOT_FINISHED if calls.returned else NOT_TRIED

    return checked


@dataclass
class _Calls:
    """How many calls of a learner's code have returned."""

    returned: int = 0

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, type):
            return lambda *arguments, **named: _Answer(function(*arguments, **named), self)

        def counted(*arguments: object, **named: object) -> object:
            result = function(*arguments, **named)
            self.returned += 1
            return result

        return counted


@dataclass(frozen=True)
class _Answer:
    """An object of a learner's class: it does what that does, and its calls are counted."""

    _made: Any
    _calls: _Calls = field(repr=False)

    def __call__(self, *arguments: object, **named: object) -> object:
        return self._calls.counting(self._made)(*arguments, **named)

    def __getattr__(self, name: str) -> object:
        value = getattr(self._made, name)
        return self._calls.counting(value) if callable(value) else value


def is_untouched(function: Callable[..., object], *arguments: object) -> bool:
    """Whether the function still is the stub, which raises NotImplementedError."""
    try:
        function(*arguments)
    except NotImplementedError:
        return True
    return False


def shown(value: object) -> str:
    """What a function returned, in a line: short ones with their value."""
    kind = type(value).__name__
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"one with more than thirty digits ({kind})"  # Python writes no longer ones than 4,300 digits
    text = repr(value)
    return f"{text} ({kind})" if len(text) <= 60 and "\n" not in text else f"an object of type {kind}"


def no_count(values: Iterable[object]) -> str | None:
    """What to say to the first of these answers that is no whole number of bytes; None if all are."""
    for value in values:
        if isinstance(value, Integral) and not isinstance(value, bool):
            continue
        said = f"A count of bytes is an int, and your function returned {shown(value)}"
        if value is None:
            return f"{said}: end it with return and the number."
        if isinstance(value, float) and value.is_integer():
            return f"{said}: a float is exact only up to a point. Divide with // if you divide, and write 4, not 4.0."
        if isinstance(value, Tensor) and value.numel() == 1:
            return f"{said}: use int(), which makes a Python number of it."
        return f"{said}."
    return None


# 00: the bytes of a model's parameters


@answered
def check_parameter_bytes(function: Callable[[nn.Module], int], model: nn.Module) -> Verdict:
    """The exercise of notebook 00: ``function(model)`` is the bytes that the parameters of a model take."""
    cases = {"your model": model, **_small_models()}
    given = {name: function(case) for name, case in cases.items()}
    if complaint := no_count(given.values()):
        return wrong(complaint)
    wanted = {name: _parameter_bytes(case) for name, case in cases.items()}
    if given == wanted:
        return right(
            f"The parameters of your model take {exact_bytes(wanted['your model'])}; shared, frozen, half-precision "
            f"and mixed parameters are counted right too."
        )
    for reason, mistake in _PARAMETER_MISTAKES.items():
        if given == {name: mistake(case) for name, case in cases.items()}:
            return wrong(reason)
    name = next(name for name in cases if given[name] != wanted[name])
    return wrong(f"For {name} you get {given[name]:,} bytes; its parameters take {wanted[name]:,} bytes.")


def _small_models() -> dict[str, nn.Module]:
    # A seed that the learner has set means the same after the check: weights of new layers are drawn.
    with torch.random.fork_rng(devices=[]):
        tied = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        tied[1].weight = tied[0].weight
        frozen = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        frozen[0].requires_grad_(False)
        return {
            "one Linear(3, 4)": nn.Linear(3, 4),
            "one Linear(3, 4) in bfloat16": nn.Linear(3, 4, dtype=torch.bfloat16),
            "two layers that share their weight": tied,
            "two layers, the first one frozen": frozen,
            "a batch norm, which has buffers": nn.BatchNorm1d(3),
            "two layers, the second one in float64": nn.Sequential(
                nn.Linear(3, 4), nn.Linear(4, 2, dtype=torch.float64)
            ),
        }


def _parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _all_of_one_type(model: nn.Module, number: int) -> int:
    """Parameter ``number`` says how large the elements of all of them are."""
    parameters = list(model.parameters())
    return parameters[number].element_size() * sum(parameter.numel() for parameter in parameters)


_PARAMETER_MISTAKES: dict[str, Callable[[nn.Module], int]] = {
    "You counted elements, not bytes: each element takes parameter.element_size() bytes.": (
        lambda model: sum(parameter.numel() for parameter in model.parameters())
    ),
    "You took 4 bytes for every element, but bfloat16 has 2: ask parameter.element_size().": (
        lambda model: sum(4 * parameter.numel() for parameter in model.parameters())
    ),
    "You took the type of the first parameter for all: a model may mix types, so ask each for its element_size().": (
        lambda model: _all_of_one_type(model, 0)
    ),
    "You took the type of the last parameter for all: a model may mix types, so ask each for its element_size().": (
        lambda model: _all_of_one_type(model, -1)
    ),
    "You counted buffers too, and a shared weight once for each of its names: state_dict() lists names, "
    "model.parameters() lists each parameter once.": (
        lambda model: sum(tensor.nbytes for tensor in model.state_dict().values())
    ),
    "You counted a shared weight once for each layer that uses it; model.parameters() lists it once.": (
        lambda model: sum(p.nbytes for _, p in model.named_parameters(remove_duplicate=False))
    ),
    "You left out frozen parameters: they need no gradient, but they take their bytes.": (
        lambda model: sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    ),
    "You counted parameters and buffers; the exercise asks for parameters alone.": (
        lambda model: sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    ),
    "You left out the biases: sum over all of model.parameters(), whatever their shape.": (
        lambda model: sum(parameter.nbytes for parameter in model.parameters() if parameter.ndim > 1)
    ),
}


# 01: the saved bytes of a stack of blocks


@dataclass(frozen=True)
class StackCase:
    """Arguments of the exercise of notebook 01."""

    batch: int
    seq_len: int
    hidden: int
    heads: int
    n_layers: int

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items())

    @property
    def saved_bytes(self) -> int:
        shape = BlockShape(self.batch, self.seq_len, self.hidden, self.heads)
        return self.n_layers * block_saved_bytes(shape)


#: No two numbers of a case are equal and all are odd or far apart, so that different mistakes give different results.
_STACK_CASES = (StackCase(3, 40, 96, 4, 2), StackCase(1, 7, 320, 5, 11), StackCase(5, 129, 64, 2, 3))


@answered
def check_saved_bytes(function: Callable[[int, int, int, int, int], int], here: Setup) -> Verdict:
    """The exercise of notebook 01: ``function(batch, seq_len, hidden, heads, n_layers)`` is what a stack of float32
    blocks with fused attention saves."""
    yours = StackCase(here.batch_size, here.seq_len, here.hidden, here.heads, here.n_layers)
    cases = (*_STACK_CASES, yours)
    given = [function(*vars(case).values()) for case in cases]
    if complaint := no_count(given):
        return wrong(complaint)
    wanted = [case.saved_bytes for case in cases]
    if given == wanted:
        return right(f"At your parameters ({yours}) the stack saves {exact_bytes(wanted[-1])}.")
    for reason, changed in _scaled(cases).items():
        if given == changed:
            return wrong(reason)
    gaps = [want - got for want, got in zip(wanted, given, strict=True)]
    always, low, high = (
        {name: [size(case) for case in cases] for name, size in terms.items()}
        for terms in (_STACK_TERMS, _STACK_LOW, _STACK_HIGH)
    )
    if reason := explain_gaps(gaps, always, low, high):
        return wrong(reason)
    number = next(number for number, gap in enumerate(gaps) if gap)
    return wrong(
        f"For {cases[number]} you get {given[number]:,} bytes and PyTorch saves {wanted[number]:,}: "
        f"you are {'low' if gaps[number] > 0 else 'high'} by {abs(gaps[number]):,}."
    )


def _scaled(cases: Sequence[StackCase]) -> dict[str, list[int]]:
    """What some mistakes that concern the whole sum would give."""
    return {
        "You counted elements, not bytes: a float32 has 4 bytes.": [case.saved_bytes // 4 for case in cases],
        "This is one block; the stack has n_layers of them.": [case.saved_bytes // case.n_layers for case in cases],
        "This is one sequence; the batch has several.": [case.saved_bytes // case.batch for case in cases],
        "You counted 2 bytes an element; a float32 has 4.": [case.saved_bytes // 2 for case in cases],
    }


#: Bytes that a learner may miss or count twice, over the whole stack.
_STACK_TERMS: Mapping[str, Callable[[StackCase], int]] = {
    "4asb: the log-sum-exp of each block": lambda c: 4 * c.heads * c.seq_len * c.batch * c.n_layers,
    "16sb: the statistics of both LayerNorms in each block": lambda c: 16 * c.seq_len * c.batch * c.n_layers,
    "8sb: two of the four statistics in each block, a mean and a deviation for each LayerNorm": (
        lambda c: 8 * c.seq_len * c.batch * c.n_layers
    ),
    "4sbh: one hidden state in each block": lambda c: 4 * c.seq_len * c.batch * c.hidden * c.n_layers,
    "8sbh: two hidden states in each block": lambda c: 8 * c.seq_len * c.batch * c.hidden * c.n_layers,
    "12sbh: three hidden states in each block, as many as queries, keys and values": (
        lambda c: 12 * c.seq_len * c.batch * c.hidden * c.n_layers
    ),
    "16sbh: four hidden states in each block, as many as one of the two wide feed-forward tensors": (
        lambda c: 16 * c.seq_len * c.batch * c.hidden * c.n_layers
    ),
}

#: What can only be missing, and what can only be too much.
_STACK_LOW: Mapping[str, Callable[[StackCase], int]] = {
    "4sbh, once: the input of the first block, which is saved too": lambda c: 4 * c.seq_len * c.batch * c.hidden,
    "4(a-1)sb in each block: the log-sum-exp is one number a row for each head, not one for all heads": (
        lambda c: 4 * (c.heads - 1) * c.seq_len * c.batch * c.n_layers
    ),
}
_STACK_HIGH: Mapping[str, Callable[[StackCase], int]] = {
    "4sbh, once: the output of the last block, which nothing needs in backward": (
        lambda c: 4 * c.seq_len * c.batch * c.hidden
    ),
    "4as²b: one matrix of attention scores in each block, which fused attention never keeps": (
        lambda c: 4 * c.heads * c.seq_len**2 * c.batch * c.n_layers
    ),
}


def explain_gaps(
    gaps: Sequence[int],
    terms: Mapping[str, Sequence[int]],
    low: Mapping[str, Sequence[int]] = MappingProxyType({}),
    high: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> str | None:
    """What is missing or too much, if one term or two explain the gap of every case; None otherwise.

    Args:
        gaps: wanted minus given, one number a case.
        terms: a name, and its bytes in each case.
        low: such terms that can only be missing.
        high: such terms that can only be too much.
    """
    signed = {
        (word, name): [sign * size for size in sizes]
        for word, sign, of_its_own in (("low", 1, low), ("high", -1, high))
        for name, sizes in {**terms, **of_its_own}.items()
    }
    for count in (1, 2):
        for chosen in combinations(signed, count):
            if [sum(sizes) for sizes in zip(*(signed[key] for key in chosen), strict=True)] == list(gaps):
                return "You are " + "; and ".join(f"{word} by exactly {name}" for word, name in chosen) + "."
    return None
