"""Family A: long context and offloading. Each claim has a check, which measures, and a judge, which compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

import memsave_lib as ms
from memsave_lib import devices, formulas
from memsave_lib.course import costs, records
from memsave_lib.course.claims.finding import AS_STATED, Check, Finding, gigabytes, judged, near, percent
from memsave_lib.course.claims.shapes import llama_shape
from memsave_lib.models import LLAMA_SIZES
from memsave_lib.profiling import block_costs
from memsave_lib.units import human_bytes

SEVEN = LLAMA_SIZES["llama-2-7b"]
LAYERS, WIDTH, HEADS = SEVEN["num_hidden_layers"], SEVEN["hidden_size"], SEVEN["num_attention_heads"]
LONG = (32_768, 131_072)


def a1() -> Finding:
    shapes = [llama_shape("llama-2-7b", 1, tokens) for tokens in LONG]
    gpt = formulas.BlockShape(1, LONG[0], WIDTH, HEADS, dtype="bfloat16", dropout=0.1, device="cuda")
    # Blocks are alike, so two fake runs of few blocks say what one of all would: the difference of the two is a block.
    one, two = (_fake_llama_saved(n_layers, LONG[1]) for n_layers in (1, 2))
    return judge_a1(
        inputs=[LAYERS * shape.checkpoint_bytes for shape in shapes],
        gpt=LAYERS * formulas.block_saved_bytes(gpt),
        llama=[LAYERS * formulas.llama_block_saved_bytes(shape) for shape in shapes],
        whole=one + (LAYERS - 1) * (two - one),
    )


def _fake_llama_saved(n_layers: int, tokens: int) -> int:
    """Saved bytes of Llama-2-7B with so many blocks, by a fake run: nothing is allocated."""

    def build() -> nn.Module:
        return ms.llama("llama-2-7b", num_hidden_layers=n_layers, max_position_embeddings=tokens)

    return ms.estimate(build, 1, tokens, dtype="bfloat16", optimizer=None).saved_bytes


def judge_a1(inputs: Sequence[int], gpt: int, llama: Sequence[int], whole: int) -> Finding:
    """Bytes of all blocks' inputs at 32k and 128k, saved bytes of a GPT and of Llama-2-7B, and of the whole of that."""

    def as_claimed(found: Sequence[int]) -> bool:
        return near(found[0], 8.6e9) and near(found[1], 34e9)

    return judged(
        "A1",
        {
            "only the inputs of the blocks are kept, as under full checkpointing": as_claimed(inputs),
            "everything is kept": as_claimed(llama),
        },
        f"{gigabytes(inputs[0])} and {gigabytes(inputs[1])} are the inputs of the blocks alone. Everything saved is "
        f"{gpt / inputs[0]:.0f} times as much in a GPT, {llama[0] / inputs[0]:.0f} times in Llama-2-7B: "
        f"{gigabytes(llama[0], 0)} at 32k, and {gigabytes(whole, 0)} ({human_bytes(whole)}) at 128k with final norm "
        "and loss.",
    )


def a2() -> Finding:
    expected = sum(formulas.llama_terms(ms.FullCheckpoint().plan(2), _TINY_LLAMA, 256).values())
    shapes = [llama_shape("llama-2-7b", 1, tokens) for tokens in (8_192, 51_200, 131_072)]
    terms = formulas.llama_block_terms(shapes[0])
    return judge_a2(
        more_with_cache=_llama_saved(cached=True) - _llama_saved(),
        unexplained=_llama_saved(ms.FullCheckpoint()) - expected,
        factors=[formulas.llama_block_saved_bytes(shape) / shape.checkpoint_bytes for shape in shapes],
        share=(terms["keys"] + terms["values"]) / sum(terms.values()),
    )


_TINY_LLAMA = formulas.LlamaShape(1, 128, 64, 4, 2, 172, dtype="float32")


