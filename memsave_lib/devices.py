"""Figures of devices: cited ones of GPUs that are not at hand, and measured ones of this machine.

``devices.T4``, ``.A100``, ``.H100`` and ``.H200`` come from data/devices.json, each figure with its source, and so does
``devices.NVME``, a disk. They are for predictions only: :func:`measure` says what this machine reaches.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICES_FILE = Path(__file__).resolve().parents[1] / "data" / "devices.json"
RATES = ("flops", "copy_out", "copy_in", "disk_write", "disk_read")


@dataclass(frozen=True)
class Device:
    """What a device reaches. A figure is None where nobody says.

    Args:
        name: of the device.
        flops: FLOPs per second that large matrix products or training reach, far below what data sheets call peak.
        copy_out: bytes per second from the device to the host.
        copy_in: bytes per second from the host to the device.
        copy_pageable: the same, either way, from host memory that is not pinned.
        disk_write: bytes per second to a disk.
        disk_read: bytes per second from a disk.
        memory: bytes.
        source: figure -> where it comes from.
        bands: figure -> relative spread of its measurements here, see :func:`measure`.
    """

    name: str
    flops: float | None = None
    copy_out: float | None = None
    copy_in: float | None = None
    copy_pageable: float | None = None
    disk_write: float | None = None
    disk_read: float | None = None
    memory: int | None = None
    source: Mapping[str, str] = field(default_factory=dict, hash=False)
    bands: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in (*RATES, "copy_pageable", "memory"):
            value = getattr(self, name)
            if value is not None:
                _positive(name, value)

    @property
    def band(self) -> float:
        """The widest of the bands; 0.0 for figures that were not measured here."""
        return max(self.bands.values(), default=0.0)

    def need(self, figure: str) -> float:
        """A figure that a prediction cannot do without.

        Raises:
            ValueError: nobody says.
        """
        value = getattr(self, figure)
        if value is None:
            hint = (
                "with_disk(devices.NVME)" if figure.startswith("disk") else f"dataclasses.replace(device, {figure}=...)"
            )
            raise ValueError(f"{figure} of {self.name} is not known; use devices.measure(), or {hint}")
        return value

    def pageable(self) -> Device:
        """This device with host memory that is not pinned."""
        rate = self.need("copy_pageable")
        return replace(self, name=f"{self.name}, memory not pinned", copy_out=rate, copy_in=rate)

    def with_disk(self, disk: Device) -> Device:
        """This device with the disk of another, such as ``devices.A100.with_disk(devices.NVME)``."""
        names = ("disk_write", "disk_read")
        return replace(
            self,
            name=f"{self.name} with {disk.name}",
            source={**self.source, **{name: disk.source[name] for name in names if name in disk.source}},
            bands={**self.bands, **{name: disk.bands[name] for name in names if name in disk.bands}},
            **{name: disk.need(name) for name in names},
        )


def presets() -> dict[str, Device]:
    """The GPUs of data/devices.json by name: cited figures, at the number format that each computes fastest in."""
    return {entry["name"]: _gpu(entry) for entry in _read()["devices"]}


def __getattr__(name: str) -> Device:
    data = _read()
    for entry in data["devices"]:
        if entry["name"] == name:
            return _gpu(entry)
    if name == "NVME":
        return _device(data["disk"]["name"], {rate: data["disk"][rate] for rate in ("disk_write", "disk_read")})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *presets(), "NVME"])


def _read() -> dict:
    return json.loads(DEVICES_FILE.read_text(encoding="utf-8"))


def _gpu(entry: dict) -> Device:
    copy = entry["host_copy"]
    cited = {"flops": entry["achieved_flops"], "copy_out": copy, "copy_in": copy}
    more = {"copy_pageable": entry.get("host_copy_pageable"), "memory": entry.get("memory")}
    return _device(entry["name"], cited | more)


def _device(name: str, cited: Mapping[str, dict | None]) -> Device:
    known = {figure: cite for figure, cite in cited.items() if cite is not None}
    return Device(
        name,
        **{figure: cite["value"] for figure, cite in known.items()},
        source={figure: cite["source"] for figure, cite in known.items()},
    )


def measure(
    device: str | torch.device = "cpu", directory: str | os.PathLike[str] | None = None, seconds: float = 1.0
) -> Device:
    """What this machine reaches: for each figure the median of many repeats, taken in turns for about ``seconds``.

    - ``flops``: the product of a block's up-projection, ``(tokens, h) @ (h, 4h)``; h = 512 in float32 on a CPU,
      4096 in its own half precision on a GPU. A whole block reaches less: it also normalizes, adds and moves.
    - ``copy_out``, ``copy_in``: copies to and from pinned host memory. On a CPU, whose memory is the host's, a plain
      copy from one place to another; ``source`` says so.
    - ``disk_write``, ``disk_read``: through a temporary file in ``directory`` that has no name. Nothing forces bytes to
      the disk itself: sizes as small as here meet the page cache, in memory, and so do the course's own small steps.

    A busy machine gives other figures every time. ``bands`` says how wide the middle four fifths of the repeats were,
    as a share of the median; :func:`agree` compares two measurements by them. Nothing stays behind: no file, no tensor,
    no change of torch's random numbers. Not yet run on a GPU.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"auto"``.
        directory: where to try the disk; default: where Python puts temporary files.
        seconds: for all figures together; each is repeated three times at least, however long that takes.
    """
    import torch

    from memsave_lib import speed
    from memsave_lib.course.env import resolve_device

    _positive("seconds", seconds)
    if directory is not None and not Path(directory).is_dir():
        raise NotADirectoryError(f"directory must be an existing directory, got {os.fspath(directory)!r}")
    where = resolve_device(str(device) if isinstance(device, torch.device) else device)
    on_cpu = where.type == "cpu"
    with ExitStack() as held:
        work = speed.products(where) | speed.copies(where) | speed.disk(directory, held)
        rates = speed.in_turns(work, seconds)
    copies = "copies within memory" if on_cpu else "pinned host memory"
    sources = {
        "flops": "measured here: matrix products of a block's size",
        **dict.fromkeys(("copy_out", "copy_in"), f"measured here: {copies}"),
        **dict.fromkeys(("disk_write", "disk_read"), "measured here: an unlinked file, page cache included"),
        "memory": "the operating system" if on_cpu else "torch",
    }
    return Device(
        f"CPU, {torch.get_num_threads()} threads" if on_cpu else torch.cuda.get_device_name(where),
        **{name: statistics.median(repeats) for name, repeats in rates.items()},
        memory=speed.host_memory() if on_cpu else torch.cuda.get_device_properties(where).total_memory,
        source=sources,
        bands={name: speed.spread(repeats) for name, repeats in rates.items()},
    )


@dataclass(frozen=True)
class Agreement:
    """One figure of two measurements.

    Args:
        figure: its name in :class:`Device`.
        first, second: what was measured.
        difference: between the two, as a share of the larger one.
        band: how much they may differ, see :func:`agree`.
    """

    figure: str
    first: float
    second: float
    difference: float
    band: float

    @property
    def within(self) -> bool:
        """Whether they differ by no more than the band."""
        return self.difference <= self.band

    @property
    def says_something(self) -> bool:
        """Whether they could have differed by more: a share is below 1, so a band of 1 or more holds for any two."""
        return self.band < 1


def agree(first: Device, second: Device) -> tuple[Agreement, ...]:
    """Compare two measurements of one machine, figure by figure.

    The stated band is both measurements' own bands together: either median may be off by its own. That covers what
    disturbed while they ran. It does not cover a machine that has changed since, because it is warmer or has other
    programs to run: measure both within the same minute. Where the band is 1 or more the machine was too busy to say
    anything (:attr:`Agreement.says_something`); a longer :func:`measure` does not help against that, an idle machine
    does.

    Raises:
        TypeError: not two devices.
        ValueError: figures without a band, because they are cited, or measured on one of the two only.
    """
    for device in (first, second):
        if not isinstance(device, Device):
            raise TypeError(f"agree compares two devices, got {device!r} ({type(device).__name__})")
        if not device.bands:
            raise ValueError(f"the figures of {device.name} have no bands: agree compares what measure() found")
    if first.bands.keys() != second.bands.keys():
        raise ValueError(
            f"{first.name} has bands of {', '.join(first.bands)}; {second.name} of {', '.join(second.bands)}"
        )
    return tuple(
        _agreement(name, (first.need(name), second.need(name)), first.bands[name] + second.bands[name])
        for name in first.bands
    )


def _agreement(figure: str, values: tuple[float, float], band: float) -> Agreement:
    return Agreement(figure, *values, difference=1 - min(values) / max(values), band=band)


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number above 0, got {value!r} ({type(value).__name__})")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
