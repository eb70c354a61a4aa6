"""Run the checks of the claims: ``make ledger``, or

python -m memsave_lib.course.claims             compare what they find with what is stored
python -m memsave_lib.course.claims --write     write it to data/claims.json and README.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from memsave_lib.course.claims import book


def main(arguments: list[str] | None = None, claims: Path = book.CLAIMS_FILE, readme: Path = book.README) -> int:
    parser = argparse.ArgumentParser(description="Check the claims of the ledger.")
    parser.add_argument("--write", action="store_true", help="write the results to data/claims.json and README.md")
    write = parser.parse_args(arguments).write
    stored = book.load(claims)
    by_id = book.checks()
    for claim in stored:
        if reason := by_id[claim.id].why_not():
            print(f"{claim.id:<4} not run, the stored result stays. {reason}")
    found = book.refreshed(stored)
    changed = [pair for pair in zip(stored, found, strict=True) if pair[0] != pair[1]]
    for before, after in changed:
        print(f"{after.id:<4} {after.finding.words}: {after.figure}")
        print(f"     was: {before.finding.words}: {before.figure}")
    print(f"{len(found)} claims, {len(changed)} results differ from what was stored")
    if write:
        book.save(found, claims)
        readme.write_text(book.with_block(readme.read_text(encoding="utf-8"), found), encoding="utf-8")
        return 0
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
