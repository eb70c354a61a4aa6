"""Exercise checks of notebook 04: solution right, stub untried, each plausible mistake diagnosed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import memsave_lib as ms
from memsave_lib.course import chunk_checks
from memsave_lib.course.env import Setup
from memsave_lib.strategies import chunk_sizes

DEFAULTS = Setup(256, 2, 12, 128, 2, 5, torch.device("cpu"))
ODD = Setup(96, 5, 7, 128, 3, 2, torch.device("cpu"), seed=3)
SMALLEST = Setup(8, 1, 1, 64, 1, 1, torch.device("cpu"))
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST], ids=["defaults", "odd", "smallest"])


def unfinished(*arguments: object) -> None:
    raise NotImplementedError("your turn")


@SETUPS
@pytest.mark.parametrize("check", ["check_best_chunks", "check_chunks", "check_silent"])
def test_a_stub_is_not_tried_yet(check: str, here: Setup) -> None:
    found = getattr(chunk_checks, check)(unfinished, here)
    assert found.passed is None
    assert "not tried yet" in str(found).lower()


PARTLY: dict[str, Callable[..., Any]] = {
    "check_best_chunks": lambda n, b, c: best(n, b, c) if n == 80 else unfinished(),
    "check_chunks": lambda blocks, x, c: in_sizes(chunk_sizes)(blocks, x, c) if c == 3 else unfinished(),
    "check_silent": lambda m: silent(m) if all(p.requires_grad for p in m.parameters()) else unfinished(),
}


@SETUPS
@pytest.mark.parametrize("check", PARTLY)
def test_a_stub_in_a_branch_is_not_finished(check: str, here: Setup) -> None:
    found = getattr(chunk_checks, check)(PARTLY[check], here)
    assert found.passed is False
    assert "Not finished" in str(found)


def test_pytorchs_own_error_is_no_stub() -> None:
    def in_a_list(blocks: list[nn.Module], x: Tensor, chunks: int) -> Tensor:
        return checkpoint(nn.ModuleList(blocks), x, use_reentrant=False)

    with pytest.raises(NotImplementedError, match="ModuleList.*forward"):
        chunk_checks.check_chunks(in_a_list, DEFAULTS)


@SETUPS
@pytest.mark.parametrize("check", PARTLY)
def test_random_numbers_go_on_as_before(check: str, here: Setup) -> None:
    state = torch.get_rng_state()
    solution = {"check_best_chunks": best, "check_chunks": in_sizes(chunk_sizes), "check_silent": silent}[check]
    for answer in (unfinished, solution):
        getattr(chunk_checks, check)(answer, here)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def _other_default(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_other_default")
def test_the_default_type_does_not_matter() -> None:
    assert chunk_checks.check_chunks(in_sizes(chunk_sizes), DEFAULTS).passed is True
    assert chunk_checks.check_silent(silent, DEFAULTS).passed is True


# 1. The right number


def best(n_blocks: int, block: int, checkpoint: int) -> int:
    def peak(chunks: int) -> tuple[int, int]:
        live = [(j + 1) * checkpoint + size * block for j, size in enumerate(chunk_sizes(n_blocks, chunks))]
        return max(live), -chunks

    return min(range(1, n_blocks + 1), key=peak)


def first_best(n_blocks: int, block: int, checkpoint: int) -> int:
    peaks = [chunk_checks.peak_bytes(n_blocks, n, block, checkpoint) for n in range(1, n_blocks + 1)]
    return 1 + peaks.index(min(peaks))


def divisors_only(n_blocks: int, block: int, checkpoint: int) -> int:
    return min(
        (n for n in range(1, n_blocks + 1) if n_blocks % n == 0), key=lambda n: n * checkpoint + n_blocks // n * block
    )


def all_checkpoints_alive(n_blocks: int, block: int, checkpoint: int) -> int:
    sums = [n * checkpoint + max(chunk_sizes(n_blocks, n)) * block for n in range(1, n_blocks + 1)]
    return max(n for n in range(1, n_blocks + 1) if sums[n - 1] == min(sums))


WRONG_COUNTS = {
    "This is the root of the number of blocks": lambda n, b, c: round(math.sqrt(n)),
    "right only where a block saves no more than its input": lambda n, b, c: int(math.sqrt(n)),
    "if it could be any number": lambda n, b, c: min(n, round(math.sqrt(n * b / c))),
    "Chunks are whole blocks": lambda n, b, c: min(n, math.ceil(math.sqrt(n * b / c))),
    "Unequal chunks, the larger first, can be better": divisors_only,
    "You count every checkpoint while the largest chunk is alive": all_checkpoints_alive,
    "early stop spares each chunk the end of its last block": first_best,
    "One block a chunk is best for few blocks": lambda n, b, c: n,
    "your function returned 48.0 (float)": lambda n, b, c: float(best(n, b, c)),
    "you say 0 chunks: there can be 1 to 80": lambda n, b, c: 0,
    "you say 81 chunks: there can be 1 to 80": lambda n, b, c: n + 1,
    "you say 2 chunks, which peak at 642 bytes; 48 chunks peak at 64.": lambda n, b, c: min(2, n),
    "32 and 48 chunks have the same peak": lambda n, b, c: 32 if n == 80 else best(n, b, c),
}


@SETUPS
def test_best_chunks_accepts_the_solution(here: Setup) -> None:
    for solution in (best, lambda *case: ms.Chunked.best(*case).num_checkpoints):
        found = chunk_checks.check_best_chunks(solution, here)
        assert found.passed is True, str(found)
    assert f"you say 48, for your {here.n_layers} blocks " in str(found)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8], ids=lambda kind: kind.__name__)
def test_best_chunks_accepts_whole_numbers_of_numpy(kind: Callable[[int], Any]) -> None:
    found = chunk_checks.check_best_chunks(lambda *case: kind(best(*case)), DEFAULTS)
    assert found.passed is True, str(found)
    found = chunk_checks.check_best_chunks(lambda *case: kind(0), DEFAULTS)
    assert found.passed is False and "you say 0 chunks" in str(found)


@SETUPS
@pytest.mark.parametrize(("reason", "answer"), WRONG_COUNTS.items(), ids=WRONG_COUNTS)
def test_best_chunks_names_the_mistake(here: Setup, reason: str, answer: Callable[[int, int, int], int]) -> None:
    found = chunk_checks.check_best_chunks(answer, here)
    assert found.passed is False
    assert reason in str(found)


def test_no_two_mistakes_look_alike() -> None:
    """Equal lists of answers would give one of them the other's reason."""
    seen: dict[tuple[int, ...], str] = {}
    for reason, mistake in chunk_checks._COUNT_MISTAKES:
        answers = tuple(mistake(*case) for case in chunk_checks._COUNT_CASES)
        assert seen.setdefault(answers, reason) == reason
    assert tuple(best(*case) for case in chunk_checks._COUNT_CASES) not in seen


