"""Models without memory: the same operations on *fake* tensors, which have a shape and no bytes.

A fake run of a training step goes through the very code of the model, of autograd and of the strategy, so a meter sees
every storage appear and vanish as in a real run, and nothing is computed or allocated. What it cannot know are values:
a model that decides by them (an ``if`` on a tensor, a selection by a mask) is refused.

Fake tensors are of the CPU unless a real model on another device is copied. Kernels of a GPU save a little otherwise
(dropout masks of one byte, statistics in float32, a log-sum-exp padded to 32 positions), which
:mod:`memsave_lib.formulas` can say.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memsave_lib import _compat
from memsave_lib.arguments import whole_number

#: From a batch size and a sequence length to what the model is called with: a tensor, a tuple, or a dict of names.
Inputs = Callable[[int, int], Any]
#: From the model's output and its inputs to the loss.
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class FakeModel:
    """A model on fake tensors, and one training step of it.

    Args:
        model: with fake parameters and buffers.
        mode: the context that it must run in; ``with fake.running():`` enters it and explains what goes wrong.
        inputs: what it is called with.
        loss: of its output.
    """

    model: nn.Module
    mode: Any
    inputs: Any
    loss: Loss

    def step(self) -> Tensor:
        """Forward and backward; the loss."""
        output = call(self.model, self.inputs)
        loss = check_loss(self.loss(output, self.inputs))
        del output
        loss.backward()
        return loss

    @contextmanager
    def running(self) -> Iterator[None]:
        with _training(self.mode), explained(type(self.model).__name__):
            yield


def build(
    build_model: Callable[[], nn.Module],
    batch: int,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
    inputs: Inputs | None = None,
    loss: Loss | None = None,
) -> FakeModel:
    """Build a model on fake tensors, with inputs of a shape; arguments as for :func:`memsave_lib.estimate`."""
    whole_number("batch", batch)
    whole_number("seq_len", seq_len)
    _check_functions(inputs=inputs, loss=loss)
    mode = _compat.fake_mode()
    with _training(mode), explained("build_model"):
        model = _prepared(_built(build_model, dtype))
        if inputs is None:
            _check_positions(model, seq_len)
            made = language_model_inputs(model, batch, seq_len)
        else:
            made = inputs(batch, seq_len)
    return FakeModel(model, mode, _fake_inputs(model, made, mode), loss or loss_in_output)


def copy_of(model: nn.Module, batch: Any, loss: Loss | None = None) -> FakeModel:
    """A fake copy of a real model and of what it is called with; the model itself is left alone."""
    _check_functions(loss=loss)
    if batch is None or isinstance(batch, list):
        raise TypeError(
            "batch is what the model is called with: a dict of keyword arguments, a tuple of positional ones, or one "
            f"tensor, got {_describe(batch)}"
        )
    mode = _compat.fake_mode()
    copied = _prepared(_compat.fake_copy(model, mode))
    return FakeModel(copied, mode, _fake_inputs(copied, batch, mode), loss or loss_in_output)


def call(model: nn.Module, inputs: Any) -> Any:
    """A dict gives keyword arguments, a tuple positional ones, anything else is the only one."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def loss_in_output(output: Any, inputs: Any) -> Tensor:
    """The loss that a Hugging Face model returns when it is given labels; a model may also return nothing else.

    Raises:
        ValueError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"the model returned no loss but {_describe(output)}: hand in labels with the inputs, or "
            "loss=lambda output, inputs: ... that gives one number"
        )
    return loss


def check_loss(loss: Any) -> Tensor:
    """A loss that backward can start from.

    Raises:
        ValueError: it is no tensor of one number, or does not depend on any parameter that is trained.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(f"loss(output, inputs) must return a tensor with one number, it returned {_describe(loss)}")
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on nothing that requires a gradient, so there is no backward: is all of the model "
            "frozen, or the loss detached?"
        )
    return loss


def language_model_inputs(model: nn.Module, batch: int, seq_len: int) -> dict[str, Tensor]:
    """Tokens and labels for a Hugging Face language model.

    Raises:
        ValueError: this model takes something else.
    """
    names = inspect.signature(model.forward).parameters
    missing = [name for name in ("input_ids", "labels") if name not in names]
    if missing or getattr(model, "main_input_name", "input_ids") != "input_ids":
        wanted = getattr(model, "main_input_name", None) or ", ".join(list(names)[:3])
        raise ValueError(
            f"{type(model).__name__} is no language model with labels (its forward takes {wanted}; not found: "
            f"{', '.join(missing) or 'tokens as main input'}): say what it is called with, "
            "inputs=lambda batch, seq_len: ..., and its loss, loss=lambda output, inputs: ..."
        )
    tokens = torch.zeros(batch, seq_len, dtype=torch.long)
    labels = tokens.new_zeros(batch) if _compat.labels_per_sequence(model) else torch.zeros_like(tokens)
    return {"input_ids": tokens, "labels": labels}


