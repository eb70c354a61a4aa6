"""What notebook 05 asks: when a copy hides."""

from __future__ import annotations

from memsave_lib import devices
from memsave_lib.course.predictions import Question
from memsave_lib.devices import Device
from memsave_lib.formulas import hiding_seq_len

WIDTH = 4096
#: Bytes that leave for each token and unit of width: all that a block saves, of a GPT with dropout and of Llama-2-7B in
#: half precision, of the course's in float32.
GPT, LLAMA, FLOAT32 = 34, 45.5, 64


def everything_hides() -> Question:
    """From how many tokens on all that a GPT block of width 4,096 saves hides on an A100, attention causal."""
    needed = GPT * devices.A100.flops / devices.A100.copy_out
    mistakes = {
        "You took κ = 4; with causal attention half of the scores are skipped: κ = 2.": tokens_to_hide(kappa=4),
        "You left out the projections: 24h is computing too, and copies hide behind it.": needed / 2,
        "You left out κ: attention computes 2h FLOPs for each position, so half as many tokens suffice.": (
            needed - 24 * WIDTH
        ),
        "You took Llama's γ of 45.5; the question is about a GPT block, which saves 34.": tokens_to_hide(gamma=LLAMA),
        "You took float32's γ of 64; half precision sends 34.": tokens_to_hide(gamma=FLOAT32),
        "You took the F/B of an H100, which computes faster: more has to be computed behind each copy.": (
            tokens_to_hide(devices.H100)
        ),
        "You counted block inputs, γ = 2: those hide from the first token on.": 0,
    }
    hint = "Put 24h + κs = γF/B and solve for s: h = 4,096, κ = 2, γ = 34."
    return Question("tokens from which all hides on an A100", mistakes, hint)


def tokens_to_hide(device: Device = devices.A100, gamma: float = GPT, kappa: int = 2) -> int:
    """The fewest, by formula."""
    return hiding_seq_len(WIDTH, gamma, device.flops, device.copy_out, kappa)
