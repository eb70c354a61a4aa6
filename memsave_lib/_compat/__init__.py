"""Every private or version-dependent call into torch and transformers, each with its reason.

One drawer for each place that such calls go to; callers ask the room: ``_compat.in_backward()``.
"""

from memsave_lib._compat.autograd import (
    TorchDispatchMode,
    active_dispatch_modes,
    backward_node,
    in_backward,
    inside_function_transform,
    is_compiled,
    is_mutable,
    other_hooks_are_innermost,
    sequence_number,
    shares_version,
    tree_flatten,
    tree_unflatten,
)
from memsave_lib._compat.compiler import (
    compile_under_budgets,
    load_checkpointing,
)
from memsave_lib._compat.distributed import is_sharded
from memsave_lib._compat.fake_tensors import (
    FAKE_TENSORS_HAVE_NO_VALUES,
    FAKE_TENSORS_REFUSE,
    as_fake,
    fake_copy,
    fake_mode,
    holds_ones,
    is_fake,
    quiet_fake_tensors,
)
from memsave_lib._compat.hugging_face import (
    CACHE_ARGUMENTS,
    caches_in,
    configs_with_cache,
    decide_masks_without_values,
    drops_mask_of_ones,
    give_own_configs,
    hugging_face_switch_is_on,
    labels_per_sequence,
    masks_are_uncertain,
    model_from_config,
    switch_hugging_face_checkpointing,
)
from memsave_lib._compat.profiler import (
    allocation_events,
    start_memory_profile,
    stop_memory_profile,
)

__all__ = [
    "CACHE_ARGUMENTS",
    "FAKE_TENSORS_HAVE_NO_VALUES",
    "FAKE_TENSORS_REFUSE",
    "TorchDispatchMode",
    "active_dispatch_modes",
    "allocation_events",
    "as_fake",
    "backward_node",
    "caches_in",
    "compile_under_budgets",
    "configs_with_cache",
    "decide_masks_without_values",
    "drops_mask_of_ones",
    "fake_copy",
    "fake_mode",
    "give_own_configs",
    "holds_ones",
    "hugging_face_switch_is_on",
    "in_backward",
    "inside_function_transform",
    "is_compiled",
    "is_fake",
    "is_mutable",
    "is_sharded",
    "labels_per_sequence",
    "load_checkpointing",
    "masks_are_uncertain",
    "model_from_config",
    "other_hooks_are_innermost",
    "quiet_fake_tensors",
    "sequence_number",
    "shares_version",
    "start_memory_profile",
    "stop_memory_profile",
    "switch_hugging_face_checkpointing",
    "tree_flatten",
    "tree_unflatten",
]
