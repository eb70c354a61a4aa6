"""The ledger as a file and as tables: claims with the last results of their checks, for data/claims.json and README."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memsave_lib.course.claims import chunking, deepspeed_keys, offloading, recomputing, taken_for_offloading
from memsave_lib.course.claims.finding import DOES_NOT_HOLD, HOLDS, HOLDS_WHEN, VERDICTS, Check, Finding

if TYPE_CHECKING:
    import pandas as pd

ROOT = Path(__file__).resolve().parents[3]
CLAIMS_FILE = ROOT / "data" / "claims.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- claims: generated -->", "<!-- /claims -->"
NOTE = "`make ledger` writes verdicts and figures; the checks are in memsave_lib/course/claims."
NOTEBOOKS = ("00", "01", "02", "03", "04", "05", "06")


@dataclass(frozen=True)
class Claim:
    """A claim in our words, the notebook that treats its subject, and the last result of its check."""

    id: str
    claim: str
    notebook: str
    verdict: str
    condition: str
    figure: str

    @property
    def finding(self) -> Finding:
        return Finding(self.id, self.figure, self.verdict, self.condition)

    def found(self, finding: Finding) -> Claim:
        """The same claim with another result."""
        return replace(self, verdict=finding.verdict, condition=finding.condition, figure=finding.figure)


def load(path: Path = CLAIMS_FILE) -> tuple[Claim, ...]:
    """The claims in the order of the file.

    Raises:
        ValueError: an entry lacks a field or has one too many, ids are out of order, or a verdict is none of the three.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))["claims"]
    wanted = [field.name for field in fields(Claim)]
    for entry in entries:
        if list(entry) != wanted or not all(isinstance(value, str) for value in entry.values()):
            raise ValueError(f"a claim has the texts {', '.join(wanted)}, in this order; got {entry}")
    claims = tuple(Claim(**entry) for entry in entries)
    ids = [claim.id for claim in claims]
    if ids != sorted(set(ids), key=order):
        raise ValueError(f"claims are in order, each once (A1, A2, ..., B1, ...); got {', '.join(ids)}")
    for claim in claims:
        if claim.notebook not in NOTEBOOKS or not claim.claim:
            raise ValueError(f"claim {claim.id} needs a text and a notebook, one of {', '.join(NOTEBOOKS)}: {claim}")
        if claim.verdict not in VERDICTS or bool(claim.condition) != (claim.verdict == HOLDS_WHEN):
            raise ValueError(f"claim {claim.id} is {claim.finding.words!r}; a verdict is one of {', '.join(VERDICTS)}")
    return claims


def save(claims: Sequence[Claim], path: Path = CLAIMS_FILE) -> None:
    content = {"note": NOTE, "claims": [asdict(claim) for claim in claims]}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def order(id: str) -> tuple[str, int]:
    """Sorts A2 before A10. ValueError where an id is no letter with a number."""
    match = re.fullmatch(r"([A-Z])([1-9]\d*)", id)
    if match is None:
        raise ValueError(f"a claim's id is a letter and a number, such as A1; got {id!r}")
    return match[1], int(match[2])


def checks() -> dict[str, Check]:
    """Every check by the id of its claim, in order."""
    families = (offloading, taken_for_offloading, recomputing, chunking, deepspeed_keys)
    found = sorted((check for family in families for check in family.CHECKS), key=lambda check: order(check.id))
    ids = [check.id for check in found]
    if len(set(ids)) < len(ids):
        raise ValueError(f"two checks of one claim: {', '.join(ids)}")
    return dict(zip(ids, found, strict=True))


def run(check: Check) -> Finding:
    """The check's finding; torch's random numbers go on as if it had not run."""
    with torch.random.fork_rng(devices=[]):
        return check.run()


def refreshed(claims: Sequence[Claim], tools: bool = True) -> tuple[Claim, ...]:
    """The claims with what their checks find now; where a check cannot run, or is not to, the stored result stays."""
    by_id = checks()
    stored = {id for id, check in by_id.items() if (check.needs_tool and not tools) or check.why_not()}
    return tuple(claim if claim.id in stored else claim.found(run(by_id[claim.id])) for claim in claims)


def ledger(live: bool = True, tools: bool = True, path: Path = CLAIMS_FILE) -> pd.DataFrame:
    """One row a claim: id, claim, verdict, figure. The texts hold no seconds of this machine and never differ.

    pandas cuts long texts; to see them whole: ``with pd.option_context("display.max_colwidth", None): display(...)``.

    Args:
        live: run every check now, some five seconds on one core and ten more with DeepSpeed. A check whose tool is not
            installed shows its stored result; ``False`` shows the stored results of all.
        tools: run the checks that start another tool too; ``False`` shows their stored results.
        path: of the stored claims.
    """
    import pandas as pd

    claims = load(path)
    rows = [
        (one.id, one.claim, one.finding.words, one.figure) for one in (refreshed(claims, tools) if live else claims)
    ]
    return pd.DataFrame(rows, columns=["id", "claim", "verdict", "figure"])


def readme_block(claims: Sequence[Claim]) -> str:
    """What stands in README.md between the two markers, these included."""
    counts = [sum(claim.verdict == verdict for claim in claims) for verdict in (HOLDS, HOLDS_WHEN, DOES_NOT_HOLD)]
    rows = [
        f"| {claim.id} | {_cell(claim.claim)} | {_cell(claim.finding.words)} | {_cell(claim.figure)} |"
        for claim in claims
    ]
    holds, fails = _count(counts[0], "hold"), _count(counts[2], "do")
    return "\n".join(
        [
            BEGIN,
            "## The ledger of claims",
            "",
            "Explainers of this subject repeat the same figures. Here code computes or measures what they are about,",
            f"for {len(claims)} of their claims, and each verdict follows from the numbers: {holds},",
            f"{_count(counts[1], 'hold')} when a condition is given, {fails} not. `make ledger` runs the",
            "[checks](memsave_lib/course/claims) and writes this table; the tests run them too.",
            "",
            "<details><summary>All claims, with what the checks found</summary>",
            "",
            "| | claim | verdict | what the check found |",
            "|---|---|---|---|",
            *rows,
            "",
            "</details>",
            END,
        ]
    )


def with_block(readme: str, claims: Sequence[Claim]) -> str:
    """The README with a fresh table. ValueError where the markers are not there once each, in order."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"README.md must hold {BEGIN!r} and, behind it, {END!r}, once each")
    before, rest = readme.split(BEGIN)
    return before + readme_block(claims) + rest.split(END)[1]


def _count(number: int, verb: str) -> str:
    return f"{number} {verb}{'es' if verb == 'do' else 's'}" if number == 1 else f"{number} {verb}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
