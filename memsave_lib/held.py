"""What autograd holds in place of a saved tensor, and who wants to know about it.

PyTorch does not check versions of tensors that went through saved-tensor hooks: without a check of our own, a tensor
that changes between forward and backward would give a wrong gradient and no error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from memsave_lib import _compat


class Held:
    """A saved tensor that stays where it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: a node that held its own output would never be freed. A detached tensor shares the version.
        self.tensor, self.version = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        check_version(self.tensor, self.version)
        return self.tensor


def witness(tensor: Tensor) -> Tensor:
    """A tensor without memory that shares the version of ``tensor``: it tells whether that was changed in place."""
    shadow = tensor.detach()
    shadow.data = tensor.new_empty(0)
    return shadow


def check_version(tensor: Tensor, version: int, shape: Sequence[int] | None = None) -> None:
    """RuntimeError, in PyTorch's words, when a saved tensor is not what it was when it was saved.

    Args:
        tensor: the saved tensor or its witness.
        shape: of the saved tensor, where it is a witness that is asked.
    """
    if tensor._version != version:
        shape = tensor.shape if shape is None else shape
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(shape)}] is at version {tensor._version}; expected version {version} instead"
        )


class MemoryListener(ABC):
    """A dispatch mode that counts memory, to which hooks further inside tell what it cannot see itself."""

    @abstractmethod
    def keep(self, tensor: Tensor) -> Held:
        """``tensor`` was saved for backward and stays where it is, for as long as the result lives."""

    @abstractmethod
    def came_back(self, tensor: Tensor) -> None:
        """Memory for an activation that was sent away is taken again."""

    @abstractmethod
    def stored(self, lane: str, nbytes: int) -> None:
        """So many bytes more (or, negative, fewer) lie on the ``"host"`` or the ``"disk"``."""

    @abstractmethod
    def aside(self) -> AbstractContextManager[None]:
        """While this lasts, operations are not the step's own and are not counted."""


def listener() -> MemoryListener | None:
    """The one who counts memory in this thread right now; meters do not nest, so there is at most one."""
    return next((mode for mode in _compat.active_dispatch_modes() if isinstance(mode, MemoryListener)), None)


def keep(tensor: Tensor) -> Held:
    """Hold a saved tensor in place, and tell who counts."""
    counting = listener()
    return Held(tensor) if counting is None else counting.keep(tensor)
