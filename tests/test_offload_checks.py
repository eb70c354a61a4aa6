"""Exercise checks of notebook 05: solution right, stub untried, each plausible mistake diagnosed; costs on paper."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import memsave_lib as ms
from memsave_lib import formulas
from memsave_lib.course import costs, offload_checks
from memsave_lib.course.env import Setup
from memsave_lib.flops import profile_blocks
from memsave_lib.formulas import BlockShape
from memsave_lib.stores import NullStore

DEFAULTS = Setup(512, 2, 6, 256, 2, 2, torch.device("cpu"))
ODD = Setup(96, 5, 7, 256, 3, 2, torch.device("cpu"), seed=3)
SMALLEST = Setup(8, 1, 1, 64, 1, 1, torch.device("cpu"))
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST], ids=["defaults", "odd", "smallest"])


def unfinished(*arguments: object) -> Any:
    raise NotImplementedError("your turn")


@pytest.mark.parametrize("check", ["check_bytes_that_leave", "check_slowest_link"])
def test_a_stub_in_a_branch_is_not_finished_and_other_errors_go_through(check: str) -> None:
    answer = {"check_bytes_that_leave": leaving, "check_slowest_link": slowest}[check]
    more = (DEFAULTS,) if check == "check_bytes_that_leave" else ()

    def partly(*case: Any) -> Any:
        return answer(*case) if case[-1] == 1 else unfinished()

    found = getattr(offload_checks, check)(partly, *more)
    assert found.passed is False and "Not finished" in str(found)

    def of_others(*case: Any) -> Any:
        raise NotImplementedError("no such kernel")

    with pytest.raises(NotImplementedError, match="no such kernel"):
        getattr(offload_checks, check)(of_others, *more)


# The bytes that leave


def leaving(sizes: list[int], n_layers: int, keep_last: int) -> int:
    total = 0
    for block in range(n_layers - keep_last):
        for position, size in enumerate(sizes):
            if size >= 65536 and not (block == 0 and position == 0):
                total += size
    return total


def big(sizes: list[int]) -> int:
    return sum(size for size in sizes if size >= 65536)


def first(sizes: list[int]) -> int:
    return big(sizes[:1])


def limited(limit: int, sizes: list[int], n_layers: int, keep_last: int) -> int:
    sent = [size for _ in range(n_layers - keep_last) for size in sizes if size >= limit]
    return sum(sent) - (sizes[0] if sent and sizes[0] >= limit else 0)


WRONG_LEAVING: dict[str, Callable[..., Any]] = {
    "the last `keep_last` stay": lambda sizes, n, last: n * big(sizes) - first(sizes),
    "You send tensors of 65,024 bytes: what is smaller than 65,536 bytes stays": lambda sizes, n, last: limited(
        65_000, sizes, n, last
    ),
    "what is smaller than 65,536 bytes stays": lambda sizes, n, last: limited(64_000, sizes, n, last),
    "it is the first block's that stays": lambda sizes, n, last: (
        max(0, n - last) * big(sizes) - (not last and n > 0) * first(sizes)  # position 0 of block n - 1 left out
    ),
    "it is the last ones that stay": lambda sizes, n, last: max(0, n - last) * big(sizes) - (not last) * first(sizes),
    "You count the small tensors too": lambda sizes, n, last: (n > last) * ((n - last) * sum(sizes) - sizes[0]),
    "a tensor of 64 KiB exactly": lambda sizes, n, last: leaving([s if s > 65536 else 0 for s in sizes], n, last),
    "whoever called the stack holds it": lambda sizes, n, last: max(0, n - last) * big(sizes),
    "the input of every block": lambda sizes, n, last: max(0, n - last) * big(sizes[1:]),
    "both stay": lambda sizes, n, last: max(0, n - last) * sum(sizes),
    "You count all that is saved": lambda sizes, n, last: n * sum(sizes),
    "a negative number of blocks": lambda sizes, n, last: (n - last) * big(sizes) - (n != last) * first(sizes),
    "You count the way back too": lambda sizes, n, last: 2 * leaving(sizes, n, last),
    "is an int, and your function returned 0.5 (float)": lambda sizes, n, last: 0.5,
    "bytes leave.": lambda sizes, n, last: leaving(sizes, n, last) + 4,
}


@SETUPS
def test_leaving_accepts_the_solution_and_knows_the_stub(here: Setup) -> None:
    found = offload_checks.check_bytes_that_leave(leaving, here)
    assert found.passed is True, str(found)
    shape = BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
    forecast = formulas.offloaded_bytes(ms.Offload().plan(here.n_layers), shape)
    assert f"({forecast:,} bytes) leave" in str(found) or forecast == 0
    assert offload_checks.check_bytes_that_leave(unfinished, here).passed is None


@SETUPS
@pytest.mark.parametrize("limit", [1, 40_000, 64_000, 65_000, 65_535, 65_537, 70_000, 10**6])
def test_leaving_refuses_every_other_limit(here: Setup, limit: int) -> None:
    found = offload_checks.check_bytes_that_leave(lambda *case: limited(limit, *case), here)
    assert found.passed is (limit == 65_535), str(found)  # sizes are multiples of four


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint64], ids=lambda kind: kind.__name__)
def test_leaving_accepts_whole_numbers_of_numpy(kind: Callable[[int], Any]) -> None:
    found = offload_checks.check_bytes_that_leave(lambda *case: kind(leaving(*case)), DEFAULTS)
    assert found.passed is True, str(found)
    found = offload_checks.check_bytes_that_leave(lambda *case: kind(leaving(*case) + 4), DEFAULTS)
    assert found.passed is False and "bytes leave." in str(found)


@SETUPS
@pytest.mark.parametrize(("reason", "answer"), WRONG_LEAVING.items(), ids=WRONG_LEAVING)
def test_leaving_names_the_mistake(here: Setup, reason: str, answer: Callable[..., int]) -> None:
    found = offload_checks.check_bytes_that_leave(answer, here)
    assert found.passed is False
    assert reason in str(found)


SHAPES = (BlockShape(2, 256, 64, 2), BlockShape(2, 2048, 64, 4), BlockShape(1, 128, 64, 1), BlockShape(3, 40, 96, 4))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_storages_are_those_that_the_engine_sends(shape: BlockShape) -> None:
    stack = ms.BlockStack(3, shape.hidden, shape.heads)
    x = torch.randn(shape.batch, shape.seq_len, shape.hidden)
    for min_bytes in (1, 65536):
        offload = ms.Offload(store=NullStore(), keep_last=0, min_bytes=min_bytes)
        with ms.apply(stack, offload) as applied:
            stack(x).sum().backward()
        sent = [trip.nbytes for block, trip in applied.report.offload.last.trips if block == 1 and not trip.back]
        assert sorted(sent) == sorted(size for size in costs.saved_storages(shape) if size >= min_bytes)
        if min_bytes > 1:
            assert list(costs.paper_costs(shape).saved) == sent, "in the order of packing"


def test_the_cases_tell_every_rule_apart() -> None:
    sizes = {size for case in offload_checks._LEAVING_CASES for size in case.sizes}
    assert 65536 in sizes, "one tensor lies exactly on the limit"


# FLOPs on paper


def test_costs_on_paper_are_those_that_are_counted() -> None:
    shape = BlockShape(2, 24, 64, 2, attention="math", causal=False)
    stack = ms.BlockStack(2, 64, 2, attention="math", causal=False)
    x = torch.randn(2, 24, 64)
    counted = profile_blocks(stack, lambda: stack(x).sum().backward())[0]
    paper = costs.paper_costs(BlockShape(2, 24, 64, 2, causal=False), min_bytes=1)
    assert (paper.forward, paper.forward - paper.recompute) == (counted.forward, counted.tail)
    assert paper.backward == 2 * paper.forward
    assert costs.paper_costs(BlockShape(2, 24, 64, 2), 1).forward == counted.forward - 2 * 24 * shape.elements
    assert paper.checkpoint == paper.saved[0] == shape.checkpoint_bytes
    assert costs.paper_costs(BlockShape(1, 8, 64, 1)).saved == ()
    assert costs.paper_costs(BlockShape(1, 8, 64, 1)).checkpoint == 0


def test_the_input_of_a_stack_does_not_travel() -> None:
    for shape in SHAPES:
        for strategy in (ms.KeepAll(), ms.FullCheckpoint()):
            plan = ms.Offload(strategy).plan(4)
            each = costs.stack_costs(shape, 4)
            sent = plan.offloaded_bytes([sum(cost.saved) for cost in each], [cost.checkpoint for cost in each])
            assert sent == formulas.offloaded_bytes(plan, shape)
    assert len(costs.stack_costs(SHAPES[0], 1)) == 1


def test_storages_are_refused_where_they_are_others() -> None:
    with pytest.raises(ValueError, match="dropout 0 and no autocast only, got BlockShape"):
        costs.saved_storages(BlockShape(1, 8, 64, 1, attention="math"))


# The slowest link


def slowest(seq_len: int, hidden: int, gamma: float, flops: float, blocks_per_copy: int) -> float:
    return gamma * flops / (blocks_per_copy * (24 * hidden + 2 * seq_len))


WRONG_LINKS = {
    "You leave out `blocks_per_copy`": lambda s, h, g, f, m: g * f / (24 * h + 2 * s),
    "You multiply by `blocks_per_copy`": lambda s, h, g, f, m: m * g * f / (24 * h + 2 * s),
    "You take kappa = 4": lambda s, h, g, f, m: g * f / (m * (24 * h + 4 * s)),
    "You leave out attention": lambda s, h, g, f, m: g * f / (m * 24 * h),
    "into the projections alone": lambda s, h, g, f, m: g * f / (m * 24 * h + 2 * s),
    "upside down": lambda s, h, g, f, m: m * (24 * h + 2 * s) / (g * f),
    "You ask for bits": lambda s, h, g, f, m: 8 * slowest(s, h, g, f, m),
    "which has twice the time": lambda s, h, g, f, m: 2 * slowest(s, h, g, f, m),
    "is a number, and your function returned None": lambda s, h, g, f, m: None,
    "the copy just hides at": lambda s, h, g, f, m: g * f,
}


def test_slowest_link_accepts_the_solution_and_knows_the_stub() -> None:
    found = offload_checks.check_slowest_link(slowest)
    assert found.passed is True, str(found)
    assert "need 2.9 GB/s, one for each block, and 0.73 GB/s, one for four" in str(found)
    assert offload_checks.check_slowest_link(unfinished).passed is None


@pytest.mark.parametrize(("reason", "answer"), WRONG_LINKS.items(), ids=WRONG_LINKS)
def test_slowest_link_names_the_mistake(reason: str, answer: Callable[..., float]) -> None:
    found = offload_checks.check_slowest_link(answer)
    assert found.passed is False
    assert reason in str(found)


@pytest.mark.parametrize("kind", [np.int64, np.float32, np.float64, Fraction, int], ids=lambda kind: kind.__name__)
def test_slowest_link_accepts_numbers_of_every_kind(kind: Callable[[float], Any]) -> None:
    found = offload_checks.check_slowest_link(lambda *case: kind(slowest(*case)))
    assert found.passed is True, str(found)
    found = offload_checks.check_slowest_link(lambda *case: kind(8 * slowest(*case)))
    assert found.passed is False and "You ask for bits" in str(found)


@pytest.mark.parametrize("huge", [10**400, float("nan"), -(10**400)], ids=["huge", "nan", "low"])
def test_slowest_link_has_a_sentence_for_numbers_out_of_range(huge: float) -> None:
    found = offload_checks.check_slowest_link(lambda *case: huge)
    assert found.passed is False and "the copy just hides at" in str(found)
