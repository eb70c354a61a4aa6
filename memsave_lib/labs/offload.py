"""The lab on offloading: the bandwidth of the link is a slider."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from memsave_lib import formulas, plots
from memsave_lib.course.costs import stack_costs
from memsave_lib.devices import Device
from memsave_lib.labs.component import Lab
from memsave_lib.labs.config import Job, LabConfig, Prediction, Slider, Values
from memsave_lib.labs.stack_step import StackStep, lengths_around
from memsave_lib.lanes import StreamTimeline
from memsave_lib.runner import Report
from memsave_lib.simulation import simulate
from memsave_lib.strategies import FullCheckpoint, KeepAll, Offload

#: What two cores of a laptop reach in training; the link's figures come from the slider.
TWO_CORES = Device("two cores", flops=100e9)
BANDWIDTH = "bandwidth"
SENT = "Run sends"
#: What Run may send away, as strategies above.
SENDS = {"everything": "everything", "checkpoints": "checkpoints only"}
BANDWIDTHS = (30, 60, 125, 250, 500, 1000, 2000, 4000, 8000, 16000)
#: Where the real step sends its tensors; Windows lacks what a DiskStore needs.
STORE = "disk" if hasattr(os, "preadv") else "host"
#: The two things that people offload.
STRATEGIES = {"everything": KeepAll(), "checkpoints only": FullCheckpoint()}


def offload_picture(
    shape: formulas.BlockShape,
    n_layers: int,
    bandwidth: int,
    prefetch: int,
    device: Device = TWO_CORES,
    seconds: bool = True,
) -> plots.Shown:
    """A step of the stack, simulated: everything offloaded above, checkpoints only below, on one clock.

    Args:
        shape, n_layers: of the stack.
        bandwidth: of the link, MB/s each way.
        prefetch: as in :class:`~memsave_lib.Offload`.
        device: how fast it computes.
        seconds: whether the sentence says them; the picture does.
    """
    return plots.stream_lanes(simulated(shape, n_layers, bandwidth, prefetch, device), seconds=seconds)


def simulated(
    shape: formulas.BlockShape, n_layers: int, bandwidth: int, prefetch: int, device: Device = TWO_CORES
) -> dict[str, StreamTimeline]:
    """The timelines of both strategies; arguments as for :func:`offload_picture`."""
    linked = replace(device, copy_out=1e6 * bandwidth, copy_in=1e6 * bandwidth)
    costs = stack_costs(shape, n_layers)
    plans = {name: Offload(strategy).plan(n_layers) for name, strategy in STRATEGIES.items()}
    return {name: simulate(costs, plan, linked, prefetch=prefetch) for name, plan in plans.items()}


def offload_lab(
    n_layers: int,
    hidden: int,
    heads: int,
    batch_size: int,
    seq_len: int,
    prefetch: int = 4,
    bandwidth: int = 1000,
    device: str | torch.device = "cpu",
) -> Lab:
    """A simulated step at the slider's bandwidth; Run trains a real one that sends tensors to this machine's disk.

    Args:
        n_layers, hidden, heads: of the :class:`~memsave_lib.BlockStack`.
        batch_size: sequences in the step.
        seq_len, prefetch: where the sliders start; ``seq_len`` reaches from a quarter to four times that.
        bandwidth: where its slider starts, MB/s; one of :data:`BANDWIDTHS`.
        device: where the real step runs.
    """
    start = StackStep.on(device, n_layers, hidden, heads, batch_size, seq_len)

    canvas = plots.LanesPicture(len(STRATEGIES))

    def link(values: Values) -> tuple[formulas.BlockShape, int, int, int]:
        shape = replace(start, seq_len=values["seq_len"]).shape
        return shape, n_layers, values[BANDWIDTH], values["prefetch"]

    def picture(values: Values) -> plots.Shown:
        return canvas.draw(simulated(*link(values)))

    def still(values: Values) -> plots.Shown:
        return offload_picture(*link(values), seconds=False)

    def strategy(values: Values) -> Offload:
        return Offload(STRATEGIES[SENDS[values[SENT]]], store=STORE, prefetch=values["prefetch"])

    def predict(values: Values) -> Prediction:
        return replace(start, seq_len=values["seq_len"]).predict(strategy(values).plan(n_layers))

    def prepare(values: Values) -> Job:
        return replace(start, seq_len=values["seq_len"]).job(strategy(values))

    def remark(report: Report) -> str:
        traffic = report.offload
        return f"{traffic.moved.tensors} tensors left, {traffic.prefetch_hits} were on their way back when asked for."

    sliders = (
        Slider(BANDWIDTH, BANDWIDTHS, bandwidth, "MB/s", simulated=True),
        Slider("seq_len", lengths_around(seq_len), seq_len),
        Slider("prefetch", range(5), prefetch),
        Slider(SENT, tuple(SENDS), "everything"),
    )
    return Lab(LabConfig(sliders, "seq_len", predict, prepare, start.free_bytes, picture, still, remark, lanes=True))
