"""Strategies under PyTorch's DistributedDataParallel and FSDP2, in two processes: equal gradients, exact bytes.

A launch of ranks takes seconds, so one serves for all strategies, models, wrappers and orders.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path

import pytest

import memsave_lib as ms
from memsave_lib import formulas
from memsave_lib.course import deepspeed_peer, ranks
from memsave_lib.course.rank_jobs import ENDS, WRAPPERS
from memsave_lib.course.ranks import Outcome, Run
from memsave_lib.strategies import Strategy
from ranks_that_fail import StaleWeights, Stuck

L, HIDDEN, HEADS, BATCH, SEQ = 4, 64, 1, 2, 16
SHAPE = formulas.BlockShape(BATCH, SEQ, HIDDEN, HEADS)
STRATEGIES: tuple[Strategy, ...] = (
    ms.KeepAll(),
    ms.FullCheckpoint(),
    ms.Selective(2),
    ms.SelectiveOps("attention"),
    ms.Chunked(2),
    ms.Recursive(),
    ms.Offload(store="host", min_bytes=1),
    ms.Offload(ms.FullCheckpoint(), store="disk", min_bytes=1),
)
RUNS = tuple(
    Run(wrapper, strategy, model, apply_first)
    for model, orders in (("stack", (False, True)), ("gpt2", (False,)))
    for wrapper in WRAPPERS
    for strategy in STRATEGIES
    for apply_first in orders
)
HERE = tuple(run for run in RUNS if not ranks.why_not(run.wrapper))
JOB = ranks.Training(HERE, L, HIDDEN, HEADS, BATCH, SEQ)


def name(run: Run) -> str:
    order = "apply_wrap" if run.apply_first else "wrap_apply"
    return "-".join((run.model, run.wrapper, run.strategy.label.replace(" ", "_"), order))


def parameter(run: Run) -> object:
    reason = ranks.why_not(run.wrapper)
    return pytest.param(run, id=name(run), marks=pytest.mark.skipif(bool(reason), reason=reason))


every_run = pytest.mark.parametrize("run", list(map(parameter, RUNS)))


@pytest.fixture(scope="module")
def outcomes() -> dict[Run, list[Outcome]]:
    found: dict[Run, list[Outcome]] = {}
    for outcome in ranks.train(JOB):
        found.setdefault(outcome.run, []).append(outcome)
    return found


@every_run
def test_gradients_are_those_of_plain_training_bit_by_bit(outcomes: dict[Run, list[Outcome]], run: Run) -> None:
    """With the same wrapper, and with one process that takes the ranks' halves one after the other."""
    assert [outcome.rank for outcome in outcomes[run]] == [0, 1]
    for outcome in outcomes[run]:
        assert outcome.equals_plain
        assert outcome.equals_one_process
        assert outcome.off_whole_batch < 1e-5  # which adds in another order


@every_run
def test_bytes_and_counts_are_those_of_the_closed_form(outcomes: dict[Run, list[Outcome]], run: Run) -> None:
    wanted = ranks.expected(run, JOB)
    for outcome in outcomes[run]:
        found = {field.name: getattr(outcome, field.name) for field in fields(wanted)}
        assert {name: found[name] - number for name, number in asdict(wanted).items()} == dict.fromkeys(found, 0)
        if run.wrapper == "DDP":
            assert outcome.collectives["all-reduce"] >= 1
            assert set(outcome.collectives) <= {"all-reduce", "broadcast_"}  # of buffers, where a model has some
        else:
            assert set(outcome.collectives) == {"all-gather", "reduce-scatter"}


def test_the_forecast_of_a_small_job_on_paper() -> None:
    """Weights of a block of width 64: 49,984 numbers; GPT-2 adds two tables and a norm."""
    block, around = 4 * 49_984, 4 * (256 * 64 + 16 * 64 + 2 * 64)
    stack = ranks.expected(Run("FSDP2", ms.Chunked(2)), JOB)
    assert (stack.parameter_bytes, stack.average_bytes, stack.gathered_bytes) == (2 * block, 4 * block, 8 * block)
    assert (stack.all_gathers, stack.reduce_scatters, stack.whole_blocks, stack.block_recomputes) == (8, 4, 2, 4)
    gpt2 = ranks.expected(Run("FSDP2", ms.FullCheckpoint(), "gpt2"), JOB)
    assert gpt2.parameter_bytes == (4 * block + around) // 2
    assert (gpt2.all_gathers, gpt2.gathered_bytes, gpt2.whole_blocks) == (9, 8 * block + around, 1)
    alone = ranks.expected(Run("DDP", ms.FullCheckpoint()), JOB)
    state = 4 * BATCH * SEQ * HIDDEN
    assert (alone.saved_bytes, alone.parameter_bytes, alone.all_gathers) == (5 * state, 4 * block, 0)


