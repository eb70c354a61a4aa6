"""Autograd and dispatch: what runs now, in which order, and who listens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils import _python_dispatch, _pytree

# The base class of dispatch modes has no public home; torch.testing and torchao import it from here too.
TorchDispatchMode = _python_dispatch.TorchDispatchMode


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


def other_hooks_are_innermost(pack: Callable[[Tensor], Any]) -> bool:
    """Whether saved tensors go to other hooks than ``pack`` now: inside backward, somebody's checkpoint recomputes.

    Older versions of torch (2.6) do not tell the hooks in force: there, look for its checkpoint among the callers.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:
        return called_from(torch.utils.checkpoint.__file__)
    hooks = top(False)
    return hooks is None or hooks[0] != pack


def called_from(path: str) -> bool:
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
