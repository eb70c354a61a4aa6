"""What autograd keeps for one operation: which tensors, under which names, in how many bytes.

    print(saved_for_backward(lambda x, W: x @ W, x=x, W=W))

The answer comes from PyTorch's own saved-tensor hooks, which see every tensor that an operation packs for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memsave_lib.units import human_bytes

INSIDE = "made inside"


@dataclass(frozen=True)
class SavedTensor:
    """One storage that autograd holds: ``name`` is that of an input or parameter, "output", or "made inside"."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    parameter: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        note = "  a parameter: alive anyway" if self.parameter else ""
        return f"{self.name:<14}{self.shape!s:<20}{dtype:<10}{human_bytes(self.nbytes):>10}{note}"


@dataclass(frozen=True)
class Saved:
    """Everything that one operation packs for backward, each storage once: inputs, output, parameters, what it made."""

    tensors: tuple[SavedTensor, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the saved activations: parameters, which are alive anyway, left out."""
        return sum(tensor.nbytes for tensor in self.tensors if not tensor.parameter)

    def __str__(self) -> str:
        return "\n".join(map(str, self.tensors)) or "nothing"


def saved_for_backward(operation: Callable[..., Tensor], **inputs: Tensor) -> Saved:
    """Run ``operation(**inputs)`` and list what autograd keeps until backward.

    Args:
        operation: a function or a module. A module's parameters are listed under their own names.
        inputs: tensors by name. One that needs a gradient must say so with ``requires_grad``.
    """
    packed: dict[int, Tensor] = {}  # by address; holding the tensors keeps every address taken

    def pack(tensor: Tensor) -> Tensor:
        packed.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = operation(**inputs)
    parameters = dict(operation.named_parameters()) if isinstance(operation, nn.Module) else {}
    parameters |= {name: tensor for name, tensor in inputs.items() if isinstance(tensor, nn.Parameter)}
    named = {tensor.untyped_storage().data_ptr(): name for name, tensor in (parameters | inputs).items()}
    named.setdefault(output.untyped_storage().data_ptr(), "output")
    known = {**parameters, **inputs, "output": output}
    saved = []
    for address, tensor in packed.items():
        name = named.get(address, INSIDE)
        original = known.get(name, tensor)
        nbytes = tensor.untyped_storage().nbytes()
        saved.append(SavedTensor(name, tuple(original.shape), tensor.dtype, nbytes, parameter=name in parameters))
    order = list(dict.fromkeys((*inputs, "output", *parameters, INSIDE)))
    return Saved(tuple(sorted(saved, key=lambda tensor: order.index(tensor.name))))


def saved_table(operations: Mapping[str, Saved], unit_bytes: int) -> str:
    """One line an operation: what it keeps, and how much of it in units of ``unit_bytes`` (one hidden state, say)."""
    lines = [f"{'operation':<12}{'units':>7}   keeps"]
    for name, saved in operations.items():
        lines.append(f"{name:<12}{saved.nbytes / unit_bytes:>7.2f}   {_in_words(saved)}")
    return "\n".join(lines)


def _in_words(saved: Saved) -> str:
    """``"x, the parameters weight, bias, made inside: (2, 8), (2, 8)"``."""
    words = [one.name for one in saved.tensors if one.name != INSIDE and not one.parameter]
    parameters = [one.name for one in saved.tensors if one.parameter]
    words += [f"the parameter{'s' if len(parameters) > 1 else ''} {', '.join(parameters)}"] if parameters else []
    inside = [str(one.shape) for one in saved.tensors if one.name == INSIDE]
    words += [f"{INSIDE}: {', '.join(inside)}"] if inside else []
    return ", ".join(words) or "nothing"
