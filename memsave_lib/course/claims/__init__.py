"""The ledger of claims: figures that explainers of this subject repeat, each checked by code, with a verdict.

    from memsave_lib.course import claims
    claims.ledger()            # runs the checks: a table with id, claim, verdict, figure
    claims.check("A1")         # one of them

A check computes or measures what its claim is about, and a *judge* compares: the verdict follows from the numbers, and
other numbers give another verdict. Claims are about long context and offloading (A), checkpointing (B), and chunks and
DeepSpeed (C). ``data/claims.json`` holds their texts and the last results, which ``make ledger`` writes.
"""

from memsave_lib.course.claims.book import Claim, checks, ledger, load, run
from memsave_lib.course.claims.finding import Check, Finding

__all__ = ["Check", "Claim", "Finding", "check", "checks", "ledger", "load"]


def check(id: str) -> Finding:
    """What the check of one claim finds now. KeyError where there is no such claim."""
    return run(checks()[id])
