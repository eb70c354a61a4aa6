"""Every private or version-dependent call into torch and transformers, each with its reason."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch, _pytree

# The base class of dispatch modes has no public home; torch.testing and torchao import it from here too.
TorchDispatchMode = _python_dispatch.TorchDispatchMode

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


def other_hooks_are_innermost(pack: Callable[[Tensor], Any]) -> bool:
    """Whether saved tensors go to other hooks than ``pack`` now: inside backward, somebody's checkpoint recomputes.

    Older versions of torch (2.6) do not tell the hooks in force: there, look for its checkpoint among the callers.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:
        return _called_from(torch.utils.checkpoint.__file__)
    hooks = top(False)
    return hooks is None or hooks[0] != pack


def _called_from(path: str) -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back
    return frame is not None


def active_dispatch_modes() -> list[object]:
    """Dispatch modes of this thread, so that a second meter can be refused."""
    return _python_dispatch._get_current_dispatch_mode_stack()


def shares_version(tensor: Tensor, witness: Tensor) -> bool:
    """Whether a change of one counts as a change of the other.

    Tensors may share memory and yet count changes apart (``.data``, ``torch.unsafe_chunk``), and no public call tells.
    The witness is marked as changed for a moment; the private context puts its counter back.
    """
    version = tensor._version
    with torch.autograd._unsafe_preserve_version_counter(witness), torch.no_grad():
        witness.zero_()
        return tensor._version != version


def inside_function_transform() -> bool:
    """Whether torch.func (vmap, grad, ...) is at work: its tensors have no storage of their own; no public question."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape but no bytes; the class has no public home."""
    return isinstance(tensor, FakeTensor)


def start_memory_profile() -> torch.profiler.profile:
    """A running profiler that records allocations.

    It warns, once in a process, when a tensor dies that is older than the profile. That is no news here, so let one die
    while nobody listens.
    """
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    older = torch.empty(1)
    with _quiet_standard_error():
        profile.start()
        del older
    return profile


def stop_memory_profile(profile: torch.profiler.profile) -> None:
    with _quiet_standard_error():
        profile.stop()


@contextmanager
def _quiet_standard_error() -> Iterator[None]:
    """Send file descriptor 2 nowhere for a moment.

    The profiler of torch 2.13 announces its start and stop there, whatever the log level, and a notebook would show it.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def allocation_events(profile: torch.profiler.profile) -> list[tuple[int, int, int]]:
    """(nanoseconds, address, ± bytes) of each allocation in a profile with ``profile_memory=True``, in order.

    The public tables add these up per operator and lose the order, and with it the peak.
    """
    found: list[tuple[int, int, int]] = []
    pending = list(profile.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return sorted(found, key=lambda allocation: allocation[0])
