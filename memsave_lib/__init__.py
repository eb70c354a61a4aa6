"""memsave_lib: where the memory of training a transformer goes, and how to trade it for time.

The public names below are loaded on first use, so that ``import memsave_lib`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module

_ROOM_OF = {
    **dict.fromkeys(("TransformerBlock", "BlockStack", "gpt2", "llama", "find_blocks"), "models"),
    **dict.fromkeys(
        (
            "Plan",
            "Strategy",
            "KeepAll",
            "FullCheckpoint",
            "Selective",
            "SelectiveOps",
            "Chunked",
            "Recursive",
            "Offload",
            "PerBlock",
        ),
        "strategies",
    ),
    **dict.fromkeys(("apply", "run", "is_recomputing"), "runner"),
    **dict.fromkeys(("HostStore", "DiskStore"), "stores"),
    **dict.fromkeys(("MemoryMeter", "Trace"), "meter"),
    **dict.fromkeys(("estimate", "Estimate"), "estimation"),
    # These rooms are not called compare, simulate and estimate: a submodule would take the function's place here.
    **dict.fromkeys(("simulate", "StreamTimeline"), "simulation"),
    **dict.fromkeys(("BlockCosts", "ModelCosts"), "costs"),
    **dict.fromkeys(("plan_under_budget", "PlannedStrategy"), "planner"),
    **dict.fromkeys(("fit",), "fitting"),
    **dict.fromkeys(("Device",), "devices"),
    **dict.fromkeys(("measure", "compare", "Measurement", "Comparison"), "comparison"),
}
_ROOMS = (
    "models",
    "strategies",
    "runner",
    "stores",
    "flops",
    "meter",
    "formulas",
    "devices",
    "simulation",
    "profiling",
    "estimation",
    "planner",
    "fitting",
    "comparison",
    "plots",
    "labs",
    "course",
)

__all__ = sorted((*_ROOM_OF, *_ROOMS))


def __getattr__(name: str) -> object:
    if name in _ROOM_OF:
        return getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