# 2. The chunks


def in_sizes(sizes_of: Callable[[int, int], Sequence[int]], run: Callable[..., Tensor] | None = None):
    def function(blocks: Sequence[nn.Module], x: Tensor, chunks: int) -> Tensor:
        start = 0
        for size in sizes_of(len(blocks), chunks):
            part = nn.Sequential(*blocks[start : start + size])
            x = part(x) if run is not None else checkpoint(part, x, use_reentrant=False)
            start += size
        return x

    return function


def closing_over(blocks: Sequence[nn.Module], x: Tensor, chunks: int) -> Tensor:
    start = 0
    for size in chunk_sizes(len(blocks), chunks):
        part = nn.Sequential(*blocks[start : start + size])
        x = checkpoint(lambda v: part(v), x, use_reentrant=False)  # noqa: B023 (the mistake)
        start += size
    return x


def only_full_chunks(blocks: Sequence[nn.Module], x: Tensor, chunks: int) -> Tensor:
    return in_sizes(lambda n, c: [n // c] * c)(blocks, x, chunks)


def last_one_kept(blocks: Sequence[nn.Module], x: Tensor, chunks: int) -> Tensor:
    return ms.run(list(blocks), x, ms.Chunked(chunks, recompute_last=False))


def on_the_input(blocks: Sequence[nn.Module], x: Tensor, chunks: int) -> Tensor:
    start, output = 0, x
    for size in chunk_sizes(len(blocks), chunks):
        output = checkpoint(nn.Sequential(*blocks[start : start + size]), x, use_reentrant=False)
        start += size
    return output


def cut_off(blocks: Sequence[nn.Module], x: Tensor, chunks: int) -> Tensor:
    start = 0
    for size in chunk_sizes(len(blocks), chunks):
        x = checkpoint(nn.Sequential(*blocks[start : start + size]), x.detach(), use_reentrant=False)
        start += size
    return x


def keeps_more(blocks: Sequence[nn.Module], x: Tensor, chunks: int) -> Tensor:
    return in_sizes(chunk_sizes)(blocks, x * torch.ones_like(x, requires_grad=True), chunks)


def reentrant(blocks: Sequence[nn.Module], x: Tensor, chunks: int) -> Tensor:
    """PyTorch's older checkpoint, which is also what you get when you do not say which."""
    start = 0
    for size in chunk_sizes(len(blocks), chunks):
        x = checkpoint(nn.Sequential(*blocks[start : start + size]), x, use_reentrant=True)
        start += size
    return x


def without_autograd(blocks: Sequence[nn.Module], x: Tensor, chunks: int) -> Tensor:
    with torch.no_grad():
        return in_sizes(chunk_sizes)(blocks, x, chunks)


def nested(blocks: Sequence[nn.Module], x: Tensor, chunks: int) -> Tensor:
    """In each chunk every block has a checkpoint of its own."""

    def run(part: Sequence[nn.Module], v: Tensor) -> Tensor:
        for block in part:
            v = checkpoint(block, v, use_reentrant=False)
        return v

    start = 0
    for size in chunk_sizes(len(blocks), chunks):
        x = checkpoint(run, blocks[start : start + size], x, use_reentrant=False)
        start += size
    return x


def takes_from_the_list(blocks: list[nn.Module], x: Tensor, chunks: int) -> Tensor:
    for size in chunk_sizes(len(blocks), chunks):
        part = nn.Sequential(*[blocks.pop(0) for _ in range(size)])
        x = checkpoint(part, x, use_reentrant=False)
    return x


WRONG_CHUNKS = {
    "no gradient flows from it, whatever the input: autograd is switched off": without_autograd,
    "or the output is detached.": lambda blocks, x, c: in_sizes(chunk_sizes)(blocks, x, c).detach(),
    "backward runs the blocks 0, 2, 4 again more than once: a checkpoint inside a checkpoint": nested,
    "your function returned an object of type tuple, not the output of the last block.": lambda blocks, x, c: (x,),
    "does a lambda look up the loop variable too late?": closing_over,
    "forward runs the blocks 0, 1, 2, 3, 4, 5: every block must run once": only_full_chunks,
    "no block runs again in backward: nothing is checkpointed": in_sizes(chunk_sizes, run=nn.Sequential),
    "your chunks have 1, 1, 1, 1, 1, 1 blocks; they should have 2, 2, 2": in_sizes(lambda n, c: [1] * n),
    "your chunks have 2, 2, 3 blocks; they should have 3, 2, 2: the larger chunks come first": in_sizes(
        lambda n, c: chunk_sizes(n, c)[::-1]
    ),
    "your chunks have 2, 2, 1, 1, 1, 1 blocks": in_sizes(
        lambda n, c: chunk_sizes(n, c) if n != 8 else [2, 2, 1, 1, 1, 1]
    ),
    "backward runs only the blocks 0, 1, 2, 3 again: each chunk is to be checkpointed": last_one_kept,
    "backward runs only the blocks 0, 1, 2, 3 again": lambda blocks, x, c: checkpoint_sequential(
        list(blocks), c, x, use_reentrant=False
    ),
    "hand each chunk the output of the chunk before": on_the_input,
    "is a part cut off from autograd?": cut_off,
    "are saved instead of": keeps_more,
    "no gradient flows from it: say use_reentrant=False": reentrant,
    "your function returned None": lambda blocks, x, c: None,
}


@SETUPS
def test_chunks_accepts_the_solution(here: Setup) -> None:
    state = torch.get_rng_state()
    for solution in (
        in_sizes(chunk_sizes),
        takes_from_the_list,
        lambda blocks, x, c: ms.run(list(blocks), x, ms.Chunked(c)),
    ):
        found = chunk_checks.check_chunks(solution, here)
        assert found.passed is True, str(found)
    assert torch.equal(torch.get_rng_state(), state)


def test_chunks_says_what_yours_are() -> None:
    assert "Your blocks: chunks of 3, 2, 2." in str(chunk_checks.check_chunks(in_sizes(chunk_sizes), ODD))


@SETUPS
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("reason", "answer"), WRONG_CHUNKS.items(), ids=WRONG_CHUNKS)
def test_chunks_names_the_mistake(here: Setup, reason: str, answer: Callable[..., Tensor]) -> None:
    found = chunk_checks.check_chunks(answer, here)
    assert found.passed is False
    assert reason in str(found)


# 3. Silent parameters


def silent(model: nn.Module) -> list[str]:
    return [
        n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.count_nonzero())
    ]


