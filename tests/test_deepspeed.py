"""The real DeepSpeed beside ours: what its checkpoint does, what its keys do not do, and a silent loss of gradients.

Skipped with a reason where DeepSpeed is missing; with REQUIRE_DEEPSPEED=1, which CI sets, that is a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from torch import Tensor, nn

import memsave_lib as ms
from memsave_lib.course import deepspeed_peer
from memsave_lib.course.env import Setup

CHUNKS = (12, 4, 3, 1)
HERE = Setup(16, 1, 4, 64, 2, 1, torch.device("cpu"))
STATE = 2 * 16 * 64 * 4  # bytes of one hidden state


@pytest.fixture(scope="module")
def deepspeed():
    if reason := deepspeed_peer.why_not():
        if os.environ.get("REQUIRE_DEEPSPEED") == "1":
            pytest.fail(f"REQUIRE_DEEPSPEED=1: {reason}")
        pytest.skip(reason)
    return deepspeed_peer.load("cpu")


def build() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return ms.BlockStack(12, 64, 2, dropout=0.1), torch.randn(2, 16, 64, requires_grad=True)


def outcome(model: nn.Module, x: Tensor, run) -> dict[str, object]:
    """Loss, gradients and random state of a step; bytes alive after forward, and those that hooks saw."""
    torch.manual_seed(1)
    model.zero_grad()
    x.grad = None
    with ms.MemoryMeter(model) as meter:
        before = meter.live_bytes
        loss = run(x).square().mean()
        held = meter.live_bytes - before
        loss.backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return dict(
        loss=loss.detach(), gradients=gradients, state=torch.get_rng_state(), held=held, seen=meter.trace.saved_bytes
    )


def same(one: dict[str, object], other: dict[str, object]) -> bool:
    tensors = [(found["loss"], found["state"], *found["gradients"]) for found in (one, other)]
    return all(torch.equal(*pair) for pair in zip(*tensors, strict=True))


@pytest.mark.parametrize("chunks", CHUNKS)
def test_its_checkpoint_in_chunks_is_equal_to_plain_and_holds_what_ours_holds(deepspeed, chunks: int) -> None:
    stack, x = build()
    plain = outcome(stack, x, stack)
    checkpoint = deepspeed.checkpointing.checkpoint
    theirs = outcome(stack, x, lambda x: deepspeed_peer.run_in_chunks(stack.blocks, x, chunks, checkpoint))
    with ms.apply(stack, ms.Chunked(chunks)):
        ours = outcome(stack, x, stack)
    assert same(theirs, plain)
    assert same(ours, plain)
    # The meter first sees x in the step; the square keeps its input; the mean is one number.
    assert theirs["held"] == ours["held"] == (chunks + 1) * STATE + 4
    assert ours["seen"] == (chunks + 1) * STATE
    # Saved-tensor hooks see the square's input and none of DeepSpeed's checkpoints.
    assert theirs["seen"] == STATE


def test_chunks_whose_input_needs_no_gradient_are_cut_off(deepspeed) -> None:
    """Its checkpoint sees only what goes in, not the weights: as the checkpoint by hand of notebook 02."""
    stack, x = build()
    out = deepspeed_peer.run_in_chunks(stack.blocks, x.detach(), 3, deepspeed.checkpointing.checkpoint)
    assert not out.requires_grad
    with ms.apply(stack, ms.Chunked(3)):
        assert stack(x.detach()).requires_grad


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("own", ["DeepSpeed", "nothing"])
def test_gpt2_in_chunks_is_the_loss_of_hugging_face(request, own: str, chunks: int) -> None:
    """The arithmetic of gpt2_loss needs no DeepSpeed; with it, the chunks are its."""
    checkpoint = lambda function, x: function(x)  # noqa: E731
    if own == "DeepSpeed":
        checkpoint = request.getfixturevalue("deepspeed").checkpointing.checkpoint
    torch.manual_seed(0)
    model = ms.gpt2("tiny", n_layer=4, attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1).train()
    tokens = torch.randint(256, (2, 16))
    found = []
    for loss_of in (
        lambda: model(tokens, labels=tokens, use_cache=False).loss,
        lambda: deepspeed_peer.gpt2_loss(model, tokens, chunks, checkpoint),
    ):
        model.zero_grad()
        torch.manual_seed(1)
        loss = loss_of()
        loss.backward()
        found.append([loss.detach(), torch.get_rng_state(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_no_configuration_key_changes_a_byte_and_a_call_does(deepspeed) -> None:
    effects = {effect.label: effect for effect in deepspeed_peer.config_keys(HERE)}
    assert all(effect.equal for effect in effects.values())
    *keys, called, switched = effects.values()
    assert [effect.label for effect in keys[:2]] == ["no key", '"gradient_checkpointing"']
    assert len(keys) == 5
    assert {effect.held_bytes for effect in keys} == {keys[0].held_bytes}
    # Four blocks in four chunks, or checkpointed one by one: the same inputs are kept.
    assert called.held_bytes == switched.held_bytes
    plain = ms.formulas.gpt2_block_terms(ms.formulas.BlockShape(2, 16, 64, 1))
    # A block keeps its input either way.
    assert keys[0].held_bytes - called.held_bytes == 4 * (sum(plain.values()) - STATE)


def test_partitioned_activations_in_one_process_silence_chunks_behind_a_view(deepspeed) -> None:
    """What DeepSpeed 0.19.8 does. When this fails, its behavior has changed: rewrite the tale of notebook 04."""
    addition, linear = deepspeed_peer.partitioned_activations()
    assert (addition.label, linear.label) == ("chunks end in an addition", "chunks end in a Linear")
    assert addition.equal_loss
    assert addition.equal_gradients == (True, True, True)
    assert addition.zero_gradients == (0, 0, 0)
    assert linear.equal_loss
    assert linear.equal_gradients == (False, False, True)
    assert linear.zero_gradients == (linear.parameters, linear.parameters, 0)


def test_an_experiment_that_fails_shows_the_end_of_its_error(deepspeed) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)config_keys in a process of its own ended with status 1.*n_layers"):
        deepspeed_peer._in_a_process("config_keys", {})


def test_loading_says_nothing_and_leaves_the_environment_alone(deepspeed) -> None:
    program = (
        "import os; from memsave_lib.course import deepspeed_peer; before = dict(os.environ); "
        "deepspeed_peer.load('cpu'); assert dict(os.environ) == before"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    environment.pop(deepspeed_peer.ACCELERATOR, None)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_cannot_change_to_another_device(deepspeed) -> None:
    with pytest.raises(RuntimeError, match="imported for 'cpu' and cannot change to 'cuda': restart Python"):
        deepspeed_peer.load("cuda")


def test_without_deepspeed_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert "DeepSpeed is not installed here" in deepspeed_peer.why_not()
    assert deepspeed_peer.HOW_TO_INSTALL in deepspeed_peer.why_not()
    for call in (deepspeed_peer.load, deepspeed_peer.partitioned_activations, lambda: deepspeed_peer.config_keys(HERE)):
        with pytest.raises(RuntimeError, match="DeepSpeed is not installed here"):
            call()


@pytest.mark.parametrize(("version", "fits"), [("0.19.7", False), ("0.19.8", True), ("0.20.0+local", True)])
def test_too_old_a_deepspeed_is_named(monkeypatch: pytest.MonkeyPatch, version: str, fits: bool) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert (deepspeed_peer.why_not() == "") is fits
    assert fits or f"DeepSpeed {version} is installed, and the course needs 0.19.8" in deepspeed_peer.why_not()
