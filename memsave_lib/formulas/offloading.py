"""When a copy hides: whether what a layer saves can leave while the next layer computes, without anyone waiting.

Letters: ``s`` positions, ``h`` width, ``F`` FLOPs a second that the device reaches, ``B`` bytes a second of the link.
A layer saves ``gamma*h`` bytes a token. Its forward takes ``24h**2 + kappa*s*h`` FLOPs a token: 24h for each of its h
channels in the projections, ``kappa*s`` in attention. So the copy, ``gamma*h/B`` seconds, is no longer than forward,
``(24h**2 + kappa*s*h)/F`` seconds, exactly when

    24h + kappa*s >= gamma * F/B

The batch does not matter: both sides grow with it. Backward computes twice as much as forward and has as much to bring
back, so what hides in forward hides in backward. The widths of gamma in bf16: 2 for the layer's input alone
(checkpoints), 34 for all that a GPT layer saves, 45.5 for all of Llama-2-7B's.
"""

from __future__ import annotations

import math
from fractions import Fraction
from numbers import Real

from memsave_lib.arguments import whole_number

#: Attention's FLOPs a token, position and channel: scores and weighted sum, 2 each; half of it where later positions
#: are masked and skipped.
FULL_ATTENTION, CAUSAL_ATTENTION = 4, 2


def copy_hides(
    seq_len: int, hidden: int, gamma: float, flops: float, bandwidth: float, kappa: float = CAUSAL_ATTENTION
) -> bool:
    """Whether the copy of what a layer saves takes no longer than its forward.

    Args:
        seq_len: positions.
        hidden: width of the residual stream.
        gamma: bytes a token that a layer saves, over ``hidden``.
        flops: that the device reaches, per second.
        bandwidth: of the link, bytes per second.
        kappa: 4 for full attention, 2 for causal, 0 where attention looks back a fixed distance.
    """
    return _number("bandwidth", bandwidth) >= _hiding_bandwidth(seq_len, hidden, gamma, flops, kappa)


def hiding_bandwidth(seq_len: int, hidden: int, gamma: float, flops: float, kappa: float = CAUSAL_ATTENTION) -> float:
    """The slowest link behind which the copy still hides, ``gamma*F / (24h + kappa*s)``, in bytes per second."""
    return float(_hiding_bandwidth(seq_len, hidden, gamma, flops, kappa))


def hiding_seq_len(
    hidden: int, gamma: float, flops: float, bandwidth: float, kappa: float = CAUSAL_ATTENTION
) -> int | None:
    """The fewest positions from which the copy hides: 0 where it always does, None where it never will (kappa = 0)."""
    needed = _number("gamma", gamma, at_least=0) * _number("flops", flops) / _number("bandwidth", bandwidth)
    missing = needed - 24 * whole_number("hidden", hidden)
    per_position = _number("kappa", kappa, at_least=0)
    if missing <= 0:
        return 0
    return math.ceil(missing / per_position) if per_position else None


def _hiding_bandwidth(seq_len: int, hidden: int, gamma: float, flops: float, kappa: float) -> Fraction:
    """Not rounded, so that the first length and the slowest link agree with each other at the very limit."""
    whole_number("seq_len", seq_len)
    work = 24 * whole_number("hidden", hidden) + _number("kappa", kappa, at_least=0) * seq_len
    return _number("gamma", gamma, at_least=0) * _number("flops", flops) / work


def _number(name: str, value: object, at_least: int | None = None) -> Fraction:
    """The very value, so that both sides of a comparison are exact; above 0 unless ``at_least`` says otherwise."""
    wanted = "a number above 0" if at_least is None else f"a number of at least {at_least}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {wanted}, got {value!r} ({type(value).__name__})")
    if not math.isfinite(value) or (value <= 0 if at_least is None else value < at_least):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return Fraction(value)
