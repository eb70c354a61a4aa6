"""Experiments with DeepSpeed that leave process-wide state; :mod:`memsave_lib.course.deepspeed_peer` starts them.

    python -m memsave_lib.course.deepspeed_process config_keys '{"n_layers": 4, ...}'

prints one list of rows in JSON on stdout. Everything else that is said in this process goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from memsave_lib.course import deepspeed_peer
from memsave_lib.meter import MemoryMeter
from memsave_lib.models import BlockStack, gpt2, hugging_face_checkpointing

FLAGS = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
#: What explainers put into a DeepSpeed configuration to have activations checkpointed, and a key that nobody knows.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "no key": {},
    '"gradient_checkpointing"': {"gradient_checkpointing": {"enabled": True, "num_checkpoints": 4}},
    '"activation_checkpointing", 4 checkpoints': {"activation_checkpointing": {"number_checkpoints": 4}},
    '"activation_checkpointing", every flag': {
        "activation_checkpointing": {"number_checkpoints": 4, **dict.fromkeys(FLAGS, True)}
    },
    '"activation_chekpointing", misspelt': {"activation_chekpointing": {"number_checkpoints": 4}},
}
CALLED = "no key, DeepSpeed called in 4 chunks"
SWITCHED = "no key, the library's switch, each block"
CHUNKS = 4  # where the model's own code makes them; as many as the configurations ask for


class LanguageModel(nn.Module):
    """GPT-2 as a module that returns its loss; ``checkpoint`` runs its blocks in chunks, None as they are."""

    def __init__(self, model: nn.Module, checkpoint: deepspeed_peer.Checkpoint | None = None) -> None:
        super().__init__()
        self.model, self.checkpoint = model, checkpoint

    def forward(self, tokens: Tensor) -> Tensor:
        if self.checkpoint is None:
            return self.model(tokens, labels=tokens, use_cache=False).loss
        chunks = min(CHUNKS, len(self.model.transformer.h))
        return deepspeed_peer.gpt2_loss(self.model, tokens, chunks, self.checkpoint)


@contextmanager
def process_group() -> Iterator[ModuleType]:
    """DeepSpeed in a group of one process, without the C++ operation that it would compile first (38 seconds)."""
    deepspeed = deepspeed_peer.load("cpu")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        deepspeed.init_distributed("gloo")
        yield deepspeed
    finally:
        torch.distributed.destroy_process_group()


def config_keys(
    n_layers: int, hidden: int, heads: int, batch_size: int, seq_len: int, seed: int
) -> list[dict[str, Any]]:
    """Each configuration on equal models: bytes held after forward, and whether loss and gradients stay equal."""
    sizes = {"n_layer": n_layers, "n_embd": hidden, "n_head": heads, "n_positions": seq_len}
    rows: list[dict[str, Any]] = []
    expected: list[Tensor] = []
    with process_group() as deepspeed:
        for label in (*CONFIGURATIONS, CALLED, SWITCHED):
            torch.manual_seed(seed)
            inner = gpt2("tiny", **sizes)
            if label == SWITCHED:
                hugging_face_checkpointing(inner)
            model = LanguageModel(inner, deepspeed.checkpointing.checkpoint if label == CALLED else None)
            tokens = torch.randint(inner.config.vocab_size, (batch_size, seq_len))
            held, found = _step_with(deepspeed, model, CONFIGURATIONS.get(label, {}), tokens)
            expected = expected or found
            rows.append({"label": label, "held_bytes": held, "equal": _equal(found, expected)})
    return rows


def _step_with(
    deepspeed: ModuleType, model: LanguageModel, config: dict[str, Any], tokens: Tensor
) -> tuple[int, list[Tensor]]:
    """Bytes alive after forward beyond those before it, and the loss with every gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config={"train_batch_size": len(tokens), **config}
    )
    with MemoryMeter(model) as meter:
        before = meter.live_bytes
        loss = engine(tokens)
        held = meter.live_bytes - before
        engine.backward(loss)
    gradients = [parameter.grad for parameter in model.parameters()]
    return held, [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


def _equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


#: Three chunks of two blocks on a stack of width 64: what is shown depends on their last operation alone.
_CHUNKS, _BLOCKS_EACH, _HIDDEN, _TOKENS = 3, 2, 64, (2, 32)


def partitioned_activations() -> list[dict[str, Any]]:
    """The same stack of chunks with ``partition_activations``, and with a Linear at the end of each chunk."""
    rows = []
    with process_group() as deepspeed:
        for label, last in (("chunks end in an addition", False), ("chunks end in a Linear", True)):
            torch.manual_seed(0)
            entry, stack = nn.Linear(_HIDDEN, _HIDDEN), BlockStack(_CHUNKS * _BLOCKS_EACH, _HIDDEN, 1)
            parts = [stack.blocks[i : i + _BLOCKS_EACH] for i in range(0, len(stack.blocks), _BLOCKS_EACH)]
            chunks = [nn.Sequential(*part, *[nn.Linear(_HIDDEN, _HIDDEN)] * last) for part in parts]
            x = torch.randn(*_TOKENS, _HIDDEN)
            expected_loss, expected = _chunked_step(chunks, entry(x), lambda chunk, x: chunk(x))
            deepspeed.checkpointing.configure(None, partition_activations=True)
            loss, found = _chunked_step(chunks, entry(x), deepspeed.checkpointing.checkpoint)
            rows.append(
                {
                    "label": label,
                    "equal_loss": torch.equal(loss, expected_loss),
                    "zero_gradients": [sum(not g.count_nonzero() for g in part) for part in found],
                    "equal_gradients": [_equal(*pair) for pair in zip(found, expected, strict=True)],
                    "parameters": len(found[0]),
                }
            )
    return rows


def _chunked_step(
    chunks: list[nn.Sequential], x: Tensor, checkpoint: deepspeed_peer.Checkpoint
) -> tuple[Tensor, list[list[Tensor]]]:
    """The loss, and the gradients of each chunk."""
    for chunk in chunks:
        chunk.zero_grad()
        x = checkpoint(chunk, x)
    loss = x.square().mean()
    loss.backward()
    return loss.detach(), [[parameter.grad for parameter in chunk.parameters()] for chunk in chunks]


EXPERIMENTS = {"config_keys": config_keys, "partitioned_activations": partitioned_activations}


def main(experiment: str, settings: str) -> None:
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    rows = EXPERIMENTS[experiment](**json.loads(settings))
    with os.fdopen(answer, "w") as stdout:
        json.dump(rows, stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
