"""Models after a backward, for an exercise of notebook 04: which of their parameters got no gradient but zeros?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def silent_cases() -> dict[str, tuple[nn.Module, list[str]]]:
    """What is the matter -> a model after backward, and the names to be found."""
    two = _filled(_ones, zero="0.weight", none="1.bias")
    return {
        "A plain step, in which every parameter gets its gradient": (_filled(_ones), []),
        "A step that left zeros in the first layer": (_filled(_ones, zero="0.weight"), ["0.weight"]),
        "A step that never reached the first layer, so that its .grad is None": (
            _filled(_ones, none="0.weight"),
            ["0.weight"],
        ),
        "A norm whose bias got zeros, while its weight learns": (_filled(_ones, zero="1.bias"), ["1.bias"]),
        "Zeros in one parameter, and no gradient in another": (two, ["0.weight", "1.bias"]),
        "A gradient with +1 and -1, whose sum is 0": (_filled(_canceling), []),
        "A gradient of 1e-30, which is small but not 0": (
            _filled(lambda gradient: torch.full_like(gradient, 1e-30)),
            [],
        ),
        "A first layer that is frozen": (_filled(_ones, frozen="0.weight"), []),
        "A frozen first layer that still holds zeros in .grad": (
            _filled(_ones, zero="0.weight", frozen="0.weight"),
            [],
        ),
        "A gradient with one single number that is not 0": (_filled(_single), []),
        "A gradient of -1 with one 0 in it": (_filled(_below_zero), []),
    }


def _filled(
    fill: Callable[[Tensor], Tensor], *, zero: str | None = None, none: str | None = None, frozen: str | None = None
) -> nn.Module:
    """A model with these gradients. All are float32: 1e-30 is zero in half precision."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 2)).float()
    for name, parameter in model.named_parameters():
        parameter.grad = fill(torch.ones_like(parameter))
        if name == frozen:
            parameter.requires_grad_(False)
            parameter.grad = None
        if name == zero:
            parameter.grad = torch.zeros_like(parameter)
        elif name == none:
            parameter.grad = None
    return model


def _ones(gradient: Tensor) -> Tensor:
    return gradient


def _canceling(gradient: Tensor) -> Tensor:
    """In each row, and in a bias, as many +1 as -1."""
    signs = torch.ones_like(gradient)
    signs[..., 1::2] = -1.0
    return signs


def _below_zero(gradient: Tensor) -> Tensor:
    below = -gradient
    below[(0,) * below.ndim] = 0.0
    return below


def _single(gradient: Tensor) -> Tensor:
    single = torch.zeros_like(gradient)
    single[(-1,) * single.ndim] = 1.0
    return single
