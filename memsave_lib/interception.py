"""Change what an object does for a while, without leaving a trace on the object.

An intercepted object gets a subclass of its own class, with the same name and a few members overridden, and nothing
else: no wrapper module, no hook, no instance attribute. Its ``state_dict`` keys, ``isinstance`` checks and module names
stay as they are, and a copy or a pickle made meanwhile is of the original class.

PyTorch's ``fully_shard`` does the same. Where it comes second, its class stands on ours; on release ours stays
in between, empty.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from typing import Any

_MARK = "_memsave_intercepted"
_MEMBERS = "_memsave_members"


def intercept(instance: object, members: Mapping[str, object]) -> None:
    """Override ``members`` for this one object until :func:`release`."""
    original = type(instance)
    namespace = {
        **members,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": _reduce_as(original),
        _MARK: original,
        _MEMBERS: tuple(members),
    }
    instance.__class__ = type(original)(original.__name__, (original,), namespace)


def release(instance: object) -> None:
    """Give an intercepted object the behavior of its own class back."""
    kind = _class_of_ours(instance)
    if kind is type(instance):
        instance.__class__ = vars(kind)[_MARK]
    # A class lives until the garbage collector comes by; its members must not hold a model alive till then.
    for name in (*vars(kind)[_MEMBERS], "__reduce_ex__", _MARK):
        delattr(kind, name)


def is_intercepted(instance: object) -> bool:
    return _class_of_ours(instance) is not None


def original_class(instance: object) -> type:
    """The class that an object had before it was intercepted; its class, if it is not."""
    kind = _class_of_ours(instance)
    return type(instance) if kind is None else vars(kind)[_MARK]


def _class_of_ours(instance: object) -> type | None:
    """What :func:`intercept` made for the object: its class, or one below, where somebody else has come later."""
    return next((kind for kind in type(instance).__mro__ if _MARK in vars(kind)), None)


def _reduce_as(original: type) -> Callable[[Any, int], tuple]:
    """A ``__reduce_ex__`` that copies and pickles the object as an instance of ``original``."""

    def __reduce_ex__(self: Any, protocol: int) -> tuple:
        function, arguments, *rest = original.__reduce_ex__(self, protocol)
        if function is copyreg.__newobj__:
            # pickle insists that __newobj__ rebuilds the very class of the object, so name other constructors.
            if len(arguments) == 1:
                return (copyreg._reconstructor, (original, object, None), *rest)
            return (original.__new__, (original, *arguments[1:]), *rest)
        swapped = tuple(original if argument is type(self) else argument for argument in arguments)
        return (original if function is type(self) else function, swapped, *rest)

    return __reduce_ex__
