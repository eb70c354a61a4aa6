"""Offloading as a timeline: what computes, what is copied, and who waits for whom, without running anything.

``simulate(costs, plan, device)`` follows the offload engine's rules tensor by tensor on two copy lanes, one out and one
back, beside the computation. It knows neither torch nor a model: blocks are FLOPs and bytes, a device is FLOPs and
bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from memsave_lib.arguments import whole_number
from memsave_lib.costs import BlockCosts
from memsave_lib.devices import Device
from memsave_lib.lanes import Lanes, Span, StreamTimeline
from memsave_lib.plan import Plan, Segment

__all__ = ["BlockCosts", "Lanes", "Span", "StreamTimeline", "simulate"]

#: What a link's two lanes are called in a :class:`~memsave_lib.devices.Device`.
LINKS = {"host": ("copy_out", "copy_in"), "disk": ("disk_write", "disk_read")}


def simulate(
    costs: Sequence[BlockCosts], plan: Plan, device: Device, *, prefetch: int = 2, link: str = "host"
) -> StreamTimeline:
    """The timeline of one training step of a stack under ``plan``.

    The rules are those of the offload engine:

    - Tensors leave in the order in which they are packed, one after the other, on a lane of their own. Packing a tensor
      first waits until the one packed ``prefetch`` tensors earlier has left, and lets go of it; with ``prefetch=0`` a
      tensor's own copy is waited for on the spot. At the end of forward computation waits for what is still leaving.
    - Backward takes tensors in reverse. As it begins, the first ``prefetch`` start back. Taking one asks for it,
      if that has not been done yet, and for the ``prefetch`` tensors that come next, and then waits until it is back.
      Copies back have a lane of their own, in order of asking; their memory is taken when they are asked for.
    - Within a block the tensors are packed at even distances: the j-th of n after j/n of forward. Backward takes them
      back at the mirrored places: the last before it starts, the next after 1/n of it, and lets each go 1/n later.
      (Autograd itself takes the tensors of one operation in the order in which that operation saved them.)
    - A recomputed region sends its input only, when forward enters the region, and takes it before it runs again.

    Who waits for what follows from plan and ``prefetch`` alone: costs and bandwidths move the moments, not their order.
    So a faster link never makes a step longer, nor does a larger ``prefetch``, which only takes waits away; and the
    memory held, level by level, is the same on every device. It leaves out what forward's own variables hold meanwhile,
    and what is too small to leave unless the costs list it. An operation that takes several tensors takes them one by
    one here and all at once there: with every block away, attention may make the real peak that much higher.

    Args:
        costs: of each block, in order. Seconds are FLOPs over ``device.flops``, or bytes over the link's bandwidth.
        plan: segments with ``offload`` send away what they hold: a kept one its saved tensors, a recomputed one its
            input.
        prefetch: how many tensors may be leaving, or coming back ahead of use, at once. 0: every copy is waited for.
        link: ``"host"`` or ``"disk"``: where tensors go.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is what a strategy makes of a stack, such as KeepAll().plan(12), got {plan!r}")
    if len(costs) != plan.n_blocks:
        raise ValueError(f"costs has {len(costs)} entries for a plan of {plan.n_blocks} blocks")
    if plan.recompute_ops:
        raise ValueError(
            f"simulate knows whole blocks only, and this plan recomputes {', '.join(plan.recompute_ops)} inside each: "
            "put that into the costs, and hand in the plan of KeepAll()"
        )
    whole_number("prefetch", prefetch, at_least=0)
    if link not in LINKS:
        raise ValueError(f'link is "host" or "disk", got {link!r}')
    out, back = (device.need(name) for name in LINKS[link]) if plan.offloads else (math.inf, math.inf)
    step = _Step(costs, device.need("flops"), out, back, prefetch)
    step.forward(plan.segments)
    step.start_first()
    step.backward(plan.segments)
    return StreamTimeline(
        tuple(step.compute),
        tuple(step.copies_out),
        tuple(step.copies_in),
        tuple(step.stalls),
        tuple(step.memory),
        step.hits,
    )


