"""Results of experiments that are too long for a notebook: measured once at full size, kept in ``data/records``.

``load("gpt2_chunks")`` reads one. ``python -m memsave_lib.course.record NAME`` measures one again and writes it.
A record says on what kind of machine, when and with which versions it was measured; no host, no path.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pandas as pd

FOLDER = Path(__file__).resolve().parents[2] / "data" / "records"
#: Versions worth knowing when a figure is read.
PACKAGES = ("torch", "transformers", "deepspeed")


class NoRecord(LookupError):
    """There is no such record; the message says how to measure it."""


@dataclass(frozen=True)
class Record:
    """One experiment's result.

    ``about`` says what was run, ``machine`` names its processor, its threads and its GPU if one was used, ``rows`` hold
    the figures: bytes and seconds as numbers, or ``"skipped"`` with the reason.
    """

    name: str
    about: str
    machine: str
    date: str  # year-month-day
    versions: dict[str, str]
    rows: list[dict[str, Any]]

    @property
    def origin(self) -> str:
        """Where the figures come from, as a sentence."""
        versions = ", ".join(f"{package} {version}" for package, version in self.versions.items())
        return f"{self.about} Measured on {self.machine}, {self.date}, with {versions}."

    def frame(self) -> pd.DataFrame:
        """One row a variant; those that were skipped are left out."""
        import pandas as pd

        return pd.DataFrame([row for row in self.rows if "skipped" not in row])


def load(name: str, folder: Path | None = None) -> Record:
    """The record of that name.

    Raises NoRecord where it was never measured, ValueError where the file is not a record.
    """
    path = _path(name, folder)
    if not path.exists():
        raise NoRecord(f"There is no record {name!r} yet. To measure it at full size: make record ARGS={name}")
    content = json.loads(path.read_text(encoding="utf-8"))
    wanted, found = [field.name for field in fields(Record)], list(content)
    if sorted(found) != sorted(wanted) or content["name"] != name:
        raise ValueError(f"{path.name} is no record of {name!r}: it must hold {', '.join(wanted)}, it holds {found}")
    return Record(**content)


def save(record: Record, folder: Path | None = None) -> Path:
    """Write the record, in place of an older one of its name."""
    path = _path(record.name, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    return path


def new(name: str, about: str, rows: Sequence[dict[str, Any]]) -> Record:
    """A record of rows that were measured on this machine, today."""
    versions = {package: version for package in PACKAGES if (version := _version(package))}
    return Record(name, about, this_machine(), datetime.now(UTC).date().isoformat(), versions, list(rows))


def this_machine() -> str:
    """The processor's model, the threads that torch may use, and the GPU: no name of the host, no path."""
    parts = [_processor(), f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (match := re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)):
        return match[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _path(name: str, folder: Path | None) -> Path:
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise ValueError(f"a record's name has small letters, digits and underscores, got {name!r}")
    return (folder or FOLDER) / f"{name}.json"