@pytest.fixture
def deepspeed() -> None:
    if reason := deepspeed_peer.why_not():
        if os.environ.get("REQUIRE_DEEPSPEED") == "1":
            pytest.fail(f"REQUIRE_DEEPSPEED=1: {reason}")
        pytest.skip(reason)


def test_partitioned_activations_on_two_ranks(deepspeed) -> None:
    """What DeepSpeed 0.19.8 does. When this fails, its behavior has changed: rewrite the tale of notebook 07."""
    chunks = 3
    found = ranks.partition(ranks.Partitioning(chunks, 2, HIDDEN, HEADS, BATCH, SEQ))
    assert [(held.rank, held.end, held.partitioned) for held in found] == [
        (rank, end, partitioned) for rank in (0, 1) for end in ENDS for partitioned in (False, True)
    ]
    assert all(held.equals_plain for held in found)
    state = SHAPE.checkpoint_bytes
    crumbs = chunks * (3 * 8 + 4)  # for each chunk the three sizes of its input, and what is left of it: one number
    wanted = {
        ("an addition", False): (chunks + 1) * state,
        ("an addition", True): chunks * state // 2 + state + crumbs,
        ("a Linear", False): (chunks + 1) * state,
        # The output of a Linear is a view: what it is a view of stays, and the shares come on top.
        ("a Linear", True): chunks * state // 2 + chunks * state + crumbs,
    }
    loss = 4
    assert [held.held_bytes - loss - wanted[held.end, held.partitioned] for held in found] == [0] * len(found)


def test_without_deepspeed_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_peer, "why_not", lambda: "DeepSpeed is not installed here")
    with pytest.raises(RuntimeError, match="not installed here"):
        ranks.partition(ranks.Partitioning(3, 2, HIDDEN, HEADS, BATCH, SEQ))


@pytest.mark.skipif(bool(ranks.why_not("FSDP2")), reason=ranks.why_not("FSDP2"))
def test_the_error_of_a_rank_is_shown_and_stale_shares_are_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"(?s)2 ranks ended with status 1.*modified by an inplace operation"):
        ranks.launch(StaleWeights())
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_take_too_long_are_ended_and_leave_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notes, temporary = tmp_path / "notes", tmp_path / "temporary"
    notes.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    class OutOfTimeOnceAllRun(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            if timeout != ranks.TIMEOUT_SECONDS:
                return super().wait(timeout)
            while len([*notes.glob("[01]")]) < 2:
                assert self.poll() is None
                time.sleep(0.05)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", OutOfTimeOnceAllRun)
    with pytest.raises(TimeoutError, match="2 ranks have not ended in 240 seconds"):
        ranks.launch(Stuck(notes))
    for note in notes.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(note.read_text()), 0)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Run("FSDP", ms.KeepAll()), "wrapper is one of 'DDP', 'FSDP2', got 'FSDP'"),
        (lambda: Run("DDP", ms.KeepAll(), "llama"), "model is one of 'stack', 'gpt2', got 'llama'"),
        (lambda: ranks.Training((), 2, 64, 1, 1, 8, n_ranks=6), "n_ranks is a power of two, got 6"),
        (lambda: ranks.Training((), 2, 64, 1, 1, 8, n_ranks=1), "n_ranks must be a whole number of at least 2, got 1"),
        (lambda: ranks.Training((), 0, 64, 1, 1, 8), "n_layers must be a whole number of at least 1, got 0"),
    ],
    ids=["wrapper", "model", "six_ranks", "one_rank", "layers"],
)
def test_a_wrong_argument_is_named(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_an_old_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: "2.6.0+cpu")
    assert ranks.why_not("DDP") == ""
    with pytest.raises(RuntimeError, match=r"needs PyTorch 2\.11 or newer on a CPU, and this is 2\.6\.0\+cpu"):
        ranks.train(ranks.Training((Run("FSDP2", ms.KeepAll()),), L, HIDDEN, HEADS, BATCH, SEQ))


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "3.0"])
def test_a_new_pytorch_will_do(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: version)
    assert ranks.why_not("FSDP2") == ""
