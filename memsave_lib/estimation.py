"""What a training step needs that does not fit, or that nobody wants to run: a fake step under the meter.

``estimate`` builds the model on fake tensors (:mod:`memsave_lib.fake`), applies the strategy and trains one step. The
meter that measures real steps listens. So the figures are those of a real step on a CPU, to the byte, and a model of
any size takes seconds and hardly any memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from memsave_lib import _compat, fake
from memsave_lib.formulas.blocks import ELEMENT_BYTES
from memsave_lib.meter import MemoryMeter
from memsave_lib.placement import check_strategy
from memsave_lib.runner import Report, apply
from memsave_lib.strategies import KeepAll, Strategy
from memsave_lib.trace import Place, Trace
from memsave_lib.units import exact_bytes

OPTIMIZERS = {"adamw": AdamW, "adam": Adam, "sgd": SGD}


@dataclass(frozen=True)
class Estimate:
    """What one training step would need, and where."""

    strategy: Strategy
    trace: Trace  # every storage of the step, as from a MemoryMeter
    report: Report | None  # what the strategy did; None for KeepAll

    @property
    def peak_bytes(self) -> int:
        """The largest number of live bytes: parameters, gradients, optimizer state, activations and all else."""
        return self.trace.peak_bytes

    @property
    def peak_at(self) -> Place:
        return self.trace.peak_at

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each category at the peak."""
        return self.trace.at_peak

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd holds at the end of forward."""
        return self.trace.saved_bytes

    @property
    def host_peak_bytes(self) -> int:
        """The most that lies on the host at once, of what the strategy sends there."""
        return self.trace.host_peak_bytes

    @property
    def disk_peak_bytes(self) -> int:
        """The most that lies on disk at once."""
        return self.trace.disk_peak_bytes

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {exact_bytes(size)}" for name, size in self.at_peak.items() if size)
        return (
            f"{self.strategy.label}: peak {exact_bytes(self.peak_bytes)} in {self.peak_at} ({parts}); "
            f"saved at the end of forward {exact_bytes(self.saved_bytes)}"
        )


def estimate(
    build_model: Callable[[], nn.Module],
    batch: int,
    seq_len: int,
    strategy: Strategy = KeepAll(),  # noqa: B008 - frozen
    dtype: torch.dtype | str = torch.float32,
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] | None = "adamw",
    inputs: fake.Inputs | None = None,
    loss: fake.Loss | None = None,
    blocks: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
) -> Estimate:
    """The memory of one training step, without allocating any of it.

    The step is one from the middle of training: the optimizer has its state, gradients start from None, pile up in
    backward and are there when the optimizer steps. The model is in training mode, with its dropout, and the output is
    dropped before backward. Operations, and so temporaries, are those of a CPU.

    Works for any model that does not look at values. Not for one that calls ``.item()`` or selects by a mask
    (``x[mask]``, ``nonzero``), as Longformer does, and mixtures of experts that loop over their experts; not for one
    that converts parameters or calls for another device (``.to()``, ``.half()``, ``.cuda()``). Falcon works with
    ``KeepAll()`` only, and models with sparse attention of their own with ``attn_implementation="eager"`` only.
    Positions are taken to run from 0 on: packed sequences take more. A padding mask counts as hiding something, unless
    it is made by ``torch.ones``.

        estimate(lambda: ms.llama("llama-2-7b"), batch=1, seq_len=131_072, dtype=torch.bfloat16, optimizer=None)

    Args:
        build_model: builds the model, such as ``lambda: ms.gpt2("small")``, or a configuration of Hugging Face, of
            which the causal language model is built. It runs on fake tensors, so that no weight is ever made.
        batch, seq_len: of the inputs, positive whole numbers.
        strategy: any, offloading included; nothing is written anywhere.
        dtype: of parameters and activations: the default type while the model is built (``.to(dtype)`` inside
            ``build_model`` does not work on fake tensors).
        optimizer: ``"adamw"``, ``"adam"``, ``"sgd"``, a function from parameters to an optimizer, or None: backward is
            the end of the step.
        inputs: ``inputs(batch, seq_len)`` is what the model is called with: a tensor, a tuple, or a dict of keyword
            arguments. Default: tokens and labels, for Hugging Face's language models (causal, masked and from sequence
            to sequence: a label a token) and classifiers (a label a sequence).
        loss: ``loss(output, inputs)``, one number. Default: the loss that the output carries.
        blocks: ``blocks(model)`` are the blocks that the strategy is for. Default: :func:`memsave_lib.find_blocks`.

    Raises:
        TypeError: an argument is of the wrong kind; ``build_model`` is a model, or returns none.
        ValueError: the model looks at values, which fake tensors do not have; it takes other inputs than tokens and
            none were given; its table of positions is too short; nothing in it is trained; or the strategy does not
            fit it.
    """
    check_strategy(strategy)
    if blocks is not None and not callable(blocks):
        raise TypeError(f"blocks must be a function from the model to a list of its blocks, got {blocks!r}")
    _optimizer_maker(optimizer)  # a wrong one is refused before anything is built
    made = fake.build(build_model, batch, seq_len, _dtype(dtype), inputs, loss)
    with made.running():
        return run(made, strategy, optimizer_with_state(optimizer, made.model), blocks)


def run(
    made: fake.FakeModel,
    strategy: Strategy,
    optimizer: Optimizer | None,
    blocks: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
) -> Estimate:
    """One fake step, metered; to be called inside ``made.running()``."""
    found = blocks and blocks(made.model)
    if strategy == KeepAll() and found is None:  # needs no blocks, so a model whose blocks nobody finds will do
        return Estimate(strategy, _trace(made, optimizer), None)
    if _compat.masks_are_uncertain(made.model):
        raise ValueError(
            f"{type(made.model).__name__} makes its attention masks by the values of positions, which fake tensors do "
            f"not have, so they can be counted for KeepAll() only, not for {strategy}: measure a real step with "
            "MemoryMeter instead"
        )
    with apply(made.model, strategy, blocks=found) as applied:
        trace = _trace(made, optimizer)
        return Estimate(strategy, trace, applied.report)


def _trace(made: fake.FakeModel, optimizer: Optimizer | None) -> Trace:
    with MemoryMeter(made.model, optimizer) as meter:
        made.step()
        if optimizer is not None:
            _step(optimizer)
    made.model.zero_grad(set_to_none=True)
    return meter.trace


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, torch.dtype | str) or name not in ELEMENT_BYTES:
        raise ValueError(f"dtype is one of {', '.join(ELEMENT_BYTES)}, as torch.float32 or by name, got {dtype!r}")
    return getattr(torch, name)


def _optimizer_maker(
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] | None,
) -> Callable[[Iterable[nn.Parameter]], Optimizer] | None:
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, Optimizer)):
        return optimizer
    got = f"an optimizer, {type(optimizer).__name__}" if isinstance(optimizer, Optimizer) else repr(optimizer)
    raise ValueError(
        f"optimizer is one of {', '.join(map(repr, OPTIMIZERS))}, a function from parameters to an optimizer such as "
        f"torch.optim.AdamW, or None, got {got}"
    )


def optimizer_with_state(
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] | Optimizer | None,
    model: nn.Module,
    original: nn.Module | None = None,
) -> Optimizer | None:
    """An optimizer of a fake model as in the middle of training.

    Args:
        optimizer: one that exists already says its kind, its groups and their settings; its parameters are those of
            ``original``, of which ``model`` is the copy.
    """
    if isinstance(optimizer, Optimizer):
        make = partial(_of_the_same_kind, optimizer, model, original or model)
    else:
        make = _optimizer_maker(optimizer)
    return None if make is None else _with_state(make, model)


def _of_the_same_kind(
    optimizer: Optimizer, model: nn.Module, original: nn.Module, trained: Iterable[nn.Parameter]
) -> Optimizer:
    names = {id(parameter): name for name, parameter in original.named_parameters()}
    # Some classes note more among their settings than they take.
    taken = inspect.signature(type(optimizer)).parameters
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        foreign = sum(id(parameter) not in names for parameter in group["params"])
        if foreign:
            raise ValueError(
                f"{foreign} parameters of the optimizer's group {number} are not {type(original).__name__}'s: make it "
                "of the parameters of this very model"
            )
        copies = [model.get_parameter(names[id(parameter)]) for parameter in group["params"]]
        groups.append({**{name: group[name] for name in group if name in taken}, "params": copies})
    return type(optimizer)(groups, **{name: value for name, value in optimizer.defaults.items() if name in taken})


def _with_state(make: Callable[[Iterable[nn.Parameter]], Optimizer], model: nn.Module) -> Optimizer:
    """An optimizer that has stepped before, as in the middle of training."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(
            f"no parameter of {type(model).__name__} requires a gradient, so there is nothing to train: is all of it "
            "frozen?"
        )
    made = make(trained)
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer must return an optimizer for the parameters it is given, it returned {made!r}")
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    _step(made)
    model.zero_grad(set_to_none=True)
    return made


def _step(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{name} runs forward as often as it likes (it wants a closure): a step of it has no one size")
    with fake.explained(name):
        optimizer.step()
