"""Models without memory: the same operations on *fake* tensors, which have a shape and no bytes.

A fake run of a training step goes through the very code of the model, of autograd and of the strategy, so a meter sees
every storage appear and vanish as in a real run, and nothing is computed or allocated. What it cannot know are values:
a model that decides by them (which expert a token goes to) is refused.

Fake tensors are of the CPU unless a real model on another device is copied. Kernels of a GPU save a little otherwise
(dropout masks of one byte, statistics in float32, a log-sum-exp padded to 32 positions), which
:mod:`memsave_lib.formulas` can say.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
        loss = self.loss(output, self.inputs)
        del output
        loss.backward()
        return loss

    @contextmanager
    def running(self) -> Iterator[None]:
        with self.mode, _explained(self.model):
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
    mode = _compat.fake_mode()
    with mode:
        model = _built(build_model, dtype)
        _compat.decide_masks_without_values(model)
        switch_cache_off(model)
        if inputs is None:
            _check_positions(model, seq_len)
            made = language_model_inputs(model, batch, seq_len)
        else:
            made = inputs(batch, seq_len)
    return FakeModel(model, mode, _all_fake(made, mode), loss or loss_in_output)


def copy_of(model: nn.Module, batch: Any, loss: Loss | None = None) -> FakeModel:
    """A fake copy of a real model and of what it is called with; the model itself is left alone."""
    mode = _compat.fake_mode()
    copied = _compat.fake_copy(model, mode)
    _compat.decide_masks_without_values(copied)
    switch_cache_off(copied)
    return FakeModel(copied, mode, _all_fake(_without_full_mask(batch), mode), loss or loss_in_output)


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
    return {"input_ids": tokens, "labels": torch.zeros_like(tokens)}


def switch_cache_off(model: nn.Module) -> None:
    """A key-value cache has no place in training; whoever trains switches it off, or a strategy does."""
    for config in _compat.configs_with_cache(model):
        config.use_cache = False


def _built(build_model: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = _compat.model_from_config(build_model) if not callable(build_model) else build_model()
    finally:
        torch.set_default_dtype(before)
    if not isinstance(model, nn.Module):
        raise TypeError(f"build_model must return a model, an nn.Module; it returned {_describe(model)}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not _compat.is_fake(tensor):
            raise ValueError(
                f"build_model must build a new model when it is called; {name} of what it returned was there before"
            )
        if tensor.device.type != "cpu":
            raise ValueError(
                f"build_model must leave the model on the CPU, which fake tensors stand for; {name} is on "
                f"{tensor.device}"
            )
    return model.train()


def _check_positions(model: nn.Module, seq_len: int) -> None:
    """A table of positions that is too short fails a real run; fake positions have no values to be out of it."""
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(longest, int):
        return
    tokens = model.get_input_embeddings()
    for name, table in model.named_modules():
        # Some tables have a few rows more than positions, for padding.
        if isinstance(table, nn.Embedding) and table is not tokens and 0 <= table.num_embeddings - longest <= 2:
            rows = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
            if seq_len > rows:
                raise ValueError(
                    f"seq_len={seq_len} is longer than the {rows} positions of {name}: build the model with more, "
                    f"such as n_positions={seq_len} or max_position_embeddings={seq_len}"
                )


def _all_fake(inputs: Any, mode: Any) -> Any:
    leaves, shape = _compat.tree_flatten(inputs)
    return _compat.tree_unflatten(
        [_compat.as_fake(leaf, mode) if isinstance(leaf, Tensor) else leaf for leaf in leaves], shape
    )


def _without_full_mask(batch: Any) -> Any:
    """A mask that hides nothing has no effect on a real run, which looks at it and makes none of its own."""
    if isinstance(batch, Mapping) and isinstance(batch.get("attention_mask"), Tensor) and batch["attention_mask"].all():
        return {name: value for name, value in batch.items() if name != "attention_mask"}
    return batch


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except _compat.FAKE_TENSORS_HAVE_NO_VALUES as error:
        raise ValueError(
            f"{type(model).__name__} decides by the values of a tensor ({error}), and fake tensors have none: its "
            "memory depends on the data. Measure a real step with MemoryMeter instead"
        ) from error


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__}"
