"""The predictions of notebooks 02 and 03: answer right, stub untried, each plausible mistake diagnosed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import memsave_lib as ms
from asking import assert_diagnoses
from memsave_lib import formulas
from memsave_lib.course.env import Setup
from memsave_lib.course.questions import checkpointing, selective
from memsave_lib.formulas import BlockShape

DEFAULTS = Setup(512, 2, 6, 256, 2, 2, torch.device("cpu"))
ODD = Setup(96, 5, 7, 256, 3, 2, torch.device("cpu"), seed=3)
SMALLEST = Setup(8, 1, 1, 64, 1, 1, torch.device("cpu"))
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST], ids=["defaults", "odd", "smallest"])


def shape_of(here: Setup) -> BlockShape:
    return BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)


@SETUPS
def test_flops_ratio(here: Setup) -> None:
    assert_diagnoses(checkpointing.flops_ratio(here), 11 / 9)


@pytest.mark.parametrize("here", [ODD, SMALLEST], ids=["odd", "smallest"])
def test_flops_ratio_is_what_the_counter_finds(here: Setup) -> None:
    stack = ms.BlockStack(here.n_layers, here.hidden, here.heads)
    x = torch.randn(1, 8, here.hidden)
    step = lambda: stack(x).sum().backward()  # noqa: E731 (a step is handed over)
    plain = ms.flops.count_flops(step)
    with ms.apply(stack, ms.FullCheckpoint()):
        assert ms.flops.count_flops(step) / plain == 11 / 9


@SETUPS
def test_flops_ratio_where_the_counter_sees_fused_attention(here: Setup) -> None:
    """On a GPU: two products of the scores' size in forward, five in backward, two more when the block runs again."""
    assert_flops_ratio_on_a_gpu(here)


@pytest.mark.parametrize("seq_len", [768, 1024, 4096, 65536])
def test_flops_ratio_on_a_gpu_with_a_long_text(seq_len: int) -> None:
    """There attention weighs more than all projections, and 1 + 2/9 stays what was asked for."""
    assert_flops_ratio_on_a_gpu(replace(DEFAULTS, seq_len=seq_len))


def assert_flops_ratio_on_a_gpu(here: Setup) -> None:
    question = checkpointing.flops_ratio(replace(here, device=torch.device("cuda")))
    found = 1 + (16 * here.hidden + 4 * here.seq_len) / (72 * here.hidden + 14 * here.seq_len)
    assert_diagnoses(question, found)
    assert_diagnoses(question, found, right=1 + 2 / 9)
    assert "PyTorch stops at the last tensor" in str(question.judge(4 / 3, found))


@SETUPS
def test_moving_tokens(here: Setup) -> None:
    weights = 4 * formulas.block_parameters(here.hidden)
    each = formulas.block_saved_bytes(shape_of(here)) / (here.batch_size * here.seq_len)
    assert_diagnoses(checkpointing.moving_tokens(here), weights / each, right=0.75 * here.hidden)
    assert checkpointing.line_at(here) == 0.75 * here.hidden


@pytest.mark.parametrize("here", [DEFAULTS, ODD], ids=["defaults", "odd"])
def test_from_there_on_the_peak_falls(here: Setup) -> None:
    """By more than 1 %: from the line on, within a tenth of it."""

    def gain(tokens: int) -> float:
        shape = BlockShape(1, tokens, here.hidden, here.heads)
        kept, full = (
            formulas.stack_peak_bytes(
                strategy.plan(here.n_layers), shape, loss="sum", input_requires_grad=False, new_gradients=True
            )
            for strategy in (ms.KeepAll(), ms.FullCheckpoint())
        )
        return 1 - full / kept

    line = checkpointing.line_at(here)
    assert gain(line * 9 // 10) < 0.01 < gain(line * 11 // 10)


@SETUPS
def test_free_share(here: Setup) -> None:
    terms = formulas.block_terms(shape_of(here))
    free = terms["QKV input"] + terms["up-projection input"] + terms["down-projection input"]
    assert_diagnoses(selective.free_share(here), 100 * free / sum(terms.values()), right=37.5)


def test_one_hidden_state_too_many_is_not_always_the_same() -> None:
    said = str(selective.free_share(DEFAULTS).judge(43.75, 37.4))
    assert "Perhaps the second LayerNorm's input" in said and "attention's output" in said


@pytest.mark.parametrize(("predicted", "reason"), [(2.35, "not in per cent: 80/34"), (2.39, "You forgot the heads")])
def test_core_share_tells_two_near_mistakes_apart(predicted: float, reason: str) -> None:
    assert reason in str(selective.core_share().judge(predicted, 70.2))


def test_core_share() -> None:
    gpt3 = BlockShape(1, *selective.GPT3, attention="math", dtype="bfloat16", dropout=0.1, device="cuda")
    core = 1 - formulas.block_saved_bytes(gpt3, ("attention",)) / formulas.block_saved_bytes(gpt3)
    assert_diagnoses(selective.core_share(), 100 * core, right=100 * 80 / 114)
