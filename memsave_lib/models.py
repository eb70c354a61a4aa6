"""The block that the course takes apart, the two Hugging Face models it trains, and how blocks are found in a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memsave_lib import _compat, interception
from memsave_lib.arguments import whole_number

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, LlamaForCausalLM

GPT2_SIZES = {
    "tiny": {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256},
    "mini": {"n_layer": 6, "n_embd": 256, "n_head": 4, "vocab_size": 1024},
    "small": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
    "medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16, "vocab_size": 50257},
    "large": {"n_layer": 36, "n_embd": 1280, "n_head": 20, "vocab_size": 50257},
    "xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257},
}
GPT2_HUB_NAMES = {"small": "gpt2", "medium": "gpt2-medium", "large": "gpt2-large", "xl": "gpt2-xl"}


def _llama_shape(
    width: int, ffn_width: int, layers: int, heads: int, kv_heads: int, vocabulary: int, positions: int
) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": ffn_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
    }


LLAMA_SIZES = {
    "tiny": _llama_shape(64, 172, 2, 4, 2, 256, 2048),
    "llama-2-7b": _llama_shape(4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-2-70b": _llama_shape(8192, 28672, 80, 64, 8, 32000, 4096),
    "llama-3-8b": _llama_shape(4096, 14336, 32, 32, 8, 128256, 8192),
}


class TransformerBlock(nn.Module):
    """A pre-LayerNorm GPT block with GELU: ``(batch, seq_len, hidden) -> (batch, seq_len, hidden)``.

    Args:
        hidden: width of the residual stream.
        heads: attention heads; must divide ``hidden``.
        ffn_mult: width of the feed-forward layer, in units of ``hidden``.
        dropout: probability after the attention weights, the attention projection and the feed-forward layer.
        causal: each position sees only itself and what comes before it.
        attention: ``"sdpa"`` calls PyTorch's fused kernel; ``"math"`` writes softmax(QK^T)V out, and keeps it.
    """

    #: Methods that ``SelectiveOps`` may run as small regions. A model of your own can offer the same attribute.
    recompute_regions: ClassVar[dict[str, tuple[str, ...]]] = {
        "attention": ("core",),
        "activation": ("activate_and_project",),
        "norm": ("norm_and_qkv", "norm_and_up"),
    }

    def __init__(
        self,
        hidden: int,
        heads: int,
        ffn_mult: int = 4,
        dropout: float = 0.0,
        causal: bool = True,
        attention: str = "sdpa",
    ) -> None:
        super().__init__()
        for name, value in (("hidden", hidden), ("heads", heads), ("ffn_mult", ffn_mult)):
            whole_number(name, value)
        if hidden % heads:
            raise ValueError(f"heads must divide hidden: {hidden} is not a multiple of {heads}")
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a number of at least 0 and below 1, got {dropout!r}")
        if not isinstance(causal, bool):
            raise TypeError(f"causal must be True or False, got {causal!r}")
        if attention not in ("sdpa", "math"):
            raise ValueError(f'attention must be "sdpa" or "math", got {attention!r}')
        self.hidden, self.heads, self.causal, self.attention = hidden, heads, causal, attention
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, ffn_mult * hidden)
        self.down = nn.Linear(ffn_mult * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq_len, hidden = x.shape
        q, k, v = self.norm_and_qkv(x).view(batch, seq_len, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = self.core(q, k, v).transpose(1, 2).reshape(batch, seq_len, hidden)
        x = x + self._drop(self.proj(attended))
        return x + self._drop(self.activate_and_project(self.norm_and_up(x)))

    def norm_and_qkv(self, x: Tensor) -> Tensor:
        """LayerNorm and the projection to queries, keys and values: (batch, seq_len, 3 * hidden)."""
        return self.qkv(self.norm1(x))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention without its projections; all (batch, heads, seq_len, hidden / heads)."""
        dropout = self.dropout if self.training else 0.0
        if self.attention == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        scores = q @ k.transpose(-2, -1)
        mask = torch.full_like(scores[0, 0], -math.inf if self.causal else 0.0, requires_grad=False).triu(1)
        # One addition scales and masks, and keeps nothing for backward; a product would keep its factor, a filled-in
        # mask itself.
        scores = torch.add(mask, scores, alpha=1 / math.sqrt(q.shape[-1]))
        weights = F.softmax(scores, dim=-1)
        return F.dropout(weights, dropout, self.training) @ v if dropout else weights @ v

    def norm_and_up(self, x: Tensor) -> Tensor:
        """LayerNorm and the first feed-forward projection: (batch, seq_len, ffn_mult * hidden)."""
        return self.up(self.norm2(x))

    def activate_and_project(self, x: Tensor) -> Tensor:
        """GELU and the second feed-forward projection, back to (batch, seq_len, hidden)."""
        return self.down(F.gelu(x))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class BlockStack(nn.Module):
    """``n_layers`` transformer blocks, one after the other: ``(batch, seq_len, hidden)`` in and out.

    ``block_options`` go to :class:`TransformerBlock`.
    """

    def __init__(self, n_layers: int, hidden: int, heads: int, **block_options: float | int | bool | str) -> None:
        super().__init__()
        whole_number("n_layers", n_layers)
        self.blocks = nn.ModuleList(TransformerBlock(hidden, heads, **block_options) for _ in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def gpt2(
    size: str = "small", *, n_positions: int = 1024, pretrained: bool = False, **config: object
) -> GPT2LMHeadModel:
    """Hugging Face's ``GPT2LMHeadModel``, without dropout unless asked for.

    GPT-2's default dropout of 0.1 makes PyTorch's CPU attention quadratic in memory: set ``attn_pdrop``,
    ``resid_pdrop`` and ``embd_pdrop`` to see it.

    Args:
        size: one of ``GPT2_SIZES``; ``"tiny"`` and ``"mini"`` are the course's own.
        n_positions: length of the position table, the longest sequence.
        pretrained: load the published weights from the Hugging Face hub (needs network; OSError without). A table
            longer than the published 1,024 positions repeats them.
        config: any other field of ``GPT2Config``.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    _check_size("gpt2", size, GPT2_SIZES)
    _check_fields("gpt2", config, GPT2Config())
    whole_number("n_positions", n_positions)
    settings = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    if not pretrained:
        settings |= {**GPT2_SIZES[size], "n_positions": n_positions, **config}
        # GPT-2's one special token is the last of its vocabulary, whatever the size of that.
        end_of_text = settings["vocab_size"] - 1
        model = GPT2LMHeadModel(GPT2Config(**{"bos_token_id": end_of_text, "eos_token_id": end_of_text, **settings}))
        # The class name does not end in ForCausalLM, so Hugging Face would warn and then fall back to this very loss.
        model.loss_type = "ForCausalLM"
        return model
    if size not in GPT2_HUB_NAMES:
        raise ValueError(f"no pretrained weights for gpt2({size!r}); published sizes are {', '.join(GPT2_HUB_NAMES)}")
    model = GPT2LMHeadModel.from_pretrained(GPT2_HUB_NAMES[size], **{**settings, **config})
    model.loss_type = "ForCausalLM"
    table = model.transformer.wpe.weight
    if n_positions != table.shape[0]:
        repeats = -(-n_positions // table.shape[0])
        longer = table.detach().repeat(repeats, 1)[:n_positions].clone()
        model.transformer.wpe = nn.Embedding.from_pretrained(longer, freeze=False)
        model.config.n_positions = n_positions
    return model


def llama(size: str = "tiny", **config: object) -> LlamaForCausalLM:
    """Hugging Face's ``LlamaForCausalLM`` with random weights.

    Args:
        size: one of ``LLAMA_SIZES``. Beware: ``"llama-2-7b"`` allocates 25 GiB in float32.
        config: any other field of ``LlamaConfig``.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    _check_size("llama", size, LLAMA_SIZES)
    _check_fields("llama", config, LlamaConfig())
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA_SIZES[size], **config}))


