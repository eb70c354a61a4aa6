"""The real DeepSpeed beside the course's own chunks, where it is installed.

``why_not()`` says in a sentence why it cannot be used here. ``load()`` imports it without its log lines. Its
``deepspeed.checkpointing.checkpoint(function, *inputs)`` needs no configuration and no process group, so a notebook
calls it like PyTorch's. What does need them (``deepspeed.initialize``, ``configure``) leaves state behind that no call
takes back, so it runs in a process of its own (:mod:`memsave_lib.course.deepspeed_process`).

DeepSpeed keeps the inputs of a checkpoint as attributes of its autograd function. Saved-tensor hooks do not see them
there: compare *live* bytes, ``MemoryMeter.live_bytes`` before and after forward.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memsave_lib.strategies import Chunked

if TYPE_CHECKING:
    from memsave_lib.course.env import Setup

#: Of the versions tried, the first one that works on a CPU as it is.
OLDEST = "0.19.8"
HOW_TO_INSTALL = "DS_BUILD_OPS=0 pip install -r requirements-deepspeed.txt -c constraints.txt"
#: The accelerator that DeepSpeed takes; it asks once, when it is imported.
ACCELERATOR = "DS_ACCELERATOR"
PROCESS = "memsave_lib.course.deepspeed_process"
PROCESS_TIMEOUT_SECONDS = 240

Checkpoint = Callable[..., Tensor]  # checkpoint(function, x) runs function(x) and keeps only x


def why_not() -> str:
    """Why DeepSpeed cannot run here, as a sentence for a reader; "" when it can."""
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return f"DeepSpeed is not installed here, so this cell shows nothing. To see it: {HOW_TO_INSTALL}"
    if _numbers(version) < _numbers(OLDEST):
        return f"DeepSpeed {version} is installed, and the course needs {OLDEST} or newer: {HOW_TO_INSTALL}"
    return ""


def load(device_type: str = "cpu") -> ModuleType:
    """The package ``deepspeed``, with ``device_type`` ("cpu" or "cuda") as its accelerator.

    Raises RuntimeError where it cannot run, with :func:`why_not` as its text, or where the program has imported it
    for another kind of device: it cannot change over.
    """
    if reason := why_not():
        raise RuntimeError(reason)
    with _environment(ACCELERATOR, device_type):  # without it, DeepSpeed logs a warning on a machine without GPU
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        taken = get_accelerator().device_name()
    if taken != device_type:
        raise RuntimeError(f"DeepSpeed was imported for {taken!r} and cannot change to {device_type!r}: restart Python")
    return deepspeed


def run_in_chunks(blocks: Sequence[nn.Module], x: Tensor, num_checkpoints: int, checkpoint: Checkpoint) -> Tensor:
    """Run the blocks as ``num_checkpoints`` functions, each under ``checkpoint``: what a model's own code has to do.

    Chunks are those of :class:`memsave_lib.Chunked`: contiguous, the larger first.
    """
    for part in Chunked(num_checkpoints).plan(len(blocks)).segments:
        x = checkpoint(_one_after_the_other(blocks[part.start : part.stop]), x)
    return x


def gpt2_loss(model: nn.Module, tokens: Tensor, num_checkpoints: int, checkpoint: Checkpoint) -> Tensor:
    """The loss of Hugging Face's GPT-2 on ``tokens`` (batch, seq_len), its blocks run in chunks.

    The same operations in the same order as ``model(tokens, labels=tokens, use_cache=False).loss``, dropout included.
    """
    body = model.transformer
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    x = body.drop(body.wte(tokens) + body.wpe(positions))
    x = run_in_chunks(list(body.h), x, num_checkpoints, checkpoint)
    logits = model.lm_head(body.ln_f(x))
    return model.loss_function(logits, tokens, vocab_size=model.config.vocab_size)


@dataclass(frozen=True)
class KeyEffect:
    """What one DeepSpeed configuration did to a GPT-2: ``held_bytes`` of activations are alive after forward.

    ``equal`` says whether loss and every gradient are bit-equal to those without any key.
    """

    label: str
    held_bytes: int
    equal: bool


def config_keys(here: Setup) -> list[KeyEffect]:
    """One step of a small GPT-2 for each configuration that explainers recommend, and one whose code calls DeepSpeed.

    Runs ``deepspeed.initialize`` on the CPU in a process of its own; takes some ten seconds.
    """
    shape = {name: getattr(here, name) for name in ("n_layers", "hidden", "heads", "batch_size", "seq_len", "seed")}
    return [KeyEffect(**row) for row in _in_a_process("config_keys", shape)]


@dataclass(frozen=True)
class PartitionedRun:
    """A step with ``partition_activations`` in one process: ``zero_gradients[i]`` parameters of chunk i got only zeros.

    ``equal_loss`` compares with a plain step, ``equal_gradients[i]`` those of chunk i.
    """

    label: str
    equal_loss: bool
    zero_gradients: tuple[int, ...]
    equal_gradients: tuple[bool, ...]
    parameters: int  # of each chunk


def partitioned_activations() -> list[PartitionedRun]:
    """Three chunks under ``configure(partition_activations=True)``: blocks that end in an addition, and in a Linear."""
    rows = _in_a_process("partitioned_activations", {})
    return [PartitionedRun(**{name: _frozen(value) for name, value in row.items()}) for row in rows]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _one_after_the_other(blocks: Sequence[nn.Module]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for block in blocks:
            output = block(x)
            x = output[0] if isinstance(output, tuple) else output
        return x

    return run


def _in_a_process(experiment: str, settings: dict[str, int]) -> list[dict[str, Any]]:
    """What the experiment prints, as rows. RuntimeError with the end of its error output when it fails."""
    if reason := why_not():
        raise RuntimeError(reason)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", PROCESS, experiment, json.dumps(settings)],
        env={**os.environ, ACCELERATOR: "cpu", "CUDA_VISIBLE_DEVICES": "", "LOCAL_RANK": "0", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(
            f"{experiment} in a process of its own ended with status {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return json.loads(done.stdout)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
