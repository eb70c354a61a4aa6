"""Every private or version-dependent call into torch and transformers, each with its reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value", "layer_past", "kv_cache")


def tree_flatten(tree: object) -> tuple[list[Any], Any]:
    """Leaves of nested tuples, lists and dicts, and the shape to rebuild them.

    Private module, but the one that torch.func, export and checkpointing themselves use; its public twin
    ``torch.utils.pytree`` exists only in the newest releases.
    """
    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: object) -> Any:
    return _pytree.tree_unflatten(leaves, spec)


def in_backward() -> bool:
    """Whether autograd is executing a graph in this thread; torch offers no public question for it."""
    return torch._C._current_graph_task_id() != -1


def backward_node() -> object | None:
    """The autograd node that this thread executes, or None."""
    return torch._C._current_autograd_node()


def sequence_number(node: object | None = None) -> int:
    """The number that the next recorded node will get, or that ``node`` got; later operations have larger numbers.

    The only link between a node in backward and the moment in forward that recorded it.
    """
    return torch._C._autograd._get_sequence_nr() if node is None else node._sequence_nr()


def is_mutable(op: torch._ops.OpOverload) -> bool:
    """Whether an operator writes to one of its arguments (and so may resize its storage)."""
    return op._schema.is_mutable


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` wraps this module: as a wrapper (private class) or in place (private attribute)."""
    compiled_in_place = getattr(module, "_compiled_call_impl", None) is not None
    return compiled_in_place or type(module).__name__ == "OptimizedModule"


def hugging_face_switch_is_on(module: nn.Module) -> bool:
    """Whether Hugging Face's own gradient checkpointing is active in this module; the attribute is its convention."""
    return getattr(module, "gradient_checkpointing", False) is True


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
