"""Claims about DeepSpeed's configuration (A7, C5, C6, C7): asked of the real one, where it is installed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import memsave_lib as ms
from memsave_lib.course import deepspeed_peer
from memsave_lib.course.claims.finding import AS_STATED, Check, Finding, judged
from memsave_lib.course.env import Setup


def why_not() -> str:
    """Why DeepSpeed cannot be asked here, as a sentence; "" when it can."""
    if reason := deepspeed_peer.why_not():
        return reason
    try:
        deepspeed_peer.load()
    except RuntimeError as error:  # it is in use already, for another kind of device
        return str(error)
    return ""


def a7() -> Finding:
    deepspeed_peer.load()
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT, ACT_CHKPT_DEFAULT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(stage=3, activation_offloading=True)
    except ValueError as error:
        refusal = next(line.strip().split(" [")[0] for line in str(error).splitlines() if "not permitted" in line)
    else:
        refusal = ""
    return judge_a7(refusal, [f"{ACT_CHKPT}.{name}" for name in ACT_CHKPT_DEFAULT if "cpu" in name])


def judge_a7(refusal: str, options: Sequence[str]) -> Finding:
    """``refusal`` is what the configuration of ZeRO says to the key, "" when it takes it."""
    return judged(
        "A7",
        {AS_STATED: not refusal},
        f"ZeRO's configuration {f'refuses it: {refusal}' if refusal else 'takes it'}. What there is, outside ZeRO, is "
        f"{' and '.join(options) or 'nothing'}, for checkpoints that the model's own code makes.",
    )


def c5() -> Finding:
    here = Setup(
        seq_len=16, checkpoint_every=1, n_layers=4, hidden=64, batch_size=2, steps=1, device=torch.device("cpu")
    )
    effects = {effect.label: effect for effect in deepspeed_peer.config_keys(here)}
    plain, key, *_, called, _ = effects.values()
    return judge_c5(plain.held_bytes, key.held_bytes, called.held_bytes)


def judge_c5(plain: int, key: int, called: int) -> Finding:
    """Bytes that GPT-2 holds after forward: without the key, with it, and when its code calls DeepSpeed."""
    return judged(
        "C5",
        {AS_STATED: key < plain},
        f"Without a word the key is {'obeyed' if key < plain else 'ignored'}: a small GPT-2 holds {key:,} bytes after "
        f"forward with it, {plain:,} without. When the model's code calls deepspeed.checkpointing.checkpoint, "
        f"{called:,} are left.",
    )


def c6() -> Finding:
    package = Path(deepspeed_peer.load().__file__).parent
    names = ("checkpointable_modules", "checkpointable_layers")
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in package.rglob("*.py")]
    return judge_c6({name: sum(name in text for text in texts) for name in names})


def judge_c6(files: Mapping[str, int]) -> Finding:
    """In how many source files of DeepSpeed each name occurs."""
    return judged(
        "C6",
        {AS_STATED: files["checkpointable_modules"] > 0},
        f"The name occurs in {files['checkpointable_modules']} of its source files. DeepSpeed checkpoints where the "
        "model's code calls deepspeed.checkpointing.checkpoint; only its PipelineModule, for pipelines, knows "
        "checkpointable_layers.",
    )


def c7() -> Finding:
    checkpointing = deepspeed_peer.load().checkpointing
    from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig

    defaults = (
        inspect.signature(checkpointing.configure).parameters["num_checkpoints"].default,
        DeepSpeedActivationCheckpointingConfig({}).number_checkpoints,
    )
    return judge_c7(defaults, {calls: _inputs_held(calls) for calls in (3, 4, 12)})


def _inputs_held(calls: int) -> float:
    """Hidden states alive after a forward of 12 blocks in so many calls: the input, and what came on top."""
    torch.manual_seed(0)
    stack, x = ms.BlockStack(12, 64, 2), torch.randn(2, 16, 64, requires_grad=True)
    checkpoint = deepspeed_peer.load().checkpointing.checkpoint
    with ms.MemoryMeter(stack) as meter:
        x.sum()
        before = meter.live_bytes
        loss = deepspeed_peer.run_in_chunks(stack.blocks, x, calls, checkpoint).sum()
        held = meter.live_bytes - before - loss.nbytes
        loss.backward()
    return 1 + held / x.nbytes


def judge_c7(defaults: Sequence[int | None], held: Mapping[int, float]) -> Finding:
    """``held``: number of calls -> hidden states alive after forward, with the number at its default."""
    root, default = round(math.sqrt(12)), " and ".join(map(str, dict.fromkeys(defaults)))
    return judged(
        "C7",
        {AS_STATED: root in defaults},
        f"Its default is {default}; what it sets is the size of a buffer. Chunks are calls in the model's code: 12 "
        f"blocks in {', '.join(map(str, held))} calls keep {', '.join(f'{inputs:.0f}' for inputs in held.values())} "
        "inputs.",
    )


CHECKS = (
    Check("A7", a7, why_not),
    Check("C5", c5, why_not),
    Check("C6", c6, why_not),
    Check("C7", c7, why_not),
)
