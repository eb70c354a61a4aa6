"""The check of notebook 03's loop: three tools' meanings of the same words, and the attention core.

It follows :mod:`memsave_lib.course.checks`, and looks at outputs first, then at gradients, blocks run again and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor, nn

from memsave_lib.course.checks import NOT_FINISHED, NOT_TRIED, Verdict, all_equal, right, shown, untouched_error, wrong
from memsave_lib.course.env import Setup
from memsave_lib.formulas import BlockShape, stack_saved_bytes
from memsave_lib.meter import MemoryMeter
from memsave_lib.models import BlockStack
from memsave_lib.strategies import OPS, Plan, Segment, Selective, SelectiveOps

#: What each meaning recomputes: block i of a stack, with the number n of its tool.
WHOLE_BLOCKS: dict[str, Callable[[int, int], bool]] = {
    "course": lambda i, n: i % n != 0,
    "hugging face": lambda i, n: i % n == 0,
    "torchtitan": lambda i, n: (i + 1) % n == 0,
}
ATTENTION_CORE = "attention core"
_OPERATIONS = {"activation": "GELU", "norm": "LayerNorm"}
#: Blocks and n: all three meanings differ in both.
_MEANING_CASES = ((7, 3), (6, 2))
_MEANING_SHAPE = BlockShape(2, 24, 64, 2, attention="math")


def check_meanings(function: Callable[[str, Sequence[nn.Module], Tensor, int], Tensor], here: Setup) -> Verdict:
    """The exercise of notebook 03: ``function(meaning, blocks, x, n)`` runs the blocks as that meaning's tool does."""
    meanings = (*WHOLE_BLOCKS, ATTENTION_CORE)
    unwritten: list[str] = []
    with torch.random.fork_rng():
        for n_blocks, n in dict.fromkeys((*_MEANING_CASES, (here.n_layers, here.checkpoint_every))):
            torch.manual_seed(here.seed)
            # The bytes that are expected are those of float32, whatever the default type is.
            stack = BlockStack(n_blocks, 64, 2, attention="math").to(torch.float32)
            x = torch.randn(_MEANING_SHAPE.batch, _MEANING_SHAPE.seq_len, 64, dtype=torch.float32)
            for meaning in meanings:
                try:
                    fault = _fault(function, meaning, stack, x, n)
                except NotImplementedError as error:
                    if not untouched_error(error):
                        raise
                    unwritten.append(meaning)
                    continue
                if fault is not None:
                    return wrong(f"{meaning!r}, {n_blocks} blocks, n={n}: {fault}")
            if unwritten:
                break
    if unwritten == list(meanings):
        return NOT_TRIED
    if unwritten:
        return Verdict(False, f"{NOT_FINISHED} It is {', '.join(map(repr, unwritten))}; what you have is right so far.")
    return right(
        f"Four meanings, equal outputs and gradients. At your parameters (n_layers={here.n_layers}, "
        f"n={here.checkpoint_every}) they recompute: "
        + "; ".join(f"{name!r} {_names(_wanted(name, here.n_layers, here.checkpoint_every))}" for name in WHOLE_BLOCKS)
        + f"; {ATTENTION_CORE!r} no whole block."
    )


