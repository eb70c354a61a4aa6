"""The requirement files, the package's metadata and the data files agree with each other."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from memsave_lib.course import deepspeed_peer, env

ROOT = Path(__file__).resolve().parent.parent
COURSE = [
    "torch",
    "transformers",
    "ipywidgets",
    "matplotlib",
    "jupyterlab",
    "papermill",
    "nbval",
    "numpy",
    "scipy",
    "pandas",
    "tqdm",
]
ONLY_FOR_NOTEBOOKS = {"jupyterlab", "papermill", "nbval"}
FILES = ("requirements.txt", "requirements-dev.txt", "requirements-deepspeed.txt")


def lines(name: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def requirements(name: str) -> list[Requirement]:
    return [Requirement(line) for line in lines(name)]


def all_requirements() -> list[Requirement]:
    return [requirement for name in FILES for requirement in requirements(name)]


def pinned() -> dict[str, Version]:
    pairs = [line.split("==") for line in lines("constraints.txt")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_the_course_needs_the_seven_packages_and_four_more() -> None:
    assert [requirement.name for requirement in requirements("requirements.txt")] == COURSE


def test_every_requirement_has_a_lower_bound_and_excludes_the_next_major_version() -> None:
    for requirement in all_requirements():
        assert [part.operator for part in sorted(requirement.specifier, key=lambda part: part.operator)] == ["<", ">="]


def test_the_package_asks_for_its_share_of_the_requirements() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dependencies"] == [
        line for line in lines("requirements.txt") if Requirement(line).name not in ONLY_FOR_NOTEBOOKS
    ]


def test_the_optional_deepspeed_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"] == {"deepspeed": lines("requirements-deepspeed.txt")}
    (requirement,) = requirements("requirements-deepspeed.txt")
    assert f">={deepspeed_peer.OLDEST}" in str(requirement.specifier)
    assert deepspeed_peer.HOW_TO_INSTALL in (ROOT / "requirements-deepspeed.txt").read_text(encoding="utf-8")


def test_constraints_are_exact_versions_without_paths_and_hosts() -> None:
    for line in lines("constraints.txt"):
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line), line
    names = [line.split("==")[0].lower() for line in lines("constraints.txt")]
    assert names == sorted(set(names))


def test_constraints_pin_every_requirement_within_its_bounds() -> None:
    versions = pinned()
    for requirement in all_requirements():
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_environment_check_knows_the_same_bounds() -> None:
    bounds = {requirement.name: requirement.specifier for requirement in requirements("requirements.txt")}
    for name, (lowest, too_new) in env.SUPPORTED.items():
        assert bounds[name] == Requirement(f"{name}>={env.dotted(lowest)},<{env.dotted(too_new)}").specifier


def figures(value: object) -> list[dict[str, object]]:
    """Every {"value": ..., "source": ...} in a tree."""
    if isinstance(value, dict):
        return [value] if "value" in value else [figure for part in value.values() for figure in figures(part)]
    return []


def test_every_device_figure_is_a_whole_number_with_a_source() -> None:
    data = json.loads((ROOT / "data" / "devices.json").read_text(encoding="utf-8"))
    assert [device["name"] for device in data["devices"]] == ["T4", "A100", "H100", "H200"]
    for device in data["devices"]:
        cited = figures(device)
        assert len(cited) >= 2
        for figure in cited:
            assert type(figure["value"]) is int
            assert figure["source"]
        assert device["half"] in device["peak_flops"]
        assert set(device) - {"name", "compute_capability", "half", "native_bf16"} <= set(data["units"])


def test_the_four_books_are_known_by_their_id() -> None:
    data = json.loads((ROOT / "data" / "books.json").read_text(encoding="utf-8"))
    assert [book["id"] for book in data["books"]] == [1342, 84, 2701, 11]
    assert all(book["title"] and book["author"] for book in data["books"])
    assert data["url"].format(id=11).endswith("/11/pg11.txt")
