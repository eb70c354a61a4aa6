"""Fake tensors: shapes without bytes, with the few values that a language model asks for."""

from __future__ import annotations

import copy
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor

from memsave_lib._compat.autograd import called_from


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape but no bytes; the class has no public home."""
    return isinstance(tensor, fake_tensor.FakeTensor)


#: What a fake tensor raises when a model wants to know its values. The classes have no public home.
FAKE_TENSORS_HAVE_NO_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)


#: The same for what torch tells by words alone: a part of its message, and what it means.
FAKE_TENSORS_REFUSE = {
    ".numpy() is not supported": "values",
    "Couldn't swap": "conversion",
    "not linked with support for": "device",
    "Torch not compiled with": "device",
}


_ATEN = torch.ops.aten


_IS_TRUE = _ATEN._local_scalar_dense.default


# Not in the oldest versions.
_GROUPED_PRODUCT = getattr(getattr(_ATEN, "_grouped_mm", None), "default", None)


_ONES = (_ATEN.ones.default, _ATEN.ones_like.default, _ATEN.new_ones.default)


_FILLED = (_ATEN.full.default, _ATEN.full_like.default, _ATEN.new_full.default)


_ARANGE = (_ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step)


_SAME_ELEMENTS = (
    _ATEN._to_copy.default,
    _ATEN.alias.default,
    _ATEN.clone.default,
    _ATEN.detach.default,
    _ATEN.expand.default,
    _ATEN.repeat.default,
    _ATEN.squeeze.dim,
    _ATEN.unsqueeze.default,
    _ATEN.view.default,
)


_SOME_ELEMENTS = (_ATEN.select.int, _ATEN.slice.Tensor)


class _FakeMode(fake_tensor.FakeTensorMode):
    """Fake tensors of which a few values are known: where positions run from 0 on, and where all elements are one.

    So much of a tensor's values a language model asks for, and whoever makes it knows.
    """

    def dispatch(
        self, func: torch._ops.OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _IS_TRUE and args[0].dtype is torch.bool and called_from(nn.init.__file__):
            return False  # truncated initializations draw again as long as values are out of bounds
        if func is _GROUPED_PRODUCT:
            return _grouped_product(*args, **(kwargs or {}))
        _check_rows(func, args)
        _check_mask_of_ones(func, args)
        output = super().dispatch(func, types, args, kwargs)
        known = _values_after(func, args, kwargs)
        if known is not None:
            _know(output, known)
        return output


def _know(tensor: Tensor, values: tuple[float, float]) -> None:
    """Remember of a fake tensor its smallest and its largest element, as long as nobody writes to it."""
    tensor._known_values = (tensor._version, values)


def _known(tensor: object) -> tuple[float, float] | None:
    version, values = getattr(tensor, "_known_values", (None, None))
    return values if values is not None and version == tensor._version else None


def holds_ones(tensor: Tensor) -> bool:
    """Whether a fake tensor is known to hold ones only."""
    return _known(tensor) == (1, 1)


def _values_after(
    func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any] | None
) -> tuple[float, float] | None:
    """Smallest and largest element of what an operation makes, where that is certain."""
    if func in _ONES:
        return 1, 1
    if func in _FILLED:
        return (args[1], args[1]) if isinstance(args[1], int | float) else None
    if func in _ARANGE:
        numbers = range(*args) if args and all(isinstance(bound, int) for bound in args) else ()
        return (min(numbers), max(numbers)) if numbers else None
    known = _known(args[0]) if args else None
    if known is None:
        return None
    if func in _SAME_ELEMENTS or (func in _SOME_ELEMENTS and known[0] == known[1]):
        return known
    if func is _ATEN.cumsum.default and known == (1, 1):
        return 1, args[0].shape[args[1]]
    if func is _ATEN.mul.Tensor and _known(args[1]) == (1, 1):
        return known
    if func in (_ATEN.add.Tensor, _ATEN.sub.Tensor) and isinstance(args[1], int) and not kwargs:
        shift = args[1] if func is _ATEN.add.Tensor else -args[1]
        return known[0] + shift, known[1] + shift
    return None


def _check_rows(func: torch._ops.OpOverload, args: tuple) -> None:
    """What a real table refuses: to be asked for a row that it does not have."""
    asked: list[tuple[int, object]] = []
    if func is _ATEN.embedding.default:
        asked = [(args[0].shape[0], args[1])]
    elif func in (_ATEN.gather.default, _ATEN.index_select.default):
        asked = [(args[0].shape[args[1]], args[2])]
    elif func is _ATEN.index.Tensor:
        asked = list(zip(args[0].shape, args[1], strict=False))
    for rows, indices in asked:
        known = _known(indices)
        if known is not None and known[1] >= rows:
            raise ValueError(
                f"a table of {rows} rows is asked for row {known[1]:.0f}: is seq_len longer than the positions of this "
                "model? Build it with more, such as n_positions= or max_position_embeddings="
            )


def _check_mask_of_ones(func: torch._ops.OpOverload, args: tuple) -> None:
    """Refuse what a real run would not do: build a mask for attention in both directions where nothing is hidden.

    Attention that is written out ("eager") looks whether it needs one. Fake tensors take it to the building, and there
    is no telling it better, as there is with :func:`decide_masks_without_values`; but it can be seen on its way.
    """
    if func is not _ATEN.index.Tensor or args[0].dtype is not torch.bool or not holds_ones(args[0]):
        return
    callers = _names_of_callers()
    if "eager_mask" in callers and any("bidirectional" in name for name in callers):
        raise ValueError(
            "attention that is written out drops an attention mask that hides nothing, but only where it can see its "
            'values: leave the mask out of the inputs, or build the model with attn_implementation="sdpa"'
        )


def _names_of_callers() -> set[str]:
    frame, names = sys._getframe(1), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def _grouped_product(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The result of a product in groups of rows, as experts make them.

    Torch's own answer on fake tensors is for bfloat16 alone; on a CPU the operation takes every type.
    """
    for matrix in (left, right):
        if any(stride != 1 and stride * matrix.itemsize % 16 for stride in matrix.stride()[-2:]):
            raise RuntimeError(f"strides should be multiple of 16 bytes, got {matrix.stride()} of {matrix.dtype}")
    groups = left.shape[:-2] or right.shape[:-2] or (len(offs),)
    rows, columns = left.shape[-2], right.shape[-1]
    out_dtype = out_dtype or left.dtype
    padded = -(-columns * out_dtype.itemsize // 16) * 16 // out_dtype.itemsize  # every row begins at 16 bytes
    if left.dim() == right.dim():
        shape, strides = (*groups, rows, columns), (rows * padded, padded, 1)
    else:
        shape, strides = (rows, columns), (padded, 1)
    return left.new_empty_strided(shape, strides, dtype=out_dtype)


def fake_mode() -> AbstractContextManager[None]:
    """A context in which every tensor that is made has a shape but no bytes.

    Private, but what torch.export and torch.compile themselves trace with; there is no public one. A real tensor that a
    model holds outside of parameters and buffers is taken in as a fake one.
    """
    return _FakeMode(allow_non_fake_inputs=True)


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Torch logs an error with its stack before it raises it, for its compiler's sake; here whoever calls is told."""
    here = threading.get_ident()

    def from_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != here

    fake_tensor.log.addFilter(from_elsewhere)
    try:
        yield
    finally:
        fake_tensor.log.removeFilter(from_elsewhere)


def fake_copy(model: nn.Module, mode: Any) -> nn.Module:
    """A copy of a model with fake parameters and buffers: shared ones stay shared, nothing is allocated."""
    memo = {
        id(tensor): mode.from_tensor(tensor, static_shapes=True) for tensor in (*model.parameters(), *model.buffers())
    }
    copied = copy.deepcopy(model, memo)
    for parameter in copied.parameters():
        parameter.grad = None
    return copied


def as_fake(tensor: Tensor, mode: Any) -> Tensor:
    if is_fake(tensor):
        return tensor
    made = mode.from_tensor(tensor, static_shapes=True)
    if not tensor.is_floating_point() and not tensor.is_complex() and bool((tensor == 1).all()):
        _know(made, (1, 1))
    return made
