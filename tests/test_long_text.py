"""The experiment on long text, at a size of nothing."""

from __future__ import annotations

import pytest

from memsave_lib.course.long_text import LongTextRow, long_text, long_text_strategies


@pytest.fixture(scope="module")
def rows() -> list[LongTextRow]:
    return long_text("tiny", seq_len=96, steps=2, store="disk")


def test_every_strategy_trains_the_same_model(rows: list[LongTextRow]):
    assert [row.label for row in rows] == list(long_text_strategies())
    assert len({row.perplexity for row in rows}) == 1
    assert rows[0].perplexity < 256, "two steps teach a little"


def test_only_what_is_offloaded_goes_to_disk(rows: list[LongTextRow]):
    by_label = {row.label: row for row in rows}
    assert by_label["keep all"].disk_bytes == by_label["checkpointing"].disk_bytes == 0
    # A hidden state of 96 tokens has 24 KiB and stays; three in one and wider ones leave, checkpoints do not.
    assert by_label["offloading"].disk_bytes % (96 * 64 * 4) == 0
    assert by_label["offloading"].disk_bytes > 0
    assert by_label["both"].disk_bytes == 0
    assert all(row.host_bytes == 0 for row in rows)


def test_a_row_of_a_record_has_median_and_spread(rows: list[LongTextRow]):
    figures = LongTextRow("x", 1, "forward", 0, 0, (3.0, 1.0, 2.0), 5.0).figures()
    assert (figures["step_seconds"], figures["step_seconds_min"], figures["step_seconds_max"]) == (2.0, 1.0, 3.0)
    assert figures["perplexity"] == 5.0
    assert len(rows[0].step_seconds) == 2


def test_labels_are_checked():
    with pytest.raises(ValueError, match=r"keep all, checkpointing, offloading, both; got everything"):
        long_text("tiny", seq_len=16, labels=("everything",))
    with pytest.raises(ValueError, match="known sizes are"):
        long_text("huge", seq_len=16)
