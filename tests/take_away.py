"""The figures of ``teaching/take-away``, computed: every row of every table, and every number in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import memsave_lib as ms
from memsave_lib import devices, formulas
from memsave_lib.course import costs
from memsave_lib.course.env import DEFAULTS
from memsave_lib.formulas.forecast import attention_flops, down_projection_flops
from memsave_lib.plan import Plan
from memsave_lib.units import human_bytes

Rows = tuple[tuple[str, ...], ...]
L = DEFAULTS.n_layers
SHAPE = formulas.BlockShape(DEFAULTS.batch_size, DEFAULTS.seq_len, DEFAULTS.hidden, DEFAULTS.heads)
TOKENS = SHAPE.batch * SHAPE.seq_len
WORDS_OF_THE_SMALL_GPT = 1024
STEP = {"loss": "sum", "input_requires_grad": False, "new_gradients": True}


@dataclass(frozen=True)
class Figures:
    """What a page may hold.

    Args:
        tables: rows of its tables, the head left out.
        computed: numbers in its sentences that follow from something.
        chosen: numbers in its sentences that were chosen: sizes, names of models and of notebooks.
    """

    tables: tuple[Rows, ...]
    computed: frozenset[str]
    chosen: frozenset[str]

    @classmethod
    def of(cls, tables: tuple[Rows, ...], computed: str, chosen: str) -> Figures:
        return cls(tables, frozenset(computed.split()), frozenset(chosen.split()))


def start() -> Figures:
    parameters = formulas.gpt2_parameters(L, SHAPE.hidden, WORDS_OF_THE_SMALL_GPT, SHAPE.seq_len)
    state = formulas.state_terms(parameters, formulas.gpt2_parameter_tensors(L))
    averages = state["Adam: averages of gradients"] + state["Adam: averages of their squares"]
    saved = sum(formulas.gpt2_terms(ms.KeepAll().plan(L), SHAPE, WORDS_OF_THE_SMALL_GPT).values())
    logits = 4 * TOKENS * WORDS_OF_THE_SMALL_GPT
    peak = state["parameters"] + saved + 2 * logits
    stays = (state["parameters"] + state["gradients"] + averages) / state["parameters"]
    table = (
        ("parameters", human_bytes(state["parameters"])),
        ("gradients, once there", human_bytes(state["gradients"])),
        ("Adam's averages, after the first step", human_bytes(averages)),
        ("saved activations, between forward and backward", human_bytes(saved)),
        ("the peak, in the loss's backward", human_bytes(peak)),
    )
    return Figures.of((table,), f"{peak / state['parameters']:.1f} {stays:.1f} 0", "1,024 32 6 256 2 512 00")


def activations() -> Figures:
    options = {
        "fused": {},
        "written out": {"attention": "math"},
        "fused, dropout 0.1, on a CPU": {"dropout": 0.1},
    }
    rows = []
    for name, chosen in options.items():
        once, twice = (
            formulas.block_saved_bytes(formulas.BlockShape(SHAPE.batch, length, SHAPE.hidden, SHAPE.heads, **chosen))
            for length in (SHAPE.seq_len, 2 * SHAPE.seq_len)
        )
        rows.append((name, human_bytes(once), human_bytes(twice), f"{twice / once:.2f}"))
    states = formulas.block_saved_bytes(SHAPE) // SHAPE.checkpoint_bytes
    return Figures.of((tuple(rows),), f"{states} 0", "32 256 4 2 01")


def _flops(plan: Plan) -> str:
    """FLOPs of a step of projections, as a multiple of keep-all's: recomputation stops before the last product."""
    forward = formulas.block_flops(SHAPE) - attention_flops(SHAPE)
    again = plan.actions.count("recompute") * (forward - down_projection_flops(SHAPE))
    return f"{1 + again / (3 * plan.n_blocks * forward):.4f}"


def _saved(plan: Plan) -> int:
    return formulas.stack_saved_bytes(plan, SHAPE)


def checkpointing() -> Figures:
    weights = formulas.stack_parameter_bytes(SHAPE, L)
    rows = []
    for strategy in (ms.KeepAll(), ms.FullCheckpoint()):
        plan = strategy.plan(L)
        peak = weights + formulas.stack_peak_bytes(plan, SHAPE, **STEP)
        rows.append((strategy.label, human_bytes(_saved(plan)), human_bytes(peak), _flops(plan)))
    assert math.isclose(float(rows[1][3]), 1 + 2 / 9, abs_tol=1e-4)
    return Figures.of((tuple(rows),), "2 9", "256 512 02")


