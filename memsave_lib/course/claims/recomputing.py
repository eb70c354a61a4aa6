"""Family B: full and selective checkpointing. Each claim has a check, which measures, and a judge, which compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

import memsave_lib as ms
from memsave_lib import formulas
from memsave_lib.course import records
from memsave_lib.course.claims.finding import AS_STATED, Check, Finding, gigabytes, judged, near, percent
from memsave_lib.course.claims.shapes import extra_of_step, llama_shape, training_state_bytes
from memsave_lib.course.saved import saved_for_backward
from memsave_lib.formulas import BlockShape

#: The explainers' homework: six blocks of width 512, batch 8, 128 tokens, float32.
HOMEWORK = BlockShape(8, 128, 512, 8)
#: A model of 7B parameters, as explainers describe it: 32 layers of width 4,096, here with 2,048 tokens.
SEVEN_LAYERS, SEVEN_TOKENS = 32, 2048


def b1() -> Finding:
    def fused(batch: int) -> int:
        shape = llama_shape("llama-2-7b", batch, SEVEN_TOKENS)
        return sum(formulas.llama_terms(ms.KeepAll().plan(SEVEN_LAYERS), shape, 32_000).values())

    def written_out(batch: int) -> int:
        options = {"attention": "math", "dropout": 0.1, "dtype": "bfloat16", "device": "cuda"}
        return SEVEN_LAYERS * formulas.block_saved_bytes(BlockShape(batch, SEVEN_TOKENS, 4096, 32, **options))

    return judge_b1(fused, written_out)


def judge_b1(fused: Callable[[int], int], written_out: Callable[[int], int]) -> Finding:
    """``fused`` and ``written_out`` give saved bytes for a batch size."""

    def needed(saved: Callable[[int], int]) -> int:
        return next(batch for batch in range(1, 1_000) if saved(batch) > 100e9)

    first, first_fused = needed(written_out), needed(fused)
    return judged(
        "B1",
        {
            "the batch is 1": min(first, first_fused) == 1,
            f"the batch is {first_fused} or more ({first} with attention written out and dropout)": (
                fused(first_fused) > 100e9 and written_out(first) > 100e9
            ),
        },
        f"One sequence saves {gigabytes(fused(1))} in Llama-2-7B with its loss, whose attention is fused, and "
        f"{gigabytes(written_out(1), 0)} in a GPT with attention written out and dropout.",
    )


def b2() -> Finding:
    shape, plan = BlockShape(1, SEVEN_TOKENS, 4096, 32, dtype="bfloat16"), ms.FullCheckpoint().plan(SEVEN_LAYERS)
    extra = {early_stop: extra_of_step(plan, shape, early_stop) for early_stop in (True, False)}
    saved = [formulas.stack_saved_bytes(one, shape) for one in (ms.KeepAll().plan(SEVEN_LAYERS), plan)]
    long = {row["label"]: row["peak_bytes"] for row in records.load("long_text").rows}
    short = {row["variant"]: row.get("peak_bytes") for row in records.load("gpt2_chunks").rows}
    state = training_state_bytes()
    return judge_b2(
        activations=1 - saved[1] / saved[0],
        long_peak=1 - long["checkpointing"] / long["keep all"],
        short_peak=1 - (state + short["full checkpoint"]) / (state + short["keep all"]),
        extra=extra,
    )


def judge_b2(activations: float, long_peak: float, short_peak: float, extra: Mapping[bool, float]) -> Finding:
    """Shares that are saved, and FLOPs added to a step with early stop (True) and without."""
    time = 0.2 <= round(extra[True], 2) <= 0.3

    def as_claimed(share: float) -> bool:
        return time and 0.5 <= share <= 0.8

    return judged(
        "B2",
        {
            "the peak of everything is meant, with long sequences": as_claimed(long_peak),
            "the peak of everything is meant, with short sequences": as_claimed(short_peak),
            "activations are meant": as_claimed(activations),
        },
        f"Of saved activations {percent(activations)} go. The peak with weights and optimizer falls by "
        f"{percent(long_peak)} for GPT-2 on 8,192 tokens, by {percent(short_peak)} on 4 x 128 (recorded). The time is "
        f"{'fair' if time else 'not fair'}: {percent(extra[True], '+')} of a step in FLOPs, "
        f"{percent(extra[False], '+')} without early stop.",
    )


def b3() -> Finding:
    block, unit = formulas.block_saved_bytes(HOMEWORK), HOMEWORK.checkpoint_bytes

    def alive(strategy: ms.Strategy, n_blocks: int) -> int:
        """What is saved, and the last block live again if it was recomputed."""
        plan = strategy.plan(n_blocks)
        return formulas.stack_saved_bytes(plan, HOMEWORK) + (block if plan.actions[-1] == "recompute" else 0)

    strategies = (ms.KeepAll(), ms.FullCheckpoint(), ms.Selective(2))
    return judge_b3([alive(one, 12) for one in strategies], block, unit, alive(ms.FullCheckpoint(), 80))


def judge_b3(alive: list[int], block: int, checkpoint: int, deep: int) -> Finding:
    """``alive`` are bytes as backward begins: keep-all, full, every second; ``deep`` those of 80 blocks, full."""

    def as_claimed(unit: int) -> bool:
        return [round(nbytes / unit) for nbytes in alive] == [12, 2, 7]

    blocks, inputs = ([nbytes / unit for nbytes in alive] for unit in (block, checkpoint))
    return judged(
        "B3",
        {
            "a unit is all that a transformer block saves": as_claimed(block),
            "a unit is a checkpoint, which is a block's input": as_claimed(checkpoint),
        },
        f"As backward begins, {blocks[0]:.0f}, {blocks[1]:.2f} and {blocks[2]:.2f} blocks' worth is alive: full "
        f"checkpointing keeps every input and one live block. In inputs it is {inputs[0]:.0f}, {inputs[1]:.0f} and "
        f"{inputs[2]:.0f}. And 2 is no constant: of 80 blocks {deep / block:.1f} are alive.",
    )


def b4() -> Finding:
    torch.manual_seed(0)
    stack, x = ms.BlockStack(12, 64, 1), torch.randn(1, 32, 64)

    def step() -> None:
        stack(x).sum().backward()

    plain = ms.flops.count_flops(step)
    more = {}
    for early_stop in (True, False):
        with ms.apply(stack, ms.Selective(2)), set_checkpoint_early_stop(early_stop):
            more[early_stop] = ms.flops.count_flops(step) - plain
    forward = sum(cost.forward for cost in ms.flops.profile_blocks(stack, step))
    return judge_b4(forward, plain - forward, more)


def judge_b4(forward: int, backward: int, more: Mapping[bool, int]) -> Finding:
    """FLOPs of a plain step, and what recomputation adds with early stop (True) and without."""
    whole, stopped = more[False], more[True]
    return judged(
        "B4",
        {AS_STATED: near(whole / backward, 0.5) or near(stopped / backward, 0.5)},
        f"Half of the blocks is half of a forward, and backward is {backward / forward:.1f} forwards: "
        f"{percent(whole / backward, '+')} of backward, {percent(whole / (forward + backward), '+')} of the step. With "
        f"PyTorch's early stop {percent(stopped / backward, '+')} and {percent(stopped / (forward + backward), '+')} "
        f"(FLOPs, counted).",
    )


def b5() -> Finding:
    plans = [strategy.plan(6) for strategy in (ms.KeepAll(), ms.Selective(2))]
    saved = [formulas.stack_saved_bytes(plan, HOMEWORK) for plan in plans]
    weights = 6 * 4 * formulas.block_parameters(HOMEWORK.hidden)
    peaks = [weights + formulas.stack_peak_bytes(plan, HOMEWORK, loss="mse", new_gradients=True) for plan in plans]
    extra = {stop: extra_of_step(plans[1], HOMEWORK, stop) for stop in (True, False)}
    return judge_b5(1 - saved[1] / saved[0], 1 - peaks[1] / peaks[0], extra)


def judge_b5(activations: float, peak: float, extra: Mapping[bool, float]) -> Finding:
    """Shares that are saved, and FLOPs added to a step with early stop (True) and without."""
    cheap = near(extra[True], 0.1, 0.25)
    return judged(
        "B5",
        {
            "saved activations are meant": near(activations, 0.5) and cheap,
            "the peak is meant": near(peak, 0.5) and cheap,
        },
        f"The explainers' six blocks: {percent(activations)} of the saved activations go, but {percent(peak)} of the "
        f"peak, in which weights and gradients are too. The time is {'fair' if cheap else 'not fair'}: "
        f"{percent(extra[True], '+')} in FLOPs, {percent(extra[False], '+')} without early stop.",
    )


def b6() -> Finding:
    cases = {
        "attention is written out": {"attention": "math"},
        "attention is fused": {},
        "a CPU runs it with dropout": {"dropout": 0.1},
    }
    return judge_b6({name: _bytes_a_score(options) for name, options in cases.items()}, _core_shares())


def _bytes_a_score(options: Mapping[str, Any]) -> float:
    """Measured: bytes that grow with the square of the tokens, for each number in the matrix of scores."""
    torch.manual_seed(0)
    block, heads = ms.TransformerBlock(64, 2, **options), 2
    once, twice = (saved_for_backward(block, x=torch.randn(2, n, 64, requires_grad=True)).nbytes for n in (64, 128))
    return (twice - 2 * once) / (2 * 2 * heads * 64**2)


def _core_shares() -> dict[str, float]:
    """Of what GPT-3's block saves, the part that recomputing the attention core gives back."""
    shares = {}
    for attention in ("math", "sdpa"):
        shape = BlockShape(1, 2048, 12288, 96, attention=attention, dtype="bfloat16", dropout=0.1, device="cuda")
        kept = formulas.block_saved_bytes(shape, ("attention",))
        shares[attention] = 1 - kept / formulas.block_saved_bytes(shape)
    return shares


