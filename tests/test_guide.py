"""The page to keep: what applies to which model, and the costs of a Llama on paper."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

import memsave_lib as ms
from memsave_lib import devices, formulas
from memsave_lib.course import costs, guide
from memsave_lib.course.guide import Sizes
from memsave_lib.devices import Device
from memsave_lib.flops import profile_blocks
from memsave_lib.units import human_bytes


def pair(layers: int, hidden: int, vocabulary: int, batch: int, seq_len: int) -> tuple[ms.Estimate, ms.Estimate, Sizes]:
    def build() -> torch.nn.Module:
        config = {"n_layer": layers, "n_embd": hidden, "n_head": hidden // 64}
        return ms.gpt2("tiny", **config, vocab_size=vocabulary, n_positions=seq_len)

    kept, checkpointed = (ms.estimate(build, batch, seq_len, how) for how in (ms.KeepAll(), ms.FullCheckpoint()))
    return kept, checkpointed, Sizes(batch, seq_len, hidden)


@pytest.fixture(scope="module")
def long() -> tuple[ms.Estimate, ms.Estimate, Sizes]:
    return pair(4, 64, 64, 4, 256)


def test_blocks_come_first_where_checkpoints_lower_the_peak(long: tuple[ms.Estimate, ms.Estimate, Sizes]) -> None:
    kept, checkpointed, sizes = long
    lines = guide.advise(*long, devices.T4)
    assert [line.decided_by for line in lines] == [
        "formulas.checkpointing_moves_peak",
        "ms.estimate, ms.fit",
        "ms.estimate(...).peak_at",
        "formulas.copy_hides",
        "ms.estimate(..., ms.Offload()).host_peak_bytes",
    ]
    assert lines[0].text.startswith("s*b = 1,024 is above 0.75h = 48:")
    assert lines[1].text.startswith("Attack the blocks: checkpoints move the peak from 32.9 MiB to 12.6 MiB.")
    shape = formulas.BlockShape(4, 256, 64, 1)
    block = sum(formulas.gpt2_block_terms(shape).values())
    assert (kept.saved_bytes - checkpointed.saved_bytes) // 4 + shape.checkpoint_bytes == block
    assert f"everything takes {human_bytes(3 * block)}, checkpoints take 768.0 KiB: both fit" in lines[4].text


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("100 MB", "both fit 95.4 MiB of host memory"),
        ("1 MB", "holds checkpoints only; for more there is the disk"),
        (1000, "host memory of 1000 B holds neither"),
    ],
    ids=["large", "small", "tiny"],
)
def test_what_leaves_is_held_against_the_host(
    long: tuple[ms.Estimate, ms.Estimate, Sizes], host: int | str, words: str
) -> None:
    assert words in guide.advise(*long, devices.T4, host=host)[-1].text


@pytest.mark.parametrize(
    ("flops_a_byte", "words"),
    [
        (513, "block inputs do not hide (from 2,052 on), everything does not hide"),
        (512, "block inputs hide (from 2,048 on), everything does not hide"),
        (18, "block inputs hide (from 72 on), everything hides (from 2,022 on)"),
    ],
)
def test_offloading_is_advised_where_it_hides(
    long: tuple[ms.Estimate, ms.Estimate, Sizes], flops_a_byte: int, words: str
) -> None:
    """``24h + 2s`` is 2,048 here; the inputs have four bytes an element."""
    line = guide.advise(*long, Device("any", flops=10.0 * flops_a_byte, copy_out=10.0))[3]
    assert words in line.text
    assert "with 24h + κs = 2,048:" in line.text


def test_other_bottlenecks_are_named() -> None:
    weights = guide.advise(*pair(2, 128, 256, 1, 48), devices.T4)
    assert [line.text.partition(":")[0] for line in weights[1:]] == ["Attack the weights"]
    assert weights[0].text.startswith("s*b = 48 is not above 0.75h = 96:")
    loss = guide.advise(*pair(1, 64, 8192, 2, 128), devices.T4)
    assert [line.text.partition(":")[0] for line in loss[1:]] == ["Attack the loss"]
    assert "in backward, _log_softmax_backward_data" in loss[1].text


def test_estimates_in_the_wrong_order_are_refused(long: tuple[ms.Estimate, ms.Estimate, Sizes]) -> None:
    kept, checkpointed, sizes = long
    for first, second in ((checkpointed, kept), (kept, kept), (checkpointed, checkpointed)):
        with pytest.raises(ValueError, match=r"wants estimates under KeepAll\(\) and FullCheckpoint\(\), got"):
            guide.advise(first, second, sizes, devices.T4)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="batch must be a whole number of at least 1, got 0"):
        Sizes(0, 8, 64)
    with pytest.raises(ValueError, match="got 'int3'"):
        Sizes(1, 8, 64, "int3")


def test_lines_say_who_decides_within_a_page() -> None:
    line = str(guide.Advice("word " * 40, "ms.fit"))
    assert line.startswith("- word word")
    assert line.endswith("[ms.fit]")
    assert max(map(len, line.splitlines())) <= 100


def test_llama_on_paper_is_llama_counted() -> None:
    shape = formulas.LlamaShape(1, 64, 64, 4, 2, 172, "float32")
    model = ms.llama("tiny", attn_implementation="eager")
    tokens = torch.randint(256, (1, 64))
    counted = profile_blocks(model, lambda: model(tokens, labels=tokens, use_cache=False).loss.backward())
    paper = costs.llama_costs(shape, 2)
    # Attention that is written out computes what lies behind the diagonal, too.
    assert [cost.forward for cost in paper] == [cost.forward - 2 * 64 * 64 * 64 for cost in counted]
    assert all(cost.backward == 2 * cost.forward and cost.recompute is None for cost in paper)
    assert [cost.checkpoint for cost in paper] == [4 * 64 * 64] * 2


def test_llamas_tensors_that_travel_are_those_it_saves() -> None:
    shape = formulas.LlamaShape(1, 32_768, 4096, 32, 32, 11_008)
    cost = costs.llama_costs(shape, 32)[31]
    assert sum(cost.saved) == formulas.llama_block_saved_bytes(shape)
    assert len(costs.llama_costs(shape, 32)) == 32


def test_a_long_table_shows_everything() -> None:
    frame = pd.DataFrame({"id": ["A1"], "claim": ["`a < b` & " + "long " * 60]})
    table = guide.LongTable(frame)
    page = table._repr_html_()
    assert "<code>a &lt; b</code> &amp; long" in page
    assert page.count("long") == repr(table).count("long") == 60
    assert page.count("<tr>") == 2
    assert page.count("text-align: left") == 4
