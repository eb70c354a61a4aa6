"""What torch.compile makes, taken from under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def compile_under_budgets(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], budgets: Sequence[float], backend: str
) -> list[Callable[..., Tensor]]:
    """``torch.compile(function)`` for each ``activation_memory_budget``: callables that take tensors like ``inputs``.

    The budget is a setting of AOTAutograd's private configuration, read while it partitions; the configuration's own
    ``patch`` puts it back. A compiled function runs uncompiled, without a word, while a dispatch mode such as the meter
    is active, so what the backend made is taken from under it, to be called directly: the same graphs. ``reset`` then
    forgets all compiled code of this process, the caller's own included, which is compiled again when it is called.
    """
    # Not above: loading the compiler takes a second, and hardly anybody needs it.
    import torch._dynamo
    from torch._functorch import config

    made: list[Callable[..., Sequence[Tensor]]] = []
    arguments: list[Tensor] = []  # of the graph: the inputs and whatever else the function reads, in the graph's order

    def compile_each(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
        for budget in budgets:
            with config.patch(activation_memory_budget=budget):
                made.append(torch._dynamo.lookup_backend(backend)(graph, examples))

        def first_call(*found: Tensor) -> Sequence[Tensor]:
            arguments.extend(found)
            return made[0](*found)

        return first_call

    try:
        torch.compile(function, backend=compile_each, fullgraph=True, dynamic=False)(*inputs)
    finally:
        torch._dynamo.reset()
    places = [next((at for at, tensor in enumerate(inputs) if tensor is argument), None) for argument in arguments]

    def calling(compiled: Callable[..., Sequence[Tensor]]) -> Callable[..., Tensor]:
        def call(*tensors: Tensor) -> Tensor:
            given = zip(arguments, places, strict=True)
            return compiled(*(argument if at is None else tensors[at] for argument, at in given))[0]

        return call

    return [calling(compiled) for compiled in made]


def load_checkpointing() -> None:
    """``torch.utils.checkpoint`` imports torch's compiler at its first call, which takes seconds: do that now."""
    import torch._dynamo  # noqa: F401
