"""Family C: chunks, and sizes of large models. Each claim has a check, and a judge that compares."""

from __future__ import annotations

import math
from collections.abc import Mapping

import memsave_lib as ms
from memsave_lib import formulas
from memsave_lib.course import records
from memsave_lib.course.chunk_checks import peak_bytes
from memsave_lib.course.claims.finding import AS_STATED, Check, Finding, gigabytes, judged, near, percent
from memsave_lib.course.claims.shapes import llama_shape, training_state_bytes
from memsave_lib.formulas import BlockShape
from memsave_lib.plan import BlockFlops

#: Llama-70B's depth, width and heads, with 4,096 tokens, as a GPT block in half precision: 34sbh bytes.
DEPTH = 80
SEVENTY = BlockShape(1, 4096, 8192, 64, dtype="bfloat16")
GPT_BYTES = 34


def schoolbook_peak(n_blocks: int, chunks: int, block: int, checkpoint: int) -> int:
    """Every checkpoint, and the saved activations of one chunk, the largest: no working set, no gradients.

    The exact peak of unequal chunks is a little lower: when a large chunk, one of the first, is alive, the checkpoints
    behind it are gone (:func:`memsave_lib.course.chunk_checks.peak_bytes`).
    """
    return chunks * checkpoint + -(-n_blocks // chunks) * block


def c1() -> Finding:
    depths, ratio = (256, 1024), 16
    best = [ms.Chunked.best(n, ratio, 1).num_checkpoints for n in depths]
    root = [math.isqrt(n) for n in depths]
    flops = BlockFlops(forward=3, tail=1)  # the projections' proportions: the down-projection is a third
    plans = {"chunks": ms.Chunked(best[0]).plan(depths[0]), "bisection": ms.Recursive().plan(depths[0])}
    step = 3 * depths[0] * flops.forward
    return judge_c1(
        growth=peak_bytes(depths[1], best[1], ratio, 1) / peak_bytes(depths[0], best[0], ratio, 1),
        too_high=peak_bytes(depths[0], root[0], ratio, 1) / peak_bytes(depths[0], best[0], ratio, 1),
        chunks=best[0],
        checkpoints=plans["bisection"].n_regions,
        extra={name: plan.extra_flops([flops] * depths[0]) / step for name, plan in plans.items()},
    )


def judge_c1(growth: float, too_high: float, chunks: int, checkpoints: int, extra: Mapping[str, float]) -> Finding:
    """``growth`` of the peak from 256 to 1,024 blocks; ``extra`` FLOPs as a share of the step."""
    cheap = {name: share <= 0.34 for name, share in extra.items()}
    return judged(
        "C1",
        {
            "√L is meant, with the best number of chunks": near(growth, 2) and cheap["chunks"],
            "log L is meant": checkpoints <= math.log2(256) and cheap["bisection"],
        },
        f"Chunks: 4 times the blocks, {growth:.1f} times the peak, for {percent(extra['chunks'], '+')} of a step. But "
        f"256 transformer blocks want {chunks} chunks; with √256 = 16 the peak is {too_high:.1f} times as high. "
        f"Bisection keeps {checkpoints} checkpoints for {percent(extra['bisection'], '+')}.",
    )


def c2() -> Finding:
    def block(**options: str | float) -> int:
        shape = BlockShape(1, 2048, 12288, 96, dtype="bfloat16", device="cuda", **options)
        return formulas.block_saved_bytes(shape)

    return judge_c2(
        {
            "its input is meant": BlockShape(1, 2048, 12288, 96, dtype="bfloat16").checkpoint_bytes,
            "attention is fused": block(dropout=0.1),
            "attention is written out": block(dropout=0.1, attention="math"),
            "attention is fused, without dropout": block(),
            "attention is written out, without dropout": block(attention="math"),
        }
    )


def judge_c2(definitions: Mapping[str, int]) -> Finding:
    inputs, fused, written_out, *_ = definitions.values()
    others = " or ".join(gigabytes(nbytes, 2) for nbytes in list(definitions.values())[3:])
    return judged(
        "C2",
        {name: near(nbytes, 1.4e9) for name, nbytes in definitions.items()},
        f"With 2,048 tokens a layer saves {gigabytes(fused, 2)} if attention is fused (34sbh), "
        f"{gigabytes(written_out, 2)} if it is written out; without dropout {others}. Its input is "
        f"{gigabytes(inputs, 2)}. None of them is 1.4.",
    )


def c3() -> Finding:
    return judge_c3(DEPTH, SEVENTY.hidden, DEPTH * SEVENTY.checkpoint_bytes)


def judge_c3(layers: int, width: int, inputs: int) -> Finding:
    """``inputs`` are the block inputs of the whole model at 4,096 tokens."""
    product = layers * width * 2
    return judged(
        "C3",
        {AS_STATED: near(product, 1.3e9) and near(layers * product, 104e9)},
        f"{layers} x {width:,} x 2 = {product:,} bytes: {product / 1e6:.1f} MB, not GB. And it is no layer: it is one "
        f"token's input to all {layers} of them. 4,096 tokens make {gigabytes(inputs)}.",
    )


def c4() -> Finding:
    inputs = SEVENTY.checkpoint_bytes
    llama = formulas.llama_block_saved_bytes(llama_shape("llama-2-70b", 1, SEVENTY.seq_len))
    return judge_c4(inputs, GPT_BYTES * SEVENTY.elements, llama)


def judge_c4(inputs: int, gpt: int, llama: int) -> Finding:
    """Bytes of a block's input, and of what a block saves."""

    def figures(block: int) -> tuple[int, int]:
        return DEPTH * block, schoolbook_peak(DEPTH, 8, block, inputs)

    def as_claimed(keep_all: int, chunked: int) -> bool:
        return near(keep_all, 5.12e9) and near(chunked, 1.15e9)

    def both(block: int) -> str:
        return " and ".join(gigabytes(nbytes, 2) for nbytes in figures(block))

    mebibytes = inputs / 2**20
    return judged(
        "C4",
        {"blocks are GPT's": as_claimed(*figures(gpt)), "blocks are Llama-2-70B's": as_claimed(*figures(llama))},
        f"It counts one output a block, {mebibytes:.0f} MiB: 80 are {DEPTH * mebibytes:,.0f} MiB, 8 + 10 are "
        f"{18 * mebibytes:,.0f} MiB. With all that a block saves it is {both(gpt)} (34sbh), for Llama-2-70B's own "
        f"blocks {both(llama)}.",
    )


def c8() -> Finding:
    ratio = GPT_BYTES // 2
    return judge_c8({name: _chunks_against_eight(block) for name, block in {"input": 1, "block": ratio}.items()})


def _chunks_against_eight(ratio: int) -> dict[int, tuple[int, float]]:
    """Depth -> best number of chunks, and how many times its peak the best of 2 to 8 chunks reach."""
    found = {}
    for depth in range(30, 101):
        best = ms.Chunked.best(depth, ratio, 1).num_checkpoints
        few = min(peak_bytes(depth, chunks, ratio, 1) for chunks in range(2, 9))
        found[depth] = best, few / peak_bytes(depth, best, ratio, 1)
    return found


def judge_c8(found: Mapping[str, Mapping[int, tuple[int, float]]]) -> Finding:
    """``found``: for layers that save their input, and for transformer blocks, what _chunks_against_eight() gives."""
    block = GPT_BYTES * SEVENTY.elements
    peaks = [schoolbook_peak(DEPTH, chunks, block, SEVENTY.checkpoint_bytes) for chunks in (8, 40)]
    worst = {name: max(times for _, times in depths.values()) for name, depths in found.items()}
    counts = [chunks for chunks, _ in found["block"].values()]
    times = [times for _, times in found["block"].values()]
    return judged(
        "C8",
        {
            "a layer saves no more than its input": worst["input"] <= 1.1,
            "layers are transformer blocks": worst["block"] <= 1.1,
        },
        f"A transformer block saves 17 times its input: {min(counts)} to {max(counts)} chunks are best, and 8 peak "
        f"{min(times):.1f} to {max(times):.1f} times as high. 80 blocks of Llama-70B's width: "
        f"{gigabytes(peaks[0], 2)} with 8 chunks, {gigabytes(peaks[1], 2)} with 40.",
    )


def c9() -> Finding:
    rows = {row["variant"]: row for row in records.load("gpt2_chunks").rows}
    return judge_c9(training_state_bytes(), rows["keep all"], rows["3 chunks"])


def judge_c9(state: int, plain: Mapping[str, float], chunked: Mapping[str, float]) -> Finding:
    """Rows of the record; ``state`` are parameters and the optimizer's averages, which its peaks leave out."""
    before, after = (state + row["peak_bytes"] for row in (plain, chunked))
    times = chunked["step_seconds"] / plain["step_seconds"]
    right = {"2.5": near(before, 2.5e9), "1.8": near(after, 1.8e9), "1.3": near(times, 1.3)}
    word = {part: "right" if is_right else "wrong" for part, is_right in right.items()}
    return judged(
        "C9",
        {AS_STATED: all(right.values())},
        f"Recorded: 2.5 GB is {word['2.5']} ({before / 1e9:.2f}, with weights and optimizer), 1.8 is {word['1.8']}: 3 "
        f"chunks leave {after / 1e9:.2f}, because at 512 tokens gradients and weights hold the peak. The ratio of "
        f"times is {word['1.3']}: {times:.2f}, for 1.30 claimed.",
    )


CHECKS = (
    Check("C1", c1),
    Check("C2", c2),
    Check("C3", c3),
    Check("C4", c4),
    Check("C8", c8),
    Check("C9", c9),
)
