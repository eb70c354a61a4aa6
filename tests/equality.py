"""Run a training step under a strategy and compare everything that it leaves behind, bit by bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import memsave_lib as ms
from memsave_lib.strategies import OPS, Strategy

SEED = 1234

#: Every kind of strategy, for stacks of at least three blocks; unequal chunks on four blocks.
STRATEGIES: tuple[Strategy, ...] = (
    ms.KeepAll(),
    ms.FullCheckpoint(),
    ms.Selective(checkpoint_every=2),
    ms.Selective(checkpoint_every=3),
    ms.Chunked(num_checkpoints=1),
    ms.Chunked(num_checkpoints=2),
    ms.Chunked(num_checkpoints=3),
    ms.Chunked(num_checkpoints=3, recompute_last=False),
    ms.Recursive(),
)
BLOCK_BY_BLOCK = tuple(s for s in STRATEGIES if not isinstance(s, ms.Chunked | ms.Recursive))
INSIDE_BLOCKS: tuple[Strategy, ...] = (*(ms.SelectiveOps(op) for op in OPS), ms.SelectiveOps(OPS))
RECOMPUTING = tuple(s for s in STRATEGIES if s != ms.KeepAll())
ATTENTION_ONLY = ms.SelectiveOps("attention")


def label(value: object) -> str | None:
    """Test ids that read like the strategy."""
    return value.label.replace(" ", "_") if isinstance(value, Strategy) else None


@dataclass(frozen=True)
class Outcome:
    """What a step leaves behind."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    random_state: Tensor


Step = Callable[[], Tensor]  # forward and backward; returns the loss
Build = Callable[[], tuple[nn.Module, Step]]  # a fresh model, equal each time, and its step


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def outcome(build: Build, strategy: Strategy | None) -> Outcome:
    """Build the model, run its step once under ``strategy`` (None: without the library)."""
    torch.manual_seed(SEED)
    model, step = build()
    context = contextlib.nullcontext() if strategy is None else ms.apply(model, strategy)
    torch.manual_seed(SEED + 1)
    with context:
        loss = step()
    return Outcome(loss.detach().clone(), gradients(model), torch.get_rng_state())


def assert_same(ours: Outcome, plain: Outcome) -> None:
    """Loss, every gradient (None stays None) and the random state, bit by bit."""
    assert torch.equal(ours.loss, plain.loss), f"loss {ours.loss.item()!r} is not {plain.loss.item()!r}"
    assert ours.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        mine = ours.gradients[name]
        assert (mine is None) == (gradient is None), f"{name}: gradient {mine!r} where plain has {gradient!r}"
        assert gradient is None or torch.equal(mine, gradient), f"the gradient of {name} differs"
    assert torch.equal(ours.random_state, plain.random_state), "the random state after the step differs"


def assert_equal_to_plain(build: Build, strategy: Strategy) -> None:
    """One step under ``strategy`` against one without the library, on models built alike."""
    plain = outcome(build, None)
    assert any(g is not None and g.count_nonzero() for g in plain.gradients.values()), "the step computes no gradient"
    assert_same(outcome(build, strategy), plain)


class TinyLanguageModel(nn.Module):
    """Embedding, a BlockStack, a head: the course's blocks where a real model would have them."""

    def __init__(self, n_layers: int = 4, hidden: int = 8, vocabulary: int = 11, tied: bool = False, **block: object):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.stack = ms.BlockStack(n_layers, hidden, 2, **block)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.stack(self.embedding(tokens)))


VARIANTS = ("plain", "frozen", "shared", "tied")


def vary(model: nn.Module, variant: str) -> None:
    """Freeze all before the third block, or use the first block again as the third one.

    Plain Hugging Face with its key-value cache on would give a block that is used twice the keys of both uses.
    """
    if hasattr(model, "config"):
        model.config.use_cache = False
    blocks = ms.find_blocks(model)
    if variant == "frozen":
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.requires_grad_(False)
        for block in blocks[:2]:
            block.requires_grad_(False)
    elif variant == "shared":
        holder = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == len(blocks))
        holder[2] = holder[0]


def build_tiny(variant: str = "plain", **block: object) -> tuple[nn.Module, Step]:
    model = TinyLanguageModel(tied=variant == "tied", **block)
    vary(model, variant)
    tokens = torch.randint(11, (2, 5))

    def step() -> Tensor:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        return loss

    return model, step


def language_step(model: nn.Module, vocabulary: int = 13, batch: int = 2, seq_len: int = 6) -> Step:
    """Forward with labels and backward, for Hugging Face models."""
    tokens = torch.randint(vocabulary, (batch, seq_len))

    def step() -> Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss

    return step


def build_gpt2(variant: str = "plain", dropout: float = 0.0, **config: object) -> tuple[nn.Module, Step]:
    pdrops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    shape = {"n_layer": 4, "n_embd": 8, "n_head": 2, "vocab_size": 13, "n_positions": 16}
    model = ms.gpt2("tiny", tie_word_embeddings=variant == "tied", **{**shape, **pdrops, **config})
    vary(model.train(), variant)
    return model, language_step(model)


def build_llama(variant: str = "plain", dropout: float = 0.0, **config: object) -> tuple[nn.Module, Step]:
    shape = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "vocab_size": 13, "attention_dropout": dropout}
    model = ms.llama("tiny", tie_word_embeddings=variant == "tied", **{**shape, **more, **config})
    vary(model.train(), variant)
    return model, language_step(model)
