"""Cited devices have sources; measuring this machine leaves nothing behind and says how far its repeats lay apart."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pickle
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from memsave_lib import devices, speed
from memsave_lib.devices import RATES, Device

GPUS = ["T4", "A100", "H100", "H200"]


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_says_what_it_reaches_and_who_says_so(name):
    device = getattr(devices, name)
    assert device == devices.presets()[name]
    assert device.name == name
    assert None not in (device.flops, device.copy_out, device.copy_in, device.memory)
    cited = {"flops", "copy_out", "copy_in", "memory"} | ({"copy_pageable"} if name == "T4" else set())
    assert set(device.source) == cited
    assert (device.disk_write, device.disk_read, device.band) == (None, None, 0.0)
    assert pickle.loads(pickle.dumps(device)) == device


def test_memory_that_is_not_pinned_is_cited_for_a_t4_only():
    data = json.loads(devices.DEVICES_FILE.read_text(encoding="utf-8"))
    pageable, (entry,) = devices.T4.pageable(), [one for one in data["devices"] if one["name"] == "T4"]
    assert pageable.copy_out == pageable.copy_in == entry["host_copy_pageable"]["value"] < devices.T4.copy_out
    assert (pageable.name, pageable.flops) == ("T4, memory not pinned", devices.T4.flops)
    with pytest.raises(ValueError, match="copy_pageable of A100 is not known"):
        devices.A100.pageable()


def test_presets_are_the_file():
    data = json.loads(devices.DEVICES_FILE.read_text(encoding="utf-8"))
    assert list(devices.presets()) == GPUS
    for entry in data["devices"]:
        device = devices.presets()[entry["name"]]
        assert device.flops == entry["achieved_flops"]["value"] < entry["peak_flops"][entry["half"]]["value"]
        assert device.copy_out == device.copy_in == entry["host_copy"]["value"]
        assert device.source["copy_in"] == entry["host_copy"]["source"]
    assert {*GPUS, "NVME", "measure", "presets"} <= set(dir(devices))
    with pytest.raises(AttributeError, match="no attribute 'V100'"):
        devices.V100


def test_a_disk_is_cited_too_and_can_be_put_into_a_gpu():
    disk = devices.NVME
    assert (disk.flops, disk.copy_out, disk.memory) == (None, None, None)
    assert set(disk.source) == {"disk_write", "disk_read"}
    both = devices.A100.with_disk(disk)
    assert both.name == "A100 with NVMe"
    assert (both.disk_write, both.disk_read) == (disk.disk_write, disk.disk_read)
    assert (both.flops, both.memory) == (devices.A100.flops, devices.A100.memory)
    assert both.source == {**devices.A100.source, **disk.source}
    measured = Device("here", disk_write=1, disk_read=1, bands={"disk_write": 0.1, "flops": 9.0})
    assert devices.A100.with_disk(measured).bands == {"disk_write": 0.1}
    with pytest.raises(ValueError, match="disk_write of H100 is not known"):
        devices.A100.with_disk(devices.H100)


def test_what_nobody_says_is_asked_for_in_words():
    bare = Device("mine", copy_out=5)
    assert bare.need("copy_out") == 5
    with pytest.raises(ValueError, match=r"flops of mine is not known; use devices.measure\(\), or .*flops=\.\.\."):
        bare.need("flops")


@pytest.mark.parametrize(
    ("figures", "error", "message"),
    [
        ({"flops": 0}, ValueError, "flops must be a number above 0, got 0"),
        ({"copy_out": float("inf")}, ValueError, "copy_out must be a number above 0, got inf"),
        ({"disk_read": "5 GB"}, TypeError, r"disk_read must be a number above 0, got '5 GB' \(str\)"),
        ({"memory": True}, TypeError, r"memory must be a number above 0, got True \(bool\)"),
        ({"memory": -1}, ValueError, "memory must be a number above 0, got -1"),
    ],
)
def test_figures_are_numbers_above_zero(figures, error, message):
    with pytest.raises(error, match=message):
        Device("wrong", **figures)
    with pytest.raises(error, match=message):
        dataclasses.replace(Device("right"), **figures)


def test_measuring_gives_every_figure_with_its_band_and_its_source(tmp_path):
    found = devices.measure(directory=tmp_path, seconds=0.05)
    assert all(getattr(found, name) > 1e6 for name in RATES)
    assert set(found.bands) == set(RATES) and all(band >= 0 for band in found.bands.values())
    assert found.band == max(found.bands.values())
    assert set(found.source) == {*RATES, "memory"}
    assert found.source["copy_out"] == "measured here: copies within memory", "a CPU's memory is the host's"
    assert found.name == f"CPU, {torch.get_num_threads()} threads"
    assert found.memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measured(name="here", flops=100.0, disk_read=8.0, bands=(0.1, 0.25)):
    return Device(name, flops=flops, disk_read=disk_read, bands=dict(zip(("flops", "disk_read"), bands, strict=True)))


def test_two_measurements_are_compared_by_both_bands_together():
    first, second = measured(), measured(flops=80.0, disk_read=4.0, bands=(0.125, 0.25))
    flops, read = devices.agree(first, second)
    assert flops == devices.Agreement("flops", 100.0, 80.0, difference=1 - 80 / 100, band=0.1 + 0.125)
    assert read == devices.Agreement("disk_read", 8.0, 4.0, difference=0.5, band=0.5)
    assert flops.within and read.within, "0.2 is no more than 0.225, and 0.5 is no more than 0.5"
    (_, reversed_read) = devices.agree(second, first)
    assert (reversed_read.first, reversed_read.second, reversed_read.difference) == (4.0, 8.0, 0.5), "of the larger one"
    assert not devices.agree(first, measured(flops=79.0, bands=(0.1, 0.25)))[0].within, "0.21 is more than 0.2"
    assert [one.difference for one in devices.agree(first, first)] == [0, 0]


def test_a_band_of_everything_says_nothing():
    quiet, busy = measured(bands=(0.5, 0.5)), measured(bands=(0.49, 0.5))
    assert [one.says_something for one in devices.agree(quiet, busy)] == [True, False]
    (flops, _) = devices.agree(measured(flops=1e-9, bands=(0.5, 0.5)), measured(flops=1e9, bands=(0.5, 0.5)))
    assert flops.within and not flops.says_something, "no two figures differ by more than the larger one"


@pytest.mark.parametrize(
    ("first", "second", "error", "message"),
    [
        (measured(), "cpu", TypeError, r"agree compares two devices, got 'cpu' \(str\)"),
        (None, measured(), TypeError, r"agree compares two devices, got None \(NoneType\)"),
        (measured(), Device("cited", flops=1), ValueError, "the figures of cited have no bands"),
        (
            measured(),
            Device("half", flops=1, bands={"flops": 0.1}),
            ValueError,
            "here has bands of flops, disk_read; half of flops",
        ),
        (
            Device("odd", bands={"flops": 0.1}),
            Device("odd", flops=1, bands={"flops": 0.1}),
            ValueError,
            "flops of odd is not known",
        ),
    ],
    ids=["word", "none", "cited", "other figures", "band without figure"],
)
def test_what_cannot_be_compared_is_named(first, second, error, message):
    with pytest.raises(error, match=message):
        devices.agree(first, second)


def test_what_measure_finds_can_be_compared(tmp_path):
    first, second = (devices.measure(directory=tmp_path, seconds=0.01) for _ in range(2))
    rows = devices.agree(first, second)
    assert [row.figure for row in rows] == list(RATES)
    for row in rows:
        assert (row.first, row.second) == (getattr(first, row.figure), getattr(second, row.figure))
        assert 0 <= row.difference < 1 and row.band == first.bands[row.figure] + second.bands[row.figure]


def open_files():
    return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_there(fd))


def fd_is_there(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def tensors_alive():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_measuring_leaves_nothing_behind(tmp_path):
    devices.measure(directory=tmp_path, seconds=0.01)  # what torch sets up once is not our doing
    before = (open_files(), tensors_alive(), torch.get_rng_state().tolist(), torch.is_grad_enabled())
    devices.measure(directory=tmp_path, seconds=0.01)
    assert (open_files(), tensors_alive(), torch.get_rng_state().tolist(), torch.is_grad_enabled()) == before
    assert list(tmp_path.iterdir()) == []


def test_the_disk_that_is_asked_for_is_the_one_that_is_tried(tmp_path):
    with ExitStack() as held:
        work = speed.disk(tmp_path, held)
        assert work["disk_write"]() == work["disk_read"]() == 16 * speed.MIB
        (file,) = [path for path in open_files() if path.startswith(f"{tmp_path}/") and "deleted" in path]
        assert list(tmp_path.iterdir()) == [], "it has no name"
    assert file not in open_files()


def test_the_default_directory_is_pythons(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ExitStack() as held:
        speed.disk(None, held)
        assert any(path.startswith(f"{tmp_path}/") for path in open_files())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seconds": 0}, ValueError, "seconds must be a number above 0, got 0"),
        ({"seconds": "1"}, TypeError, r"seconds must be a number above 0, got '1' \(str\)"),
        ({"device": "gpu"}, ValueError, "device must be .*, got 'gpu'"),
        ({"device": 3}, TypeError, r"device must be .*, got 3 \(int\)"),
        ({"device": torch.device("meta")}, ValueError, "device must be .*, got 'meta'"),
        ({"directory": "/no/such/place"}, NotADirectoryError, "directory must be an existing directory, got '/no/such"),
        (
            {"directory": Path(__file__)},
            NotADirectoryError,
            "directory must be an existing directory, got '.*devices.py'",
        ),
    ],
)
def test_wrong_arguments_of_measure_are_named(options, error, message):
    with pytest.raises(error, match=message):
        devices.measure(**options)


class Clock:
    """Time passes only where work is done."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def work(self, amount, *seconds):
        """A piece of work that takes so long, each time it is called; the last for ever after."""
        waiting = list(seconds)

        def do():
            self.now += waiting.pop(0) if len(waiting) > 1 else waiting[0]
            return amount

        return do


