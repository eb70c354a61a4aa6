"""One step with dropout: the same each time, and what is alive after forward beside what hooks see."""

from __future__ import annotations

import torch

import memsave_lib as ms
from memsave_lib.course.chunk_outcomes import Outcome, outcome
from memsave_lib.formulas import BlockShape, stack_saved_bytes


def test_chunks_hold_their_inputs_and_give_the_same_gradients() -> None:
    stack, x = ms.BlockStack(4, 64, 1, dropout=0.1), torch.randn(1, 24, 64)
    plain = outcome(stack, x)
    with ms.apply(stack, ms.Chunked(2)):
        chunked = outcome(stack, x)
    assert chunked.equals(plain) and outcome(stack, x).equals(plain)
    shape = BlockShape(1, 24, 64, 1, dropout=0.1)
    assert plain.hooked_bytes == stack_saved_bytes(ms.KeepAll().plan(4), shape)
    assert chunked.hooked_bytes == 2 * x.nbytes
    assert chunked.held_bytes < plain.held_bytes


def test_another_step_and_a_missing_gradient_are_not_equal() -> None:
    stack, x = ms.BlockStack(2, 64, 1), torch.randn(1, 8, 64)
    plain = outcome(stack, x)
    assert not outcome(stack, x, lambda v: 2 * stack(v)).equals(plain)
    assert outcome(stack, x, lambda v: stack.blocks[1](v)).gradients[0] is None
    there, missing = Outcome(0, 0, (torch.ones(1),)), Outcome(0, 0, (None,))
    assert there.equals(there) and not there.equals(missing) and not missing.equals(missing)
