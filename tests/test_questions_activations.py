"""The predictions of notebook 01, at what its block and its loss really hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memsave_lib as ms
from memsave_lib.course.env import Setup
from memsave_lib.course.questions import activations, checkpointing, selective
from tests.asking import assert_diagnoses
from tests.helpers import saved_bytes
from tests.test_checks import DEFAULTS, ODD, SETUPS, SMALLEST

#: Heads of 64 make the largest share of crumbs with the narrowest block.
WIDEST = Setup(8, 1, 1, 1024, 1, 1, torch.device("cpu"))


@pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST, WIDEST], ids=["defaults", "odd", "smallest", "widest"])
def test_a_block_saves_sixteen_hidden_states(here: Setup) -> None:
    block = ms.TransformerBlock(here.hidden, here.heads)
    x = torch.randn(here.batch_size, here.seq_len, here.hidden, requires_grad=True)
    assert_diagnoses(activations.block_saves(), saved_bytes(lambda: block(x), block) / x.nbytes, right=16)


@pytest.mark.parametrize(
    ("number", "missing"),
    [
        (12, "GELU keeps its input, and the projection behind it"),
        (13, "queries, keys and values"),
        (17, "the block's own output belongs to whoever reads it next"),
        (24, "of which 24 are what several GPUs may share"),
        (34, "2sbh for masks of dropout"),
        (14, "which are three, as one hidden state, or left out the inputs of both LayerNorms"),
        (12, "Or what attention keeps: queries, keys, values and its output"),
        (18, "Perhaps you counted the two additions"),
        (1, "the input alone"),
    ],
)
def test_a_wrong_count_of_a_block_hears_what_is_missing(number: int, missing: str) -> None:
    assert missing in str(activations.block_saves().judge(number, 16.03))


@SETUPS
def test_four_tensors_of_the_logits_size_meet_at_the_loss(here: Setup) -> None:
    """With a smaller vocabulary than the notebook's, so that crumbs weigh more."""
    vocabulary = 2048
    model = ms.gpt2("tiny", n_layer=1, n_embd=64, n_head=1, n_positions=here.seq_len, vocab_size=vocabulary)
    batch = torch.zeros(here.batch_size, here.seq_len, dtype=torch.int64)
    with ms.MemoryMeter(model) as meter:
        out = model(input_ids=batch, labels=batch, use_cache=False)
        out.loss.backward()
    trace = meter.trace
    logits = 4 * here.batch_size * here.seq_len * vocabulary
    at_loss = trace.frame().query("op == '_log_softmax_backward_data'")["total"].max()
    found = (at_loss - trace.at_peak["parameter"] - (trace.saved_bytes - logits)) / logits
    assert found == pytest.approx(4, rel=0.001)
    assert_diagnoses(activations.logits_at_the_loss(), found, right=4)
    assert "out holds them" in str(activations.logits_at_the_loss().judge(3, found))


@pytest.mark.parametrize("question", [activations.block_saves, selective.free_share, checkpointing.flops_ratio])
def test_what_help_shows_of_a_question_is_not_its_answer(question: Callable[..., object]) -> None:
    for answer in ("sixteen", "16", "outputs", "GELU", "24", "8 of", "six "):
        assert answer not in question.__doc__
