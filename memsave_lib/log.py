"""The meter's log: a dispatch mode that writes down when storages appear, vanish or change their size.

It notes facts and decides nothing that :mod:`memsave_lib.trace` can decide later, when whole lives are known.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from memsave_lib import _compat
from memsave_lib.held import Held, MemoryListener
from memsave_lib.regions import is_recomputing
from memsave_lib.trace import Audit, AwayEvent, Event, StorageFacts, Trace

_DETACH = torch.ops.aten.detach.default
# The one operation of torch.tensor() that a dispatch mode sees; its argument is what was just made.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


class Stopped(Exception):
    """The step was stopped from outside, between two operations."""


class _StorageRef(weakref.ref):
    """Knows what it referred to after that is gone."""

    __slots__ = ("facts", "key")

    facts: StorageFacts
    key: int


class _Saved(Held):
    """What autograd holds in place of a saved tensor; when the graph drops it, the storage is held once less."""

    __slots__ = ("facts",)

    def __init__(self, tensor: Tensor, facts: StorageFacts) -> None:
        super().__init__(tensor)
        self.facts = facts
        facts.held += 1

    def __del__(self) -> None:
        self.facts.held -= 1


class Log(_compat.TorchDispatchMode, MemoryListener):
    """Everything that happens to storages between :meth:`listen` and the end of its stack, in order."""

    def __init__(
        self, model: nn.Module | None, optimizer: Optimizer | None, stop: threading.Event | None, audit: bool
    ) -> None:
        super().__init__()
        self.live_bytes = 0
        self.history: list[tuple[float, int]] = []
        self._events: list[Event] = []
        self._initial: list[StorageFacts] = []
        self._initial_blocks: dict[int, int] = {}  # address -> bytes, for the audit alone: fake tensors have no address
        self._audited = audit
        self._refs: dict[int, _StorageRef] = {}  # by id of the storage object, which lives as long as the storage
        self._saved_bytes = 0
        self._model, self._optimizer, self._stop = model, optimizer, stop
        self._module_names = {module: name for name, module in model.named_modules()} if model else {}
        self._parameter_names = {id(p): name for name, p in model.named_parameters()} if model else {}
        self._op_names: dict[torch._ops.OpOverload, str] = {}
        self._counting = True
        self._away: list[AwayEvent] = []
        self._thread = threading.get_ident()
        self._leaf_hooks: list[RemovableHandle] = []
        self._path: list[str] = []  # names of the modules whose forward is running
        self._span_starts: list[int] = [0]  # sequence number at which ...
        self._span_paths: list[str] = [""]  # ... this module took over
        self._outside = "forward"  # the phase outside autograd's engine: forward or optimizer
        self._phase, self._module, self._op = "forward", "", ""
        self._epoch = 0  # counts changes between forward, backward and optimizer
        self._start = time.perf_counter()
        self._start_ns = time.time_ns()

    # What the meter listens to

    def listen(self, stack: ExitStack) -> None:
        stack.callback(self._close)
        for parameter in self._model.parameters() if self._model else ():
            self._existing(parameter, "parameter")
        for buffer in self._model.buffers() if self._model else ():
            self._existing(buffer, "buffer")
        self._mark_gradients()
        self._mark_optimizer(self._optimizer)
        for handle in (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        ):
            stack.callback(handle.remove)
        stack.enter_context(saved_tensors_hooks(self.keep, Held.unpack))
        stack.enter_context(self)

    def _close(self) -> None:
        self._end_of_forward()
        self._mark_gradients()
        for handle in self._leaf_hooks:
            handle.remove()
        self._refs.clear()  # from here on nothing is recorded: the callbacks die with their references

    def _enter_module(self, module: nn.Module, inputs: object) -> None:
        if threading.get_ident() == self._thread:
            self._path.append(self._module_names.get(module, type(module).__name__))
            self._note_span()

    def _leave_module(self, module: nn.Module, inputs: object, output: object) -> None:
        if threading.get_ident() == self._thread and self._path:
            self._path.pop()
            self._note_span()

    def _note_span(self) -> None:
        self._span_starts.append(_compat.sequence_number())
        self._span_paths.append(self._path[-1] if self._path else "")

    def _enter_optimizer(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if threading.get_ident() == self._thread:
            self._mark_gradients()
            self._outside = "optimizer"

    def _leave_optimizer(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if threading.get_ident() == self._thread:
            self._mark_optimizer(optimizer)
            self._outside = "forward"

    # What hooks further inside tell, and autograd itself

    def keep(self, tensor: Tensor) -> Held:
        facts = self._existing(tensor)
        if facts is None:
            return Held(tensor)
        facts.packed = True
        return _Saved(tensor, facts)

    def came_back(self, tensor: Tensor) -> None:
        self._take_place("bring back")
        self._appeared(tensor)
        self._existing(tensor).packed = True

    def stored(self, lane: str, nbytes: int) -> None:
        self._away.append(AwayEvent(time.perf_counter() - self._start, len(self._events), lane, nbytes))

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._counting, before = False, self._counting
        try:
            yield
        finally:
            self._counting = before

    def __torch_dispatch__(
        self, op: torch._ops.OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if op is _DETACH or not self._counting:  # detach: a view, made for every saved tensor, nothing to note
            return op(*args, **(kwargs or {}))
        if self._stop is not None and self._stop.is_set():
            raise Stopped("the step was stopped")
        name = self._op_names.get(op)
        if name is None:
            name = self._op_names.setdefault(op, op._schema.name.split("::")[1])
        self._take_place(name)
        tensors = list(_tensors(args))
        if kwargs:
            tensors.extend(_tensors(kwargs.values()))
        for tensor in tensors:
            if op is _LIFT_FRESH:
                self._appeared(tensor)
            self._existing(tensor)
        output = op(*args, **(kwargs or {}))
        for tensor in _tensors((output,)):
            self._appeared(tensor)
        if _compat.is_mutable(op):
            for tensor in tensors:
                self._resized(tensor)
        return output

    # Where the step stands

    def _take_place(self, operation: str) -> None:
        self._enter_phase(self._current_phase())
        self._op = operation
        self._module = self._path[-1] if self._path else ""
        if self._phase == "backward":
            self._module = self._recorded_by(_compat.backward_node())

    def _current_phase(self) -> str:
        if is_recomputing():
            return "recompute"
        if not _compat.in_backward():
            return self._outside
        return "recompute" if torch.is_grad_enabled() and self._foreign_recomputation() else "backward"

    def _foreign_recomputation(self) -> bool:
        """Gradients are on inside backward: somebody else's checkpoint runs forward again, or it is a double backward.

        A checkpoint puts its own hooks above the meter's; the reentrant kind runs inside its own node.
        """
        return _compat.other_hooks_are_innermost(self.keep) or "Checkpoint" in _compat.backward_node().name()

    def _enter_phase(self, phase: str) -> None:
        if phase == self._phase:
            return
        before, after = (name if name in ("forward", "optimizer") else "backward" for name in (self._phase, phase))
        if before != after:
            if after == "backward":
                self._end_of_forward()
            self._epoch += 1
        self._phase = phase

    def _end_of_forward(self) -> None:
        held = sum(ref.facts.nbytes for ref in self._refs.values() if ref.facts.held and ref.facts.label is None)
        self._saved_bytes = max(self._saved_bytes, held)

    def _recorded_by(self, node: Any) -> str:
        """The module whose forward recorded this backward node; for a leaf's gradient, the parameter's name."""
        if node is None:
            return ""
        if hasattr(node, "variable"):
            return self._parameter_names.get(id(node.variable), "")
        return self._span_paths[bisect_right(self._span_starts, _compat.sequence_number(node)) - 1]

    # What happens to storages

    def _existing(self, tensor: Tensor, label: str | None = None) -> StorageFacts | None:
        """The facts of a storage that is there; one never seen before was there before the step."""
        storage = _storage(tensor)
        if storage is None:
            return None
        ref = self._refs.get(id(storage))
        if ref is None:
            facts = StorageFacts(storage.nbytes(), existed_before=True)
            if isinstance(tensor, nn.Parameter):
                facts.label = "parameter"
            self._initial.append(facts)
            if self._audited:
                self._initial_blocks[storage.data_ptr()] = facts.nbytes
            ref = self._watch(storage, facts)
            self.live_bytes += facts.nbytes
        if tensor.is_leaf and tensor.requires_grad and not ref.facts.leaf_hooked:
            ref.facts.leaf_hooked = True
            self._leaf_hooks.append(tensor.register_post_accumulate_grad_hook(self._mark_gradient))
        if label is None and ref.facts.label is None and isinstance(tensor, nn.Parameter):
            label = "parameter"  # built, cast or exchanged during the step
        if label is not None:
            ref.facts.label = label
        return ref.facts

    def _appeared(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        if storage is None or id(storage) in self._refs:
            return
        facts = StorageFacts(storage.nbytes(), born_in=self._phase, born_epoch=self._epoch)
        self._watch(storage, facts)
        self._note(facts, facts.nbytes)

    def _watch(self, storage: torch.UntypedStorage, facts: StorageFacts) -> _StorageRef:
        ref = _StorageRef(storage, self._vanished)
        ref.facts, ref.key = facts, id(storage)
        self._refs[ref.key] = ref
        return ref

    def _vanished(self, ref: _StorageRef) -> None:
        if self._refs.pop(ref.key, None) is None:
            return
        # Garbage may be collected in a thread that has no part in the step, and tells nothing about its phase.
        if threading.get_ident() == self._thread or self in _compat.active_dispatch_modes():
            self._enter_phase(self._current_phase())
        ref.facts.died_in, ref.facts.died_epoch = self._phase, self._epoch
        self._note(ref.facts, -ref.facts.nbytes)

    def _resized(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        ref = None if storage is None else self._refs.get(id(storage))
        if ref is not None and storage.nbytes() != ref.facts.nbytes:
            delta = storage.nbytes() - ref.facts.nbytes
            ref.facts.nbytes += delta
            self._note(ref.facts, delta)

    def _note(self, facts: StorageFacts, delta: int) -> None:
        if delta == 0:
            return
        self.live_bytes += delta
        seconds = time.perf_counter() - self._start
        self._events.append(Event(seconds, facts, delta, self._phase, self._module, self._op))
        self.history.append((seconds, self.live_bytes))

    def _mark_gradient(self, leaf: Tensor) -> None:
        if leaf.grad is not None:
            self._existing(leaf.grad, "gradient")

    def _mark_gradients(self) -> None:
        for parameter in self._model.parameters() if self._model else ():
            self._mark_gradient(parameter)

    def _mark_optimizer(self, optimizer: Optimizer | None) -> None:
        for state in optimizer.state.values() if optimizer else ():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._existing(value, "optimizer")

    def trace_so_far(self) -> Trace:
        """Copies, because the step goes on adding; the events first, so that every storage of theirs is known."""
        events = tuple(self._events)
        return Trace(events, tuple(self._initial), self._saved_bytes, None, tuple(self._away))

    def trace(self, profile: torch.profiler.profile | None) -> Trace:
        audit = None if profile is None else self._audit(_compat.allocation_events(profile))
        return Trace(self._events, self._initial, self._saved_bytes, audit, tuple(self._away))

    def _audit(self, allocations: list[tuple[int, int, int]]) -> Audit:
        """The allocator's live bytes on top of those at the start; deaths of blocks unknown to the meter left out."""
        known = dict(self._initial_blocks)
        seconds, changes = [], []
        for nanoseconds, address, nbytes in allocations:
            if nbytes > 0:
                known[address] = nbytes
            elif known.get(address) != -nbytes:
                continue
            else:
                del known[address]
            seconds.append((nanoseconds - self._start_ns) / 1e9)
            changes.append(nbytes)
        live = np.cumsum(changes, dtype=np.int64)
        return Audit(int(live.max(initial=0)), np.array(seconds), live)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among an operator's arguments or results; lists of tensors are as deep as they nest."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    # Sparse and jagged tensors have none of their own, and what kernels make for them does not pass through dispatch.
    return tensor.untyped_storage() if tensor.layout is torch.strided else None