@dataclass
class _Step:
    """A step on its way: where computation stands, what the copy lanes have been asked for, what is in memory."""

    costs: Sequence[BlockCosts]
    flops: float
    bandwidth_out: float
    bandwidth_in: float
    prefetch: int
    now: float = 0.0
    live: int = 0
    hits: int = 0  # tensors that were on their way back when they were asked for
    gone: int = 0  # so many of the copies out have been waited for, and their sources let go
    taken: int = 0  # so many tensors have been used in backward
    compute: list[Span] = field(default_factory=list)
    copies_out: list[Span] = field(default_factory=list)
    copies_in: list[Span] = field(default_factory=list)  # in the reverse order of packing
    stalls: list[Span] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def forward(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            if segment.recompute:
                checkpoint = self.costs[segment.start].checkpoint
                self._hold(checkpoint)
                if segment.offload:
                    self._pack(segment.start, checkpoint)
                for block in range(segment.start, segment.stop):
                    self._run("forward", block, self.costs[block].forward)
            else:
                for block in range(segment.start, segment.stop):
                    self._save("forward", block, self.costs[block].forward, send=segment.offload)
        if self.gone < len(self.copies_out):
            last = self.copies_out[-1]
            self._wait(
                last.end, "drain", last.block, sum(copy.nbytes for copy in self.copies_out if copy.end > self.now)
            )
        while self.gone < len(self.copies_out):
            self._let_go()

    def backward(self, segments: Sequence[Segment]) -> None:
        for segment in reversed(segments):
            if segment.recompute:
                if segment.offload and self.costs[segment.start].checkpoint:
                    self._take()
                self._run_again(segment)
                self.backward(segment.body())
            else:
                for block in reversed(range(segment.start, segment.stop)):
                    self._use(block, sent=segment.offload)

    def _run_again(self, region: Segment) -> None:
        """A region's forward once more, up to its last saved tensor; what it saves is there for its backward.

        The region's input is in memory already. It becomes the first tensor that its first block saves, or the input of
        a region nested at its start.
        """
        inputs = self.costs[region.start].checkpoint
        for inner in region.body():
            if inner.recompute:
                self._hold(self.costs[inner.start].checkpoint - inputs)
                # A region at the end of a region has saved all that it will save as soon as it is entered.
                for block in range(inner.start, inner.stop if inner.stop < region.stop else inner.start):
                    self._run("recompute", block, self.costs[block].forward)
            else:
                for block in range(inner.start, inner.stop):
                    cost = self.costs[block]
                    ends_early = block == region.stop - 1 and cost.recompute is not None
                    self._save("recompute", block, cost.recompute if ends_early else cost.forward, already=inputs)
                    inputs = 0
            inputs = 0

    def _save(self, kind: str, block: int, flops: float, send: bool = False, already: int = 0) -> None:
        """Run a block forward and keep, or send away, what it saves; ``already`` bytes of the first are there."""
        saved = self.costs[block].saved
        for nbytes in saved:
            self._run(kind, block, flops / len(saved))
            self._hold(nbytes - already)
            already = 0
            if send:
                self._pack(block, nbytes)
        if not saved:
            self._run(kind, block, flops)
            self._hold(-already)

    def _use(self, block: int, sent: bool) -> None:
        """Run a block's backward, which lets go of one saved tensor after the other."""
        cost = self.costs[block]
        for nbytes in reversed(cost.saved):
            if sent and nbytes:
                self._take()
            self._run("backward", block, cost.backward / len(cost.saved))
            self._hold(-nbytes)
        if not cost.saved:
            self._run("backward", block, cost.backward)

    def _pack(self, block: int, nbytes: int) -> None:
        if nbytes == 0:  # the stack's own input: whoever called it holds it
            return
        if 0 < self.prefetch <= len(self.copies_out) - self.gone:
            self._let_go()
        self.copies_out.append(self._copy("out", self.copies_out, self.bandwidth_out, block, nbytes))
        if self.prefetch == 0:
            self._let_go()

    def _let_go(self) -> None:
        """Wait for the oldest copy that is leaving, and give its source back."""
        copy = self.copies_out[self.gone]
        self._wait(copy.end, "leaving", copy.block, copy.nbytes)
        self._hold(-copy.nbytes)
        self.gone += 1

    def start_first(self) -> None:
        """Backward begins: the first tensors that it will take start back, if any may come ahead of use."""
        self._ask(self.prefetch)

    def _ask(self, count: int) -> None:
        """Have the first ``count`` copies back under way."""
        while len(self.copies_in) < min(count, len(self.copies_out)):
            packed = self.copies_out[-1 - len(self.copies_in)]
            self._hold(packed.nbytes)
            self.copies_in.append(self._copy("in", self.copies_in, self.bandwidth_in, packed.block, packed.nbytes))

    def _take(self) -> None:
        self.hits += self.taken < len(self.copies_in)
        self._ask(self.taken + 1 + self.prefetch)
        copy = self.copies_in[self.taken]
        self._wait(copy.end, "returning", copy.block, copy.nbytes)
        self.taken += 1

    def _copy(self, kind: str, lane: list[Span], bandwidth: float, block: int, nbytes: int) -> Span:
        start = max(self.now, lane[-1].end if lane else 0.0)
        return Span(start, start + nbytes / bandwidth, kind, block, nbytes)

    def _run(self, kind: str, block: int, flops: float) -> None:
        start, self.now = self.now, self.now + flops / self.flops
        last = self.compute[-1] if self.compute else None
        if last is not None and (last.kind, last.block, last.end) == (kind, block, start):
            self.compute[-1] = Span(last.start, self.now, kind, block)
        elif self.now > start:
            self.compute.append(Span(start, self.now, kind, block))

    def _wait(self, until: float, reason: str, block: int, nbytes: int) -> None:
        if until > self.now:
            self.stalls.append(Span(self.now, until, reason, block, nbytes))
            self.now = until

    def _hold(self, nbytes: int) -> None:
        if nbytes:
            self.live += nbytes
            self.memory.append((self.now, self.live))