def hugging_face_checkpointing(model: nn.Module, on: bool = True, **settings: int) -> None:
    """Hugging Face's own switch for checkpointing every block, by whichever name the installed version has.

    Args:
        settings: what the version offers, ``every_n_layers=2`` for instance.
    """
    _compat.switch_hugging_face_checkpointing(model, on, **settings)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a model, in order; a block that is used twice appears twice.

    Looks for the outermost list of modules (``ModuleList`` or ``Sequential``) whose entries are all of one class, or
    all marked by Hugging Face as checkpointable layers, and are more than a single layer of ``torch.nn``.

    Raises:
        ValueError: none was found, or several of similar size (an encoder and a decoder, say): name them yourself
            with ``blocks=``.
    """
    stacks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside_another = any(not outer or name.startswith(outer + ".") for outer in stacks)
        if not inside_another and isinstance(module, nn.ModuleList | nn.Sequential) and _is_stack(module):
            stacks[name] = module
    if not stacks:
        raise ValueError(
            f"found no blocks in {type(model).__name__}: looked for a ModuleList or Sequential whose entries are all "
            f"of one class and have parts of their own; pass the list as blocks=[...]"
        )
    weights = {name: sum(p.numel() for p in stack.parameters()) for name, stack in stacks.items()}
    largest = max(weights, key=lambda name: weights[name])
    rivals = [name for name in stacks if weights[name] * 4 >= weights[largest]]
    if len(rivals) > 1:
        raise ValueError(
            f"found several stacks of blocks in {type(model).__name__}: {', '.join(rivals)}; "
            f"pass one of them as blocks=list(model.{rivals[0]})"
        )
    return list(_entries(stacks[largest]))


def _is_stack(module: nn.ModuleList | nn.Sequential) -> bool:
    entries = list(_entries(module))
    same_class = len(set(map(interception.original_class, entries))) == 1
    marked = all(hasattr(type(entry), "gradient_checkpointing") for entry in entries)
    return bool(entries) and (same_class or marked) and all(map(_is_composite, entries))


def _is_composite(module: nn.Module) -> bool:
    own_class = not type(module).__module__.startswith("torch.nn.")
    return any(True for _ in module.parameters()) and (own_class or any(True for _ in module.children()))


def _entries(module: nn.ModuleList | nn.Sequential) -> Iterator[nn.Module]:
    # children() would drop the second appearance of a shared block.
    return iter(module)


def _check_size(what: str, size: str, sizes: dict[str, dict[str, int]]) -> None:
    if size not in sizes:
        raise ValueError(f"{what}(size={size!r}): known sizes are {', '.join(sizes)}")


def _check_fields(what: str, given: dict[str, object], default: object) -> None:
    """Hugging Face keeps a misspelt field without a word, and the model is another one than was meant."""
    for name in given:
        if not hasattr(default, name) and name != "attn_implementation":
            near = get_close_matches(name, vars(default), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"see {type(default).__name__} for its fields"
            raise TypeError(f"{what}() got {name}={given[name]!r}, which is no field of its configuration; {hint}")