def test_repeats_take_turns_and_leave_out_the_first():
    clock = Clock()
    rates = speed.in_turns({"a": clock.work(12, 99, 1, 2, 3), "b": clock.work(5, 99, 1)}, seconds=6, clock=clock)
    # Three turns take 2 + 3 + 4 seconds, which is more than six; without the first runs, which take longest.
    assert rates == {"a": [12, 6, 4], "b": [5, 5, 5]}


def test_repeats_go_on_for_as_long_as_is_asked_and_three_times_at_least():
    clock = Clock()
    assert len(speed.in_turns({"a": clock.work(1, 1)}, seconds=10, clock=clock)["a"]) == 10
    assert len(speed.in_turns({"a": clock.work(1, 1)}, seconds=0.5, clock=clock)["a"]) == 3


def test_the_spread_leaves_out_a_tenth_on_either_side():
    assert speed.spread([4.0] * 5) == 0
    assert speed.spread(list(range(1, 12))) == (10 - 2) / 6
    assert speed.spread([10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 1000]) == 0, "one interruption is no band"


@pytest.mark.gpu
def test_measuring_a_gpu(tmp_path):
    devices.measure("cuda", tmp_path, seconds=0.05)
    before = torch.cuda.memory_allocated()
    found = devices.measure("cuda", tmp_path, seconds=0.5)
    assert found.name == torch.cuda.get_device_name()
    assert found.flops > 1e12 and found.copy_out > 1e9 and found.copy_in > 1e9
    assert found.source["copy_out"] == "measured here: pinned host memory"
    assert torch.cuda.memory_allocated() == before
