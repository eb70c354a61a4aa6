"""Labs: sliders, a prediction that follows them at once, and a real training step whose memory grows on the screen.

A lab computes nothing itself: it predicts with :mod:`memsave_lib.formulas`, measures with
:class:`~memsave_lib.MemoryMeter` and draws with :mod:`memsave_lib.plots`. A :class:`LabConfig` says what is special
about one lab, the rest is shared.
"""

from memsave_lib.labs.activations import activations_lab
from memsave_lib.labs.budget import budget_lab
from memsave_lib.labs.checkpointing import checkpointing_lab
from memsave_lib.labs.chunks import chunks_lab
from memsave_lib.labs.component import Lab
from memsave_lib.labs.config import Job, LabConfig, Prediction, Run, Slider
from memsave_lib.labs.offload import offload_lab, offload_picture
from memsave_lib.labs.selective import selective_lab

__all__ = [
    "Job",
    "Lab",
    "LabConfig",
    "Prediction",
    "Run",
    "Slider",
    "activations_lab",
    "budget_lab",
    "checkpointing_lab",
    "chunks_lab",
    "offload_lab",
    "offload_picture",
    "selective_lab",
]
