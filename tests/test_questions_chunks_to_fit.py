"""Predictions of notebooks 04, 05 and 06: the answer is right, and every plausible mistake gets its own reason."""

from __future__ import annotations

import pytest
import torch

import memsave_lib as ms
from asking import assert_diagnoses
from memsave_lib import devices, formulas
from memsave_lib.course.env import Setup
from memsave_lib.course.questions import chunks, fit, offloading

CPU = torch.device("cpu")
DEFAULTS = Setup(256, 2, 12, 128, 2, 5, CPU)
ODD = Setup(96, 5, 7, 128, 3, 2, CPU, seed=3)
SMALLEST = Setup(8, 1, 1, 64, 1, 1, CPU)
WIDE = Setup(8, 1, 1, 1024, 1, 1, CPU)
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST, WIDE], ids=["defaults", "odd", "smallest", "wide"])


@SETUPS
def test_best_of_twelve(here: Setup) -> None:
    assert chunks.chunks_of_twelve(here) == 12
    assert_diagnoses(chunks.best_of_twelve(here), chunks.chunks_of_twelve(here))


def test_best_of_twelve_counts_what_comes_back() -> None:
    question = chunks.best_of_twelve(DEFAULTS)
    assert "brings back 3 blocks of 16 checkpoints each: the block is what weighs." in str(question.judge(4, 12))
    assert "12 blocks of 16 checkpoints each. That is the peak of keeping all." in str(question.judge(1, 12))
    assert "at least" in str(question.judge(13.86, 12)), "the root of the product need not be rounded"


def test_everything_hides() -> None:
    found = offloading.tokens_to_hide()
    assert found == formulas.hiding_seq_len(4096, 34, devices.A100.flops, devices.A100.copy_out)
    assert_diagnoses(offloading.everything_hides(), found)
    assert_diagnoses(offloading.everything_hides(), found, right=58_390), "with F/B rounded as in the text"


def test_llama_saves() -> None:
    """What the notebook finds: a fake run of the whole model."""
    found = ms.estimate(lambda: ms.llama("llama-2-7b"), 1, 131_072, dtype="bfloat16", optimizer=None).saved_bytes
    terms = formulas.llama_terms(ms.KeepAll().plan(32), fit.LLAMA_2_7B, vocab_size=32_000)
    assert found == sum(terms.values())
    assert_diagnoses(fit.llama_saves(), found / 2**30, right=748)