def _llama_saved(strategy: ms.Strategy | None = None, cached: bool = False) -> int:
    """Saved bytes of the smallest Llama, measured; ``cached``: with the cache that it makes when nobody forbids it."""
    model = ms.llama("tiny", use_cache=cached)
    tokens = torch.zeros(1, _TINY_LLAMA.seq_len, dtype=torch.long)
    # A strategy, even one that keeps all, would switch the cache off.
    applied = nullcontext() if strategy is None else ms.apply(model, strategy)
    with applied, ms.MemoryMeter(model) as meter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return meter.trace.saved_bytes


def judge_a2(more_with_cache: int, unexplained: int, factors: Sequence[float], share: float) -> Finding:
    """``unexplained`` bytes under checkpointing are what closed forms without any key or value do not account for."""
    defeated = factors[-1] < 0.9 * factors[0]
    of = " to ".join(dict.fromkeys(f"{factor:.0f}" for factor in factors))
    return judged(
        "A2",
        {AS_STATED: (more_with_cache > 0 or unexplained > 0) and defeated},
        f"Training needs no cache; one left on adds {more_with_cache} saved bytes (a small Llama, measured). Keys and "
        f"values are activations, {percent(share)} of Llama-2-7B's, and are recomputed: at 8k, 50k and 128k tokens "
        f"checkpointing keeps 1 byte of {of}.",
    )


def a3() -> Finding:
    shape = formulas.BlockShape(1, 38_147, WIDTH, HEADS, dtype="bfloat16", device="cuda")
    blocks = [costs.paper_costs(shape)] * LAYERS
    device = replace(devices.A100, copy_out=25e9, copy_in=25e9)
    plan = ms.Offload(ms.FullCheckpoint(), keep_last=0).plan(LAYERS)
    waiting = {prefetch: ms.simulate(blocks, plan, device, prefetch=prefetch).stall_seconds for prefetch in (0, 2)}
    return judge_a3(LAYERS * shape.checkpoint_bytes, blocking=waiting[0], overlapped=waiting[2])


def judge_a3(nbytes: int, blocking: float, overlapped: float) -> Finding:
    """Bytes that travel, and simulated seconds for which computation waits."""
    return judged(
        "A3",
        {
            "every copy is waited for": near(blocking, 0.8),
            "copies run while the device computes": near(overlapped, 0.8),
        },
        f"The arithmetic is right, but it is not always a cost. With {gigabytes(nbytes)} of checkpoints at 25 GB/s "
        f"(simulated, A100) computation waits {blocking:.2f} s if every copy is waited for, {overlapped:.2f} s if "
        "copies overlap.",
    )


def a4() -> Finding:
    shape = formulas.BlockShape(1, 4096, WIDTH, HEADS, dtype="float16", device="cuda")
    blocks, pinned = costs.stack_costs(shape, LAYERS), (devices.T4, devices.A100, devices.H100)

    def slowdowns(strategy: ms.Strategy, machines: Sequence[ms.Device], prefetch: int) -> list[float]:
        plan = ms.Offload(strategy).plan(LAYERS)
        steps = [ms.simulate(blocks, plan, machine, prefetch=prefetch) for machine in machines]
        return [step.step_seconds / step.compute_seconds for step in steps]

    cases = {
        "checkpoints alone are offloaded": (ms.FullCheckpoint(), pinned),
        "everything is offloaded to pinned memory": (ms.KeepAll(), pinned),
        "everything is offloaded to memory that is not pinned": (ms.KeepAll(), [devices.T4.pageable()]),
    }
    return judge_a4(
        {name: (slowdowns(*case, prefetch=4), slowdowns(*case, prefetch=0)) for name, case in cases.items()}
    )