def judge_b6(quadratic: Mapping[str, float], core: Mapping[str, float]) -> Finding:
    written_out, fused, dropout = quadratic.values()
    return judged(
        "B6",
        {name: nbytes > 0 for name, nbytes in quadratic.items()},
        f"Measured, bytes for each attention score: {written_out:.0f} written out, {fused:.0f} fused, {dropout:.0f} "
        f"with dropout on a CPU. Recomputing the core gives back {percent(core['math'])} of GPT-3's block written "
        f"out, {100 * core['sdpa']:.1f} % fused: that kernel recomputes already.",
    )


def b7() -> Finding:
    torch.manual_seed(0)
    stack, x = ms.BlockStack(4, 64, 2), torch.randn(1, 64, 64)
    runs = []
    for strategy in (ms.KeepAll(), ms.FullCheckpoint()):
        with ms.apply(stack, strategy) as applied, ms.MemoryMeter(stack) as meter, torch.no_grad():
            stack(x)
        runs.append((meter.trace.saved_bytes, meter.trace.peak_bytes, applied.report.region_recomputes))
    return judge_b7(*runs)


def judge_b7(plain: tuple[int, int, int], recomputing: tuple[int, int, int]) -> Finding:
    """Saved bytes, peak bytes and recomputed regions of an inference."""
    return judged(
        "B7",
        {AS_STATED: recomputing[1] < plain[1]},
        f"Inference has no backward: {recomputing[0]} bytes are saved, {recomputing[2]} regions run again, and the "
        f"peak differs by {recomputing[1] - plain[1]} bytes (measured). It helps when such a model is trained.",
    )


CHECKS = (
    Check("B1", b1),
    Check("B2", b2),
    Check("B3", b3),
    Check("B4", b4),
    Check("B5", b5),
    Check("B6", b6),
    Check("B7", b7),
)