#: Answers that only more than one silent parameter, a bias, a sign, or what an older step left, tell from right ones.
NEARLY_RIGHT: dict[str, Callable[[nn.Module], list[str]]] = {
    "the largest": lambda m: [
        n for n, p in m.named_parameters() if p.requires_grad and (p.grad is None or p.grad.max() == 0)
    ],
    "the smallest": lambda m: [
        n for n, p in m.named_parameters() if p.requires_grad and (p.grad is None or p.grad.min() == 0)
    ],
    "above zero": lambda m: [
        n for n, p in m.named_parameters() if p.requires_grad and (p.grad is None or not (p.grad > 0).any())
    ],
    "below zero": lambda m: [
        n for n, p in m.named_parameters() if p.requires_grad and (p.grad is None or not (p.grad < 0).any())
    ],
    "the first": lambda m: silent(m)[:1],
    "the last": lambda m: silent(m)[-1:],
    "the first layer's weight": lambda m: [n for n in silent(m) if n == "0.weight"],
    "weights": lambda m: [n for n in silent(m) if n.endswith("weight")],
    "weights of Linears": lambda m: [
        f"{name}.weight"
        for name, one in m.named_children()
        if isinstance(one, nn.Linear) and f"{name}.weight" in silent(m)
    ],
    "matrices": lambda m: [n for n, p in m.named_parameters() if n in silent(m) and p.ndim == 2],
    "frozen ones with zeros": lambda m: [
        n
        for n, p in m.named_parameters()
        if (p.grad is None and p.requires_grad) or (p.grad is not None and not p.grad.any())
    ],
}


