"""Records of long experiments, and the experiments themselves at tiny sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memsave_lib as ms
from memsave_lib import formulas
from memsave_lib.course import deepspeed_peer, experiments, record, records

TINY = experiments.Sizes(2, 8, 2, "tiny", config=(("n_layer", 3), ("n_positions", 8)))
FIGURES = {
    "variant", "step_seconds", "step_seconds_min", "step_seconds_max", "live_bytes", "peak_bytes", "peak_at",
    "peak_bytes_gradients_kept", "peak_at_gradients_kept", "last_loss",
}  # fmt: skip


# Records


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = records.new("tiny_run", "A tiny run.", [{"variant": "keep all", "peak_bytes": 3}])
    path = records.save(written, tmp_path / "records")
    assert path == tmp_path / "records" / "tiny_run.json"
    assert records.load("tiny_run", tmp_path / "records") == written


def test_a_record_says_where_it_comes_from_and_nothing_about_the_host(tmp_path: Path) -> None:
    import platform

    made = records.new("tiny_run", "A tiny run.", [])
    assert made.origin.startswith("A tiny run. Measured on ")
    assert f"{torch.get_num_threads()} threads of " in made.machine
    assert made.versions["torch"] == torch.__version__
    assert f"torch {torch.__version__}" in made.origin
    assert made.date in made.origin
    text = records.save(made, tmp_path).read_text()
    assert platform.node() not in text
    assert "/" not in text


def test_a_missing_record_says_how_to_measure_it(tmp_path: Path) -> None:
    with pytest.raises(records.NoRecord, match="no record 'tiny_run' yet. To .*: make record ARGS=tiny_run"):
        records.load("tiny_run", tmp_path)


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    made = records.new("tiny_run", "A tiny run.", [])
    path = records.save(made, tmp_path)
    path.rename(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"other.json is no record of 'other'"):
        records.load("other", tmp_path)
    path.write_text(json.dumps({"name": "tiny_run", "rows": []}))
    with pytest.raises(ValueError, match=r"it must hold name, about, machine, date, versions, rows, it holds"):
        records.load("tiny_run", tmp_path)


@pytest.mark.parametrize("name", ["../books", "Tiny", "a.json", ""])
def test_a_name_is_not_a_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="small letters, digits and underscores"):
        records.load(name, tmp_path)


def test_the_frame_leaves_out_what_was_skipped() -> None:
    made = records.new("tiny_run", "", [{"variant": "a", "peak_bytes": 3}, {"variant": "b", "skipped": "no"}])
    assert list(made.frame()["variant"]) == ["a"]


def test_committed_records_are_of_known_experiments() -> None:
    for path in records.FOLDER.glob("*.json"):
        assert records.load(path.stem).about == record.EXPERIMENTS[path.stem].about


# The command


def test_the_command_writes_the_record_of_an_experiment(tmp_path: Path, monkeypatch, capsys) -> None:
    tiny = record.Experiment("Tiny.", lambda: [{"variant": "keep all"}])
    monkeypatch.setattr(record, "EXPERIMENTS", {"tiny_run": tiny, "other": tiny})
    assert record.main(["tiny_run"], tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tiny_run.json"]
    assert records.load("tiny_run", tmp_path).rows == [{"variant": "keep all"}]
    assert "tiny_run: 1 variants written to data/records/tiny_run.json" in capsys.readouterr().out
    assert record.main([], tmp_path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json", "tiny_run.json"]


def test_the_command_knows_its_experiments(tmp_path: Path, capsys) -> None:
    assert record.main(["gtp2_chunks"], tmp_path) == 2
    assert "there is no experiment 'gtp2_chunks'; there are gpt2_chunks" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# GPT-2 in chunks


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return experiments.gpt2_chunks(TINY, chunks=2)


def test_every_variant_trains_the_same_model(rows: list[dict]) -> None:
    labels = ["keep all", "2 chunks", "full checkpoint", "Hugging Face's switch", "DeepSpeed, 2 chunks"]
    assert [row["variant"] for row in rows] == labels
    run = [row for row in rows if "skipped" not in row]
    assert len(run) == (4 if deepspeed_peer.why_not() else 5)
    assert all(set(row) == FIGURES for row in run)
    assert len({row["last_loss"] for row in run}) == 1
    assert all(0 < row["step_seconds_min"] <= row["step_seconds"] <= row["step_seconds_max"] for row in run)


def test_bytes_held_are_those_of_the_formulas() -> None:
    """Without dropout every term has a closed form; the loss, one number, is held too."""
    shape = formulas.BlockShape(2, 8, 64, 4)
    plans = {"keep all": ms.KeepAll(), "2 chunks": ms.Chunked(2), "full checkpoint": ms.FullCheckpoint()}
    expected = {
        label: sum(formulas.gpt2_terms(strategy.plan(3), shape, 256).values()) + formulas.language_models.FLOAT
        for label, strategy in plans.items()
    }
    expected["Hugging Face's switch"] = expected["full checkpoint"]
    expected["DeepSpeed, 2 chunks"] = expected["2 chunks"]
    for row in experiments.gpt2_chunks(replace(TINY, dropout=0.0, steps=1), chunks=2):
        if "skipped" not in row:
            assert row["live_bytes"] - expected[row["variant"]] == 0, row["variant"]


def test_new_gradients_pile_up_and_those_that_are_there_do_not(rows: list[dict]) -> None:
    gradients = sum(parameter.nbytes for parameter in TINY.build().parameters())
    for row in rows:
        if "skipped" not in row and row["variant"] != "keep all":
            assert row["peak_bytes_gradients_kept"] < row["peak_bytes"] - gradients / 2


def test_the_default_is_the_explainers_size(monkeypatch) -> None:
    asked = []

    def build(sizes: experiments.Sizes) -> None:
        asked.append(sizes)
        raise StopIteration

    monkeypatch.setattr(experiments.Sizes, "build", build)
    with pytest.raises(StopIteration):
        experiments.gpt2_chunks()
    assert asked == [experiments.Sizes(4, 128, 10, "small", 0.1)]


def test_dropout_is_on_and_models_are_equal() -> None:
    one, other = TINY.build(), TINY.build()
    assert one.training
    assert one.config.attn_pdrop == one.config.resid_pdrop == one.config.embd_pdrop == 0.1
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))
    assert len(TINY.batches()) == 3


def test_variants_that_train_different_models_are_refused(monkeypatch) -> None:
    switch = ms.models.hugging_face_checkpointing

    def switch_and_lose_dropout(model: torch.nn.Module) -> None:
        switch(model)
        model.transformer.drop.p = 0.5

    monkeypatch.setattr(experiments, "hugging_face_checkpointing", switch_and_lose_dropout)
    with pytest.raises(RuntimeError, match="the variants must train the same model"):
        experiments.gpt2_chunks(replace(TINY, steps=1), chunks=1)


def test_without_deepspeed_its_row_gives_the_reason(monkeypatch) -> None:
    monkeypatch.setattr(deepspeed_peer, "why_not", lambda: "DeepSpeed is elsewhere.")
    found = experiments.gpt2_chunks(replace(TINY, steps=1), chunks=1)
    assert found[-1] == {"variant": "DeepSpeed, 1 chunk", "skipped": "DeepSpeed is elsewhere."}