def switch_cache_off(model: nn.Module) -> None:
    """A key-value cache has no place in training; whoever trains switches it off, or a strategy does."""
    for config in _compat.configs_with_cache(model):
        config.use_cache = False


@contextmanager
def explained(who: str) -> Iterator[None]:
    """Say in a sentence why fake tensors do not do for ``who``.

    Raises:
        ValueError: in place of what torch raises.
    """
    try:
        yield
    except _compat.FAKE_TENSORS_HAVE_NO_VALUES as error:
        raise ValueError(_refusal(who, "values", error)) from error
    except (RuntimeError, AssertionError) as error:
        kind = next((kind for words, kind in _compat.FAKE_TENSORS_REFUSE.items() if words in str(error)), None)
        if kind is None:
            raise
        raise ValueError(_refusal(who, kind, error)) from error


_REFUSALS = {
    "values": (
        "looks at the values of a tensor, which fake tensors do not have: what it does next, and so its memory, may "
        "depend on the data. Measure a real step with MemoryMeter instead"
    ),
    "conversion": (
        "converts parameters that are there already (.to(), .half(), .double() or the like), which fake ones cannot "
        "be: leave it out; the argument dtype= says of which type they are made"
    ),
    "device": (
        "asks for a device that this torch does not know: leave the model on the CPU, which fake tensors stand for"
    ),
}


def _refusal(who: str, kind: str, error: BaseException) -> str:
    """Where in somebody's code it happened helps more than the operation, which has a name of torch's own."""
    own = Path(__file__).parent, Path(torch.__file__).parent, Path(_compat.__file__).parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent not in own]
    frames = [frame for frame in frames if own[1] not in Path(frame.filename).parents]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{who} {_REFUSALS[kind]}{where}"


@contextmanager
def _training(mode: Any) -> Iterator[None]:
    """Fake tensors, and gradients even where the caller has switched them off: a step trains."""
    with torch.inference_mode(False), torch.enable_grad(), _compat.quiet_fake_tensors(), mode:
        yield


def _check_functions(**functions: object) -> None:
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, got {_describe(function)}")


def _prepared(model: nn.Module) -> nn.Module:
    _compat.give_own_configs(model)
    _compat.decide_masks_without_values(model)
    switch_cache_off(model)
    return model


def _built(build_model: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    if isinstance(build_model, nn.Module):
        name = type(build_model).__name__
        raise TypeError(
            f"build_model is a function that builds a model, got a model, {name}: hand in lambda: {name}(...), so that "
            "it can be built of fake tensors"
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = _compat.model_from_config(build_model) if not callable(build_model) else build_model()
    finally:
        torch.set_default_dtype(before)
    if not isinstance(model, nn.Module):
        raise TypeError(f"build_model must return a model, an nn.Module; it returned {_describe(model)}")
    _check_parameters(model)
    if any(map(_compat.is_compiled, model.modules())):
        raise ValueError(f"{type(model).__name__} is compiled: hand in a function that does not compile it")
    return model.train()


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not _compat.is_fake(parameter):
            raise ValueError(
                f"build_model must build a new model whenever it is called, but {name} of what it returned is a real "
                "tensor: it was there before, or is made from a NumPy array"
            )
        if parameter.device.type != "cpu":
            raise ValueError(
                f"build_model must leave the model on the CPU, which fake tensors stand for; {name} is on "
                f"{parameter.device}"
            )


def _check_positions(model: nn.Module, seq_len: int) -> None:
    """A table of positions that is too short fails a real run; fake positions have no values to be out of it."""
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(longest, int):
        return
    tokens = model.get_input_embeddings()
    for name, table in model.named_modules():
        # Some tables have two rows more than positions; others give the rows up to that of padding to no position.
        if isinstance(table, nn.Embedding) and table is not tokens and 0 <= table.num_embeddings - longest <= 2:
            padding = table.padding_idx
            rows = longest if padding is None else table.num_embeddings - padding - 1
            if seq_len > rows:
                raise ValueError(
                    f"seq_len={seq_len} is longer than the {rows} positions of {name}: build the model with more, "
                    f"such as n_positions={seq_len} or max_position_embeddings={seq_len}"
                )


def _fake_inputs(model: nn.Module, inputs: Any, mode: Any) -> Any:
    leaves, shape = _compat.tree_flatten(inputs)
    made = _compat.tree_unflatten(
        [_compat.as_fake(leaf, mode) if isinstance(leaf, Tensor) else leaf for leaf in leaves], shape
    )
    mask = made.get("attention_mask") if isinstance(made, Mapping) else None
    if isinstance(mask, Tensor) and _compat.holds_ones(mask) and _compat.drops_mask_of_ones(model):
        raise ValueError(
            f"{type(model).__name__} drops an attention_mask that hides nothing, but only where it can see its values: "
            "leave the mask out of the inputs"
        )
    return made


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__}"