def _fault(
    function: Callable[[str, Sequence[nn.Module], Tensor, int], Tensor],
    meaning: str,
    stack: BlockStack,
    x: Tensor,
    n: int,
) -> str | None:
    """What is wrong with one answer, None when nothing is."""
    expected, expected_gradients = stack(x), []
    expected.sum().backward()
    for block in stack.blocks:
        expected_gradients.append([parameter.grad for parameter in block.parameters()])
    stack.zero_grad()
    runs = [0] * len(stack.blocks)

    def count(block: nn.Module, inputs: object) -> None:
        runs[list(stack.blocks).index(block)] += 1

    handles = [block.register_forward_pre_hook(count) for block in stack.blocks]
    try:
        with MemoryMeter(stack) as meter:
            output = function(meaning, list(stack.blocks), x, n)
            if not isinstance(output, Tensor):
                return f"your function returned {shown(output)}, not the output of the last block."
            if not torch.equal(output, expected):
                return "the output differs from a plain run: every block must run once, in order, on the output before."
            if not output.requires_grad:
                return "the output has no graph behind it: is all of the run cut off from autograd?"
            output.sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    gradients = [[parameter.grad for parameter in block.parameters()] for block in stack.blocks]
    stack.zero_grad()
    bad = [i for i, pair in enumerate(zip(gradients, expected_gradients, strict=True)) if not all_equal(*pair)]
    if bad:
        return f"equal output, but the gradients of {_names(bad)} differ: {_why_gradients_differ(bad, runs)}"
    return _fault_in_blocks(meaning, [i for i, times in enumerate(runs) if times > 1], runs, n) or _fault_in_bytes(
        meaning, len(runs), n, meter.trace.saved_bytes
    )


def _why_gradients_differ(bad: Sequence[int], runs: Sequence[int]) -> str:
    if max(runs) > 2:
        return f"block {runs.index(max(runs))} ran {max(runs)} times. Does a lambda look up the loop variable too late?"
    return "is a part of the run cut off from autograd?"


def _fault_in_blocks(meaning: str, again: list[int], runs: Sequence[int], n: int) -> str | None:
    wanted = _wanted(meaning, len(runs), n)
    if again == wanted:
        return None
    if meaning == ATTENTION_CORE:
        return f"you run {_names(again)} again as a whole; only the attention core inside each is to be recomputed."
    others = [other for other in WHOLE_BLOCKS if other != meaning and again == _wanted(other, len(runs), n)]
    reason = f" That is what {others[0]!r} means." if others else ""
    if not again:
        reason = " Nothing is recomputed."
    return f"you recompute {_names(again)}; it recomputes {_names(wanted)}.{reason}"


def _fault_in_bytes(meaning: str, n_blocks: int, n: int, saved: int) -> str | None:
    if meaning == ATTENTION_CORE:
        plan = SelectiveOps("attention").plan(n_blocks)
    elif meaning == "course":
        plan = Selective(n).plan(n_blocks)
    else:
        chosen = _wanted(meaning, n_blocks, n)
        plan = Plan(n_blocks, tuple(Segment(i, i + 1, recompute=i in chosen) for i in range(n_blocks)))
    wanted = stack_saved_bytes(plan, _MEANING_SHAPE)
    if saved == wanted:
        return None
    kept_all = stack_saved_bytes(Selective(1).plan(n_blocks), _MEANING_SHAPE)
    reason = " Nothing is recomputed." if saved == kept_all else _about_operations(n_blocks, saved)
    return f"equal gradients, but {saved:,} bytes are saved instead of {wanted:,}.{reason}"


def _about_operations(n_blocks: int, saved: int) -> str:
    """What ``SelectiveOps`` of other operations would save."""
    for count in range(1, len(OPS) + 1):
        for chosen in combinations(OPS, count):
            if saved == stack_saved_bytes(SelectiveOps(chosen).plan(n_blocks), _MEANING_SHAPE):
                others = " and ".join(_OPERATIONS[name] for name in chosen if name != "attention")
                way = "recomputes the core, and" if "attention" in chosen else "keeps the core, and recomputes"
                return f" That {way} {others}{' too' if 'attention' in chosen else ''}: see what SelectiveOps is given."
    return ""


def _wanted(meaning: str, n_blocks: int, n: int) -> list[int]:
    chosen = WHOLE_BLOCKS.get(meaning, lambda i, n: False)
    return [i for i in range(n_blocks) if chosen(i, n)]


def _names(blocks: Sequence[int]) -> str:
    if not blocks:
        return "no block"
    return f"block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}"