def judge_a4(slowdowns: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Finding:
    """``slowdowns``: case -> times the step without copies, overlapped and blocking, on each device."""
    cases = {
        name: all(2 <= times <= 3 for times in overlapped) and all(3 <= times <= 5 for times in blocking)
        for name, (overlapped, blocking) in slowdowns.items()
    }
    checkpoints, pinned, pageable = (
        f"{_range(overlapped)} ({_range(blocking)})" for overlapped, blocking in slowdowns.values()
    )
    return judged(
        "A4",
        cases,
        "Times the step without copies (in brackets: if each is waited for), simulated, 4,096 tokens. Checkpoints "
        f"alone: {checkpoints}; everything: {pinned} on T4, A100, H100; everything on a T4, memory not pinned: "
        f"{pageable}.",
    )


def _range(numbers: Sequence[float]) -> str:
    low, high = (f"{number:.2f}" for number in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


def a5() -> Finding:
    torch.manual_seed(0)
    stack, x = ms.BlockStack(6, 64, 2), torch.randn(1, 64, 64)
    # The first block would send less: its input belongs to the caller.
    _, *others = block_costs(stack, lambda: stack(x).sum().backward(), min_bytes=1)
    shape = formulas.BlockShape(1, 4096, WIDTH, HEADS, dtype="float16", device="cuda")
    blocks, waits = [costs.paper_costs(shape)] * 12, []
    for actions in (("offload",) * 3 + ("keep",) * 9, ("keep",) * 9 + ("offload",) * 3):
        step = ms.simulate(blocks, ms.PerBlock(actions).plan(12), devices.A100)
        waits.append(step.stall_seconds / step.compute_seconds)
    return judge_a5([sum(cost.saved) for cost in others], *waits)


def judge_a5(saved: Sequence[int], wait_first: float, wait_last: float) -> Finding:
    """Bytes of each block, and simulated waiting for the first and for the last blocks, as a share of the step."""
    each = " to ".join(f"{size:,}" for size in dict.fromkeys((min(saved), max(saved))))
    return judged(
        "A5",
        {AS_STATED: saved[-1] > max(saved[:-1]) and wait_last < wait_first},
        f"Every block saves {each} bytes (measured), and backward wants the last ones first. Simulated on an A100, "
        f"sending the last 3 of 12 adds {percent(wait_last)} to a step, the first 3 {percent(wait_first)}.",
    )


def a10() -> Finding:
    rows = {row["label"]: row for row in records.load("long_text").rows}
    torch.manual_seed(0)
    stack, x = ms.BlockStack(3, 64, 2), torch.randn(1, 64, 64)

    def step() -> Tensor:
        loss = stack(x).square().mean()
        loss.backward()
        return loss

    exact = ms.measure(step, stack, ms.Offload(min_bytes=1), repeats=0).equal_gradients
    return judge_a10(*(rows[label] for label in ("keep all", "offloading", "both")), exact=exact)


def judge_a10(
    plain: Mapping[str, float], everything: Mapping[str, float], both: Mapping[str, float], exact: bool
) -> Finding:
    """Rows of the record, and whether loss and gradients were bit-equal here."""

    def figures(row: Mapping[str, float]) -> tuple[float, float, bool]:
        lower, times = 1 - row["peak_bytes"] / plain["peak_bytes"], row["step_seconds"] / plain["step_seconds"]
        return lower, times, exact and row["perplexity"] == plain["perplexity"]

    def as_claimed(lower: float, times: float, equal: bool) -> bool:
        return 0.2 <= lower <= 0.4 and 2 <= times <= 3 and equal

    (lower, times, equal), (both_lower, both_times, both_equal) = figures(everything), figures(both)
    return judged(
        "A10",
        {
            "everything is offloaded": as_claimed(lower, times, equal),
            "checkpoints are offloaded": as_claimed(both_lower, both_times, both_equal),
        },
        f"Perplexity {'is equal to the last digit, as it must be' if equal and both_equal else 'changes'}. The rest "
        f"is no law: GPT-2 on 8,192 tokens, to disk (recorded, CPU), peaks {percent(lower)} lower in {times:.2f} "
        f"times the time; with checkpoints offloaded {percent(both_lower)} lower in {both_times:.2f} times.",
    )


CHECKS = (Check("A1", a1), Check("A2", a2), Check("A3", a3), Check("A4", a4), Check("A5", a5), Check("A10", a10))
