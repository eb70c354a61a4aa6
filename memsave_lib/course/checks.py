"""Checks of the exercises: each says what is right, or what exactly is wrong and why that happens.

A check tries a learner's function on several cases and returns a :class:`Verdict`; print it. An untouched stub raises
NotImplementedError("your turn"), and the verdict is "not tried yet" (:func:`answered`). Any other error is the
learner's own to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from memsave_lib.course.env import Setup
from memsave_lib.course.verdicts import (
    NOT_FINISHED,
    NOT_TRIED,
    Verdict,
    all_equal,
    answered,
    explain_gaps,
    first_gap,
    no_count,
    right,
    shown,
    untouched_error,
    wrong,
)
from memsave_lib.formulas import BlockShape, block_saved_bytes
from memsave_lib.units import exact_bytes

__all__ = [
    "NOT_FINISHED",
    "NOT_TRIED",
    "Verdict",
    "all_equal",
    "answered",
    "explain_gaps",
    "first_gap",
    "no_count",
    "right",
    "shown",
    "untouched_error",
    "wrong",
    "check_parameter_bytes",
    "check_saved_bytes",
]

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
    return wrong(first_gap(cases, given, wanted, "PyTorch saves {:,}"))


def _scaled(cases: Sequence[StackCase]) -> dict[str, list[int]]:
    """What some mistakes that concern the whole sum would give."""
    return {
        "You counted elements, not bytes: a float32 has 4 bytes.": [case.saved_bytes // 4 for case in cases],
        "This is one block; the stack has n_layers of them.": [case.saved_bytes // case.n_layers for case in cases],
        "This is one sequence; the batch has several.": [case.saved_bytes // case.batch for case in cases],
        "You counted 2 bytes an element; a float32 has 4.": [case.saved_bytes // 2 for case in cases],
        "Those are the elements of sixteen hidden states a block: a float32 has 4 bytes. And two small terms are "
        "missing, the statistics of LayerNorms and of attention.": [
            16 * case.seq_len * case.batch * case.hidden * case.n_layers for case in cases
        ],
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
