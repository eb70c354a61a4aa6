"""Where blocks stand in a model: their names, the module whose call runs them, and what stands in a strategy's way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from memsave_lib import _compat, interception
from memsave_lib.plan import Plan
from memsave_lib.strategies import Strategy

SWITCH_IS_ON = (
    "Hugging Face's own gradient checkpointing is on, and would recompute every block a second time; "
    "switch it off first: memsave_lib.models.hugging_face_checkpointing(model, on=False)"
)
BLOCK_BY_BLOCK = "use a strategy that recomputes block by block (FullCheckpoint, Selective)"


def _paths(model: nn.Module, blocks: list[nn.Module]) -> dict[nn.Module, list[str]]:
    paths: dict[nn.Module, list[str]] = {block: [] for block in blocks}
    for path, module in model.named_modules(remove_duplicate=False):
        if module in paths:
            paths[module].append(path)
    return paths


def block_names(model: nn.Module, blocks: list[nn.Module]) -> list[str]:
    """What errors call each block: its place in the model, "transformer.h.3"; a shared block's places in turn."""
    paths = {block: iter(names) for block, names in _paths(model, blocks).items()}
    return [next(paths[block], None) or f"block {index}" for index, block in enumerate(blocks)]


def calling_module(model: nn.Module, blocks: list[nn.Module]) -> nn.Module | None:
    """The innermost module whose call runs all blocks; None when nothing but bare containers holds them."""
    parents = [path.split(".")[:-1] for names in _paths(model, blocks).values() for path in names if path]
    if not parents:
        return None
    shared = []
    for level in zip(*parents, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    while True:
        parent = model.get_submodule(".".join(shared))
        if not isinstance(parent, nn.ModuleList | nn.ModuleDict):
            return parent
        if not shared:
            return None
        shared.pop()


def has_regions(block: nn.Module) -> bool:
    """Whether a block names the parts of itself that SelectiveOps can recompute."""
    return hasattr(type(block), "recompute_regions")


def check_applicable(model: nn.Module, strategy: Strategy, plan: Plan, blocks: list[nn.Module]) -> None:
    """ValueError that says what to do, when ``model`` cannot follow ``plan``."""
    present = set(model.modules())
    for index, block in enumerate(blocks):
        if block not in present:
            raise ValueError(f"blocks[{index}] ({type(block).__name__}) is not a part of {type(model).__name__}")
        if not has_regions(block) and set(plan.recompute_ops) - {"attention"}:
            raise ValueError(
                f"{strategy} needs blocks that name their parts in `recompute_regions`, which {type(block).__name__} "
                f"does not; on such blocks SelectiveOps can recompute 'attention' only"
            )
    owner = calling_module(model, blocks)
    for module in (model, owner or model, *blocks):
        if interception.is_intercepted(module):
            raise ValueError(
                f"{type(module).__name__} follows a strategy already: remove() that handle, or leave its with block, "
                f"before you apply {strategy}"
            )
        if _compat.is_compiled(module):
            raise ValueError(
                f"{type(module).__name__} is compiled, and compiled code never asks the strategy: apply it to the "
                f"model that is not compiled"
            )
    if any(_compat.hugging_face_switch_is_on(module) for module in present):
        raise ValueError(SWITCH_IS_ON)
    if owner is None and plan.has_chunks:
        raise ValueError(
            f"{strategy} runs several blocks as one region, which needs a module that calls them in order; "
            f"{type(model).__name__} does not: use memsave_lib.run(blocks, x, strategy)"
        )


def check_strategy(strategy: Strategy) -> Strategy:
    """TypeError unless this is an instance of a strategy."""
    if isinstance(strategy, Strategy):
        return strategy
    hint = f"{strategy.__name__}()" if isinstance(strategy, type) else "FullCheckpoint()"
    raise TypeError(f"strategy must be a strategy such as {hint}, got {strategy!r}")


def check_blocks(blocks: Sequence[Any]) -> list[Any]:
    """The blocks as a list; an error for an empty one, or for entries that cannot be called."""
    blocks = list(blocks)
    for index, block in enumerate(blocks):
        if not callable(block):
            raise TypeError(f"blocks[{index}] cannot be called: {block!r}")
    if not blocks:
        raise ValueError("blocks is empty: there is nothing to apply a strategy to")
    return blocks