@SETUPS
@pytest.mark.parametrize("answer", NEARLY_RIGHT.values(), ids=NEARLY_RIGHT)
def test_silent_refuses_what_is_right_by_luck(here: Setup, answer: Callable[[nn.Module], list[str]]) -> None:
    found = chunk_checks.check_silent(answer, here)
    assert found.passed is False
    assert "name" in str(found)


WRONG_NAMES = {
    "so that its .grad is None: you do not name 0.weight": lambda m: [
        n for n, p in m.named_parameters() if p.grad is not None and not p.grad.any()
    ],
    "left zeros in the first layer: you do not name 0.weight": lambda m: [
        n for n, p in m.named_parameters() if p.requires_grad and p.grad is None
    ],
    "whose sum is 0: you name 0.weight, 1.bias, 1.weight, 2.bias, 2.weight, which are all right": lambda m: [
        n for n, p in m.named_parameters() if p.requires_grad and (p.grad is None or p.grad.sum() == 0)
    ],
    "small but not 0: you name 0.weight, 1.bias": lambda m: [
        n for n, p in m.named_parameters() if p.requires_grad and (p.grad is None or p.grad.norm() < 1e-12)
    ],
    "that is frozen: you name 0.weight, which is all right": lambda m: [
        n for n, p in m.named_parameters() if p.grad is None or not p.grad.any()
    ],
    "one single number that is not 0: you name": lambda m: [
        n for n, p in m.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.all())
    ],
    "you name a parameter twice": lambda m: silent(m) * 2,
    "your function returned ('0.weight',)": lambda m: ("0.weight",),
    "A plain step, in which every parameter gets its gradient: you name 0.weight": lambda m: [
        n for n, _ in m.named_parameters()
    ],
}


@SETUPS
def test_silent_accepts_the_solution(here: Setup) -> None:
    found = chunk_checks.check_silent(silent, here)
    assert found.passed is True, str(found)


@SETUPS
@pytest.mark.parametrize(("reason", "answer"), WRONG_NAMES.items(), ids=WRONG_NAMES)
def test_silent_names_the_mistake(here: Setup, reason: str, answer: Callable[[nn.Module], list[str]]) -> None:
    found = chunk_checks.check_silent(answer, here)
    assert found.passed is False
    assert reason in str(found)
