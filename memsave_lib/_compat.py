"""Every private or version-dependent call into torch and transformers, each with its reason."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses import fake_tensor
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
    return isinstance(tensor, fake_tensor.FakeTensor)


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


#: What a fake tensor raises when a model wants to know its values. The classes have no public home.
FAKE_TENSORS_HAVE_NO_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)
#: The same for what torch tells by words alone: a part of its message, and what it means.
FAKE_TENSORS_REFUSE = {
    ".numpy() is not supported": "values",
    "Couldn't swap": "conversion",
    "not linked with support for": "device",
    "Torch not compiled with": "device",
}

_ATEN = torch.ops.aten
_IS_TRUE = _ATEN._local_scalar_dense.default
# Not in the oldest versions.
_GROUPED_PRODUCT = getattr(getattr(_ATEN, "_grouped_mm", None), "default", None)
_ONES = (_ATEN.ones.default, _ATEN.ones_like.default, _ATEN.new_ones.default)
_FILLED = (_ATEN.full.default, _ATEN.full_like.default, _ATEN.new_full.default)
_ARANGE = (_ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step)
_SAME_ELEMENTS = (
    _ATEN._to_copy.default,
    _ATEN.alias.default,
    _ATEN.clone.default,
    _ATEN.detach.default,
    _ATEN.expand.default,
    _ATEN.repeat.default,
    _ATEN.squeeze.dim,
    _ATEN.unsqueeze.default,
    _ATEN.view.default,
)
_SOME_ELEMENTS = (_ATEN.select.int, _ATEN.slice.Tensor)


class _FakeMode(fake_tensor.FakeTensorMode):
    """Fake tensors of which a few values are known: where positions run from 0 on, and where all elements are one.

    So much of a tensor's values a language model asks for, and whoever makes it knows.
    """

    def dispatch(
        self, func: torch._ops.OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _IS_TRUE and args[0].dtype is torch.bool and _called_from(nn.init.__file__):
            return False  # truncated initializations draw again as long as values are out of bounds
        if func is _GROUPED_PRODUCT:
            return _grouped_product(*args, **(kwargs or {}))
        _check_rows(func, args)
        _check_mask_of_ones(func, args)
        output = super().dispatch(func, types, args, kwargs)
        known = _values_after(func, args, kwargs)
        if known is not None:
            _know(output, known)
        return output


def _know(tensor: Tensor, values: tuple[float, float]) -> None:
    """Remember of a fake tensor its smallest and its largest element, as long as nobody writes to it."""
    tensor._known_values = (tensor._version, values)


def _known(tensor: object) -> tuple[float, float] | None:
    version, values = getattr(tensor, "_known_values", (None, None))
    return values if values is not None and version == tensor._version else None


def holds_ones(tensor: Tensor) -> bool:
    """Whether a fake tensor is known to hold ones only."""
    return _known(tensor) == (1, 1)


def _values_after(
    func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any] | None
) -> tuple[float, float] | None:
    """Smallest and largest element of what an operation makes, where that is certain."""
    if func in _ONES:
        return 1, 1
    if func in _FILLED:
        return (args[1], args[1]) if isinstance(args[1], int | float) else None
    if func in _ARANGE:
        numbers = range(*args) if args and all(isinstance(bound, int) for bound in args) else ()
        return (min(numbers), max(numbers)) if numbers else None
    known = _known(args[0]) if args else None
    if known is None:
        return None
    if func in _SAME_ELEMENTS or (func in _SOME_ELEMENTS and known[0] == known[1]):
        return known
    if func is _ATEN.cumsum.default and known == (1, 1):
        return 1, args[0].shape[args[1]]
    if func is _ATEN.mul.Tensor and _known(args[1]) == (1, 1):
        return known
    if func in (_ATEN.add.Tensor, _ATEN.sub.Tensor) and isinstance(args[1], int) and not kwargs:
        shift = args[1] if func is _ATEN.add.Tensor else -args[1]
        return known[0] + shift, known[1] + shift
    return None


def _check_rows(func: torch._ops.OpOverload, args: tuple) -> None:
    """What a real table refuses: to be asked for a row that it does not have."""
    asked: list[tuple[int, object]] = []
    if func is _ATEN.embedding.default:
        asked = [(args[0].shape[0], args[1])]
    elif func in (_ATEN.gather.default, _ATEN.index_select.default):
        asked = [(args[0].shape[args[1]], args[2])]
    elif func is _ATEN.index.Tensor:
        asked = list(zip(args[0].shape, args[1], strict=False))
    for rows, indices in asked:
        known = _known(indices)
        if known is not None and known[1] >= rows:
            raise ValueError(
                f"a table of {rows} rows is asked for row {known[1]:.0f}: is seq_len longer than the positions of this "
                "model? Build it with more, such as n_positions= or max_position_embeddings="
            )


def _check_mask_of_ones(func: torch._ops.OpOverload, args: tuple) -> None:
    """Refuse what a real run would not do: build a mask for attention in both directions where nothing is hidden.

    Attention that is written out ("eager") looks whether it needs one. Fake tensors take it to the building, and there
    is no telling it better, as there is with :func:`decide_masks_without_values`; but it can be seen on its way.
    """
    if func is not _ATEN.index.Tensor or args[0].dtype is not torch.bool or not holds_ones(args[0]):
        return
    callers = _names_of_callers()
    if "eager_mask" in callers and any("bidirectional" in name for name in callers):
        raise ValueError(
            "attention that is written out drops an attention mask that hides nothing, but only where it can see its "
            'values: leave the mask out of the inputs, or build the model with attn_implementation="sdpa"'
        )


def _names_of_callers() -> set[str]:
    frame, names = sys._getframe(1), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def _grouped_product(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The result of a product in groups of rows, as experts make them.

    Torch's own answer on fake tensors is for bfloat16 alone; on a CPU the operation takes every type.
    """
    for matrix in (left, right):
        if any(stride != 1 and stride * matrix.itemsize % 16 for stride in matrix.stride()[-2:]):
            raise RuntimeError(f"strides should be multiple of 16 bytes, got {matrix.stride()} of {matrix.dtype}")
    groups = left.shape[:-2] or right.shape[:-2] or (len(offs),)
    rows, columns = left.shape[-2], right.shape[-1]
    out_dtype = out_dtype or left.dtype
    padded = -(-columns * out_dtype.itemsize // 16) * 16 // out_dtype.itemsize  # every row begins at 16 bytes
    if left.dim() == right.dim():
        shape, strides = (*groups, rows, columns), (rows * padded, padded, 1)
    else:
        shape, strides = (rows, columns), (padded, 1)
    return left.new_empty_strided(shape, strides, dtype=out_dtype)


def fake_mode() -> AbstractContextManager[None]:
    """A context in which every tensor that is made has a shape but no bytes.

    Private, but what torch.export and torch.compile themselves trace with; there is no public one. A real tensor that a
    model holds outside of parameters and buffers is taken in as a fake one.
    """
    return _FakeMode(allow_non_fake_inputs=True)


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Torch logs an error with its stack before it raises it, for its compiler's sake; here whoever calls is told."""
    here = threading.get_ident()

    def from_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != here

    fake_tensor.log.addFilter(from_elsewhere)
    try:
        yield
    finally:
        fake_tensor.log.removeFilter(from_elsewhere)


def fake_copy(model: nn.Module, mode: Any) -> nn.Module:
    """A copy of a model with fake parameters and buffers: shared ones stay shared, nothing is allocated."""
    memo = {
        id(tensor): mode.from_tensor(tensor, static_shapes=True) for tensor in (*model.parameters(), *model.buffers())
    }
    copied = copy.deepcopy(model, memo)
    for parameter in copied.parameters():
        parameter.grad = None
    return copied


def model_from_config(config: object) -> nn.Module:
    """The causal language model of a Hugging Face configuration; asked for here, where transformers is loaded late."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig

    if not isinstance(config, PretrainedConfig):
        raise TypeError(
            "build_model is a function that builds a model, such as lambda: ms.gpt2(), or a configuration of Hugging "
            f"Face, got {config!r}"
        )
    # An encoder's configuration is registered as a decoder's too, which it is only when it says so.
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_decoder", None) is False:
        raise ValueError(
            f"{type(config).__name__} describes no causal language model: hand in a function that builds the one you "
            "mean, such as lambda: transformers.BertForMaskedLM(config)"
        )
    # A copy: the type is written into the configuration.
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.get_default_dtype())


def give_own_configs(model: nn.Module) -> None:
    """Exchange the configurations in a model for copies: they are about to change, and may be their maker's.

    By Hugging Face's convention every module refers to the one configuration that its model was built from.
    """
    configs = getattr(sys.modules.get("transformers"), "PretrainedConfig", ())
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, configs) or (name == "config" and "use_cache" in getattr(value, "__dict__", ())):
                vars(module)[name] = copy.deepcopy(value, memo)


def as_fake(tensor: Tensor, mode: Any) -> Tensor:
    if is_fake(tensor):
        return tensor
    made = mode.from_tensor(tensor, static_shapes=True)
    if not tensor.is_floating_point() and not tensor.is_complex() and bool((tensor == 1).all()):
        _know(made, (1, 1))
    return made


def labels_per_sequence(model: nn.Module) -> bool:
    """Whether a Hugging Face model wants one label a sequence; they are told apart by a table of class names."""
    if not hasattr(model, "config"):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    names = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
    return any(kind.__name__ in names for kind in type(model).__mro__)


def decide_masks_without_values(model: nn.Module) -> None:
    """Let a Hugging Face model with fused attention decide about its masks by shapes alone.

    Whether it needs a mask of seq_len x seq_len it finds out by looking at positions; of fake ones it cannot see that
    they are plain, and makes a mask that no real run has. Registered under a name of its own is the same attention with
    masks for plain positions: made where a window is shorter than the sequence, where some token may be padding, or
    where a model adds a pattern of its own, and nowhere else.
    """
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != "sdpa":
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def mask(*, kv_length: int, **more: Any) -> Tensor | None:
        # Older versions say where the queries stand instead of how many there are.
        q_length = more["q_length"] if "q_length" in more else len(more["cache_position"])
        window, bidirectional = more.get("local_size"), more.get("allow_is_bidirectional_skip", False)
        padding = more.get("attention_mask")
        # Hugging Face asks for vmap exactly where a model has added a pattern to the mask.
        plain = (padding is None or holds_ones(padding)) and not more.get("use_vmap", False)
        if plain and (window is None or kv_length < window) and (bidirectional or q_length == kv_length):
            return None
        more |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        if padding is None and not more.get("use_vmap", False):
            # Plain positions are the same for every sequence, so a real mask is made once and shown to all.
            sequences = more.pop("batch_size")
            return sdpa_mask(batch_size=1, kv_length=kv_length, **more).expand(sequences, -1, -1, -1)
        return sdpa_mask(kv_length=kv_length, **more)

    AttentionInterface.register(_PLAIN_POSITIONS, ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionMaskInterface.register(_PLAIN_POSITIONS, mask)
    if not model._can_set_attn_implementation():
        return
    if _needs_its_own_masks(model):
        raise ValueError(
            f"{type(model).__name__} asks by name whether its attention is fused, or makes masks of its own, so that "
            'its masks cannot be foreseen: build it with attn_implementation="eager", or measure a real step with '
            "MemoryMeter"
        )
    model.set_attn_implementation(_PLAIN_POSITIONS)


def _needs_its_own_masks(model: nn.Module) -> bool:
    """Whether attention under another name would take another path; read in its source, as Hugging Face itself does."""
    module = sys.modules.get(type(model).__module__)
    try:
        source = inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):
        return False
    by_name = r"""_attn_implementation (==|in) .*["']sdpa"""
    own_masks = "allow_is_causal_skip=False|indexed_attention"
    return re.search(f"{by_name}|{own_masks}", source) is not None


_PLAIN_POSITIONS = "sdpa_of_plain_positions"


def masks_are_uncertain(model: nn.Module) -> bool:
    """Whether a model with fused attention did not let :func:`decide_masks_without_values` exchange it (Falcon).

    Its masks are then made for each sequence where a real run makes one for all.
    """
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == "sdpa"


def drops_mask_of_ones(model: nn.Module) -> bool:
    """Whether a Hugging Face model (Mamba and its like) looks into its attention mask and drops one that hides nothing.

    Told by the function that it has imported for it.
    """
    return hasattr(sys.modules.get(type(model).__module__), "create_recurrent_attention_mask")


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
