"""Models of Hugging Face: switches, caches, configurations, attention masks."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memsave_lib._compat.fake_tensors import holds_ones

CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value", "layer_past", "kv_cache")


def hugging_face_switch_is_on(module: nn.Module) -> bool:
    """Whether Hugging Face's own gradient checkpointing is active in this module; the attribute is its convention."""
    return getattr(module, "gradient_checkpointing", False) is True


def switch_hugging_face_checkpointing(model: nn.Module, on: bool, **settings: int) -> None:
    """Turn Hugging Face's own checkpointing on or off: the methods were renamed in transformers 5.23."""
    verb = "enable" if on else "disable"
    renamed = getattr(model, f"activation_checkpointing_{verb}", None)
    (renamed or getattr(model, f"gradient_checkpointing_{verb}"))(**settings)


def caches_in(args: tuple, kwargs: dict[str, Any]) -> Iterator[str]:
    """Names of the arguments that carry a key-value cache; their name and class differ between versions."""
    cache_utils = sys.modules.get("transformers.cache_utils")
    cache_class = getattr(cache_utils, "Cache", ())
    for position, value in enumerate(args):
        if isinstance(value, cache_class):
            yield f"argument {position}"
    for name, value in kwargs.items():
        if isinstance(value, cache_class) or (name in CACHE_ARGUMENTS and value is not None):
            yield name


def configs_with_cache(model: nn.Module) -> list[object]:
    """Distinct configurations in a Hugging Face model (sub-models have their own) that switch the cache on."""
    found: dict[int, object] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        # Plain dicts and user classes called config are left alone: only the flag's exact meaning counts.
        if hasattr(config, "__dict__") and vars(config).get("use_cache") is True:
            found[id(config)] = config
    return list(found.values())


def model_from_config(config: object) -> nn.Module:
    """The causal language model of a Hugging Face configuration; asked for here, where transformers is loaded late."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig

    if not isinstance(config, PretrainedConfig):
        raise TypeError(
            "build_model is a function that builds a model, such as lambda: ms.gpt2(), or a configuration of Hugging "
            f"Face, got {config!r}"
        )
    # An encoder's configuration is registered as a decoder's too, which it is only when it says so.
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_decoder", None) is False:
        raise ValueError(
            f"{type(config).__name__} describes no causal language model: hand in a function that builds the one you "
            "mean, such as lambda: transformers.BertForMaskedLM(config)"
        )
    # A copy: the type is written into the configuration.
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.get_default_dtype())


def give_own_configs(model: nn.Module) -> None:
    """Exchange the configurations in a model for copies: they are about to change, and may be their maker's.

    By Hugging Face's convention every module refers to the one configuration that its model was built from.
    """
    configs = getattr(sys.modules.get("transformers"), "PretrainedConfig", ())
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, configs) or (name == "config" and "use_cache" in getattr(value, "__dict__", ())):
                vars(module)[name] = copy.deepcopy(value, memo)


def labels_per_sequence(model: nn.Module) -> bool:
    """Whether a Hugging Face model wants one label a sequence; they are told apart by a table of class names."""
    if not hasattr(model, "config"):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    names = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
    return any(kind.__name__ in names for kind in type(model).__mro__)


def decide_masks_without_values(model: nn.Module) -> None:
    """Let a Hugging Face model with fused attention decide about its masks by shapes alone.

    Whether it needs a mask of seq_len x seq_len it finds out by looking at positions; of fake ones it cannot see that
    they are plain, and makes a mask that no real run has. Registered under a name of its own is the same attention with
    masks for plain positions: made where a window is shorter than the sequence, where some token may be padding, or
    where a model adds a pattern of its own, and nowhere else.
    """
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != "sdpa":
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def mask(*, kv_length: int, **more: Any) -> Tensor | None:
        # Older versions say where the queries stand instead of how many there are.
        q_length = more["q_length"] if "q_length" in more else len(more["cache_position"])
        window, bidirectional = more.get("local_size"), more.get("allow_is_bidirectional_skip", False)
        padding = more.get("attention_mask")
        # Hugging Face asks for vmap exactly where a model has added a pattern to the mask.
        plain = (padding is None or holds_ones(padding)) and not more.get("use_vmap", False)
        if plain and (window is None or kv_length < window) and (bidirectional or q_length == kv_length):
            return None
        more |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        if padding is None and not more.get("use_vmap", False):
            # Plain positions are the same for every sequence, so a real mask is made once and shown to all.
            sequences = more.pop("batch_size")
            return sdpa_mask(batch_size=1, kv_length=kv_length, **more).expand(sequences, -1, -1, -1)
        return sdpa_mask(kv_length=kv_length, **more)

    AttentionInterface.register(_PLAIN_POSITIONS, ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionMaskInterface.register(_PLAIN_POSITIONS, mask)
    if not model._can_set_attn_implementation():
        return
    if _needs_its_own_masks(model):
        raise ValueError(
            f"{type(model).__name__} asks by name whether its attention is fused, or makes masks of its own, so that "
            'its masks cannot be foreseen: build it with attn_implementation="eager", or measure a real step with '
            "MemoryMeter"
        )
    model.set_attn_implementation(_PLAIN_POSITIONS)


def _needs_its_own_masks(model: nn.Module) -> bool:
    """Whether attention under another name would take another path; read in its source, as Hugging Face itself does."""
    module = sys.modules.get(type(model).__module__)
    try:
        source = inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):
        return False
    by_name = r"""_attn_implementation (==|in) .*["']sdpa"""
    own_masks = "allow_is_causal_skip=False|indexed_attention"
    return re.search(f"{by_name}|{own_masks}", source) is not None


_PLAIN_POSITIONS = "sdpa_of_plain_positions"


def masks_are_uncertain(model: nn.Module) -> bool:
    """Whether a model with fused attention did not let :func:`decide_masks_without_values` exchange it (Falcon).

    Its masks are then made for each sequence where a real run makes one for all.
    """
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == "sdpa"


def drops_mask_of_ones(model: nn.Module) -> bool:
    """Whether a Hugging Face model (Mamba and its like) looks into its attention mask and drops one that hides nothing.

    Told by the function that it has imported for it.
    """
    return hasattr(sys.modules.get(type(model).__module__), "create_recurrent_attention_mask")