def selective() -> Figures:
    strategies = {
        "nothing": ms.KeepAll(),
        "activation and norm, in every block": ms.SelectiveOps(("activation", "norm")),
        "every second block, k = 2": ms.Selective(2),
        "two of three blocks, k = 3": ms.Selective(3),
        "every block": ms.FullCheckpoint(),
    }
    whole = _saved(ms.KeepAll().plan(L))
    rows = []
    for name, strategy in strategies.items():
        plan = strategy.plan(L)
        back = f"{1 - _saved(plan) / whole:.1%}".replace("%", " %")
        rows.append((name, human_bytes(_saved(plan)), back, _flops(plan)))
    kept = ms.Selective(3).plan(L).actions
    tools = {
        "the course, checkpoint_every=3": [i for i in range(L) if kept[i] == "recompute"],
        "Hugging Face, every_n_layers=3": [i for i in range(L) if i % 3 == 0],
        "torchtitan, the layer frequency 3 of older versions": [i for i in range(L) if (i + 1) % 3 == 0],
    }
    meanings = [(name, ", ".join(map(str, blocks))) for name, blocks in tools.items()]
    meanings.append(("Megatron-LM, selective", "no whole block: the attention core of each"))
    units = round((whole - _saved(ms.SelectiveOps(("activation", "norm")).plan(L))) / L / SHAPE.checkpoint_bytes)
    share = rows[1][2].removesuffix(" %")
    states = formulas.block_saved_bytes(SHAPE) // SHAPE.checkpoint_bytes
    return Figures.of((tuple(rows), tuple(meanings)), f"{units} {states} {share}", "256 2 512 3 02 03")


def chunks() -> Figures:
    shape = formulas.BlockShape(1, 4096, 8192, 64, dtype="bfloat16")
    block, unit = formulas.block_saved_bytes(shape), shape.checkpoint_bytes
    counts = range(1, 81)
    peaks = {
        n: formulas.stack_peak_bytes(ms.Chunked(n).plan(80), shape) - formulas.working_set_bytes(shape) for n in counts
    }
    root, best = round(math.sqrt(80)), ms.Chunked.best(80, block, unit).num_checkpoints
    equal = min((n for n in counts if 80 % n == 0), key=peaks.__getitem__)
    assert peaks[best] == min(peaks.values())
    names = {
        1: "1",
        root: f"{root}, the root of L",
        equal: f"{equal}, the best of equal chunks",
        best: f"{best}, the best",
        80: "80, one block each",
    }
    rows = tuple((name, f"{peaks[n] / unit:.1f}", human_bytes(peaks[n])) for n, name in names.items())
    return Figures.of((rows,), f"{block // unit}", "80 70 4,096 04")


def offloading() -> Figures:
    rows = []
    for device in (devices.T4, devices.A100, devices.H100):
        cells = [device.name, f"{device.flops / device.copy_out:,.0f}"]
        for gamma in (2, 34, 45.5):
            first = formulas.hiding_seq_len(4096, gamma, device.flops, device.copy_out)
            cells.append(f"{first:,}" if first else "always")
        rows.append(tuple(cells))
    return Figures.of((tuple(rows),), "", "2 34 45.5 7 4,096 05")


def fitting() -> Figures:
    shape = formulas.LlamaShape(1, 131_072, 4096, heads=32, kv_heads=32, ffn=11_008)
    kept, checkpointed = (
        sum(formulas.llama_terms(strategy.plan(32), shape, 32_000).values())
        for strategy in (ms.KeepAll(), ms.FullCheckpoint())
    )
    leaves = ms.Offload(ms.FullCheckpoint()).plan(32).offloaded_bytes([0] * 32, [shape.checkpoint_bytes] * 32)
    loss = formulas.loss_peak_bytes(1, 131_072, 32_000, hold_logits=False)
    held = (
        ("everything", human_bytes(kept)),
        ("checkpoints of its 32 blocks", human_bytes(checkpointed)),
        ("checkpoints sent away", human_bytes(checkpointed - leaves)),
        ("the loss alone, at its peak", human_bytes(loss)),
    )
    model = costs.llama_costs(formulas.LlamaShape(1, 32_768, 4096, 32, 32, 11_008), 32)
    sets = ("recompute",), ("keep", "recompute"), ("keep", "recompute", "offload")
    plans = {", ".join(one): ms.plan_under_budget(model, "40 GB", devices.A100, actions=one) for one in sets}
    longer = tuple((name, f"{plan.certificate.overhead:.1%}".replace("%", " %")) for name, plan in plans.items())
    return Figures.of((held, longer), "", "2 7 131,072 32,768 40 100 06")


FIGURES: dict[str, Callable[[], Figures]] = {
    "00": start,
    "01": activations,
    "02": checkpointing,
    "03": selective,
    "04": chunks,
    "05": offloading,
    "06": fitting,
}
