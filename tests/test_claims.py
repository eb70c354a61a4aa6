"""The ledger of claims: each has a check, what is stored is what checks give, and verdicts follow from numbers."""

from __future__ import annotations

import inspect
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import memsave_lib as ms
from memsave_lib import formulas
from memsave_lib.course import claims, deepspeed_peer
from memsave_lib.course.claims import __main__ as command
from memsave_lib.course.claims import (
    book,
    chunking,
    deepspeed_keys,
    offloading,
    recomputing,
    shapes,
    taken_for_offloading,
)
from memsave_lib.course.claims.finding import DOES_NOT_HOLD, HOLDS, HOLDS_WHEN, Check, Finding, judged, near

STORED = {claim.id: claim for claim in book.load()}
IDS = [*(f"A{n}" for n in range(1, 11)), *(f"B{n}" for n in range(1, 8)), *(f"C{n}" for n in range(1, 10))]


# The file, the checks, the README


def test_every_claim_has_a_check_and_every_check_a_claim() -> None:
    assert list(STORED) == IDS
    assert list(book.checks()) == IDS


@pytest.mark.parametrize("id", IDS)
def test_a_check_finds_what_is_stored(id: str) -> None:
    """After a wanted change: ``make ledger``."""
    check = book.checks()[id]
    if reason := check.why_not():
        if check in deepspeed_keys.CHECKS and os.environ.get("REQUIRE_DEEPSPEED") == "1":
            pytest.fail(f"REQUIRE_DEEPSPEED=1: {reason}")
        pytest.skip(reason)
    assert claims.check(id) == STORED[id].finding


def test_what_a_reader_sees_is_short_and_whole() -> None:
    for claim in STORED.values():
        assert len(claim.claim) <= 120, claim.id
        assert len(claim.figure) <= 260, claim.id
        assert claim.claim.endswith((".", "?")), claim.id
        assert claim.figure.endswith((".", ")")), claim.id
        assert "\n" not in claim.claim + claim.figure + claim.condition


def test_the_readme_holds_the_table_of_the_stored_results() -> None:
    readme = book.README.read_text(encoding="utf-8")
    assert book.with_block(readme, list(STORED.values())) == readme
    rows = [line for line in book.readme_block(list(STORED.values())).splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(IDS)
    for row, claim in zip(rows[1:], STORED.values(), strict=True):
        assert [cell.strip() for cell in row.strip("|").split(" | ")] == [
            claim.id,
            claim.claim,
            claim.finding.words,
            claim.figure,
        ]


def test_the_readme_counts_the_verdicts() -> None:
    def claim(n: int, verdict: str) -> book.Claim:
        return book.Claim(f"A{n}", "It is so.", "05", verdict, "it rains" if verdict == HOLDS_WHEN else "", "1 | 2.")

    block = book.readme_block([claim(n, v) for n, v in enumerate((HOLDS, DOES_NOT_HOLD, HOLDS_WHEN, HOLDS_WHEN), 1)])
    assert "for 4 of their claims, and each verdict follows from the numbers: 1 holds,\n2 hold when" in block
    assert "2 hold when a condition is given, 1 does not." in block
    assert "| A3 | It is so. | holds when it rains | 1 \\| 2. |" in block


@pytest.mark.parametrize("broken", ["", book.BEGIN, book.END + book.BEGIN, book.BEGIN * 2 + book.END])
def test_a_readme_without_the_two_markers_is_refused(broken: str) -> None:
    with pytest.raises(ValueError, match="README.md must hold '<!-- claims: generated -->'"):
        book.with_block(broken, list(STORED.values()))


def test_the_file_comes_back_as_it_is_written(tmp_path: Path) -> None:
    book.save(list(STORED.values()), tmp_path / "claims.json")
    assert (tmp_path / "claims.json").read_bytes() == book.CLAIMS_FILE.read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: entries.reverse(), "in order, each once .*; got C9, C8"),
        (lambda entries: entries.insert(0, entries[0]), "in order, each once .*; got A1, A1"),
        (lambda entries: entries[0].pop("figure"), "a claim has the texts id, claim, .*'A1'"),
        (lambda entries: entries[0].update(source="a blog"), "a claim has the texts id, claim, .*a blog"),
        (lambda entries: entries[0].update(claim=3), "a claim has the texts id, claim, .*: 3"),
        (lambda entries: entries[0].update(id="a1"), "a letter and a number, such as A1; got 'a1'"),
        (lambda entries: entries[0].update(notebook="12"), "claim A1 needs a text and a notebook, one of 00, .*12"),
        (lambda entries: entries[0].update(claim=""), "claim A1 needs a text and a notebook"),
        (lambda entries: entries[0].update(verdict="perhaps", condition=""), "claim A1 is 'perhaps'; a verdict is one"),
        (lambda entries: entries[0].update(verdict=HOLDS_WHEN, condition=""), "claim A1 is 'holds when'; a verdict"),
        (lambda entries: entries[0].update(verdict=HOLDS, condition="it rains"), "claim A1 is 'holds it rains'"),
    ],
)
def test_a_broken_file_is_refused_and_named(tmp_path: Path, change, message: str) -> None:
    content = json.loads(book.CLAIMS_FILE.read_text(encoding="utf-8"))
    change(content["claims"])
    path = tmp_path / "claims.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        book.load(path)


def test_two_checks_of_one_claim_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "CHECKS", (*chunking.CHECKS, Check("A1", offloading.a1)))
    with pytest.raises(ValueError, match="two checks of one claim: A1, A1, A2"):
        book.checks()


# What notebook and command show


def fake_checks(monkeypatch: pytest.MonkeyPatch, **found: Finding) -> None:
    """Every check gives what is stored, at no cost, but for some."""

    def check(id: str) -> Check:
        def run() -> Finding:
            torch.rand(1)
            return found.get(id, STORED[id].finding)

        return Check(id, run)

    monkeypatch.setattr(book, "checks", lambda: {id: check(id) for id in IDS})


def test_the_ledger_is_a_table_and_leaves_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Finding("B4", "It is more.", HOLDS_WHEN, "it rains")
    fake_checks(monkeypatch, B4=other)
    before = torch.get_rng_state()
    live, stored = claims.ledger(), claims.ledger(live=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(live.columns) == ["id", "claim", "verdict", "figure"]
    assert list(live["id"]) == IDS
    row = live.set_index("id").loc["B4"]
    assert (row["claim"], row["verdict"], row["figure"]) == (STORED["B4"].claim, "holds when it rains", "It is more.")
    assert list(stored["verdict"]) == [claim.finding.words for claim in STORED.values()]
    assert live.drop(IDS.index("B4")).equals(stored.drop(IDS.index("B4")))


def test_the_command_compares_and_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    paths = tmp_path / "claims.json", tmp_path / "README.md"
    for path, original in zip(paths, (book.CLAIMS_FILE, book.README), strict=True):
        path.write_bytes(original.read_bytes())
    fake_checks(monkeypatch, B4=Finding("B4", "It is more.", HOLDS))
    assert command.main([], *paths) == 1
    out = capsys.readouterr().out
    assert "B4   holds: It is more.\n     was: does not hold: Half of the blocks" in out
    assert "26 claims, 1 results differ from what was stored" in out
    assert paths[0].read_bytes() == book.CLAIMS_FILE.read_bytes()
    assert command.main(["--write"], *paths) == 0
    assert {claim.id for claim in book.load(paths[0]) if claim != STORED[claim.id]} == {"B4"}
    assert "| does not hold | Half of the blocks" not in paths[1].read_text(encoding="utf-8")
    assert "| holds | It is more. |" in paths[1].read_text(encoding="utf-8")
    assert command.main([], *paths) == 0


def test_without_its_tool_a_claim_keeps_its_stored_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def never() -> Finding:
        raise AssertionError("this check cannot run here")

    monkeypatch.setattr(deepspeed_peer, "why_not", lambda: "DeepSpeed is not installed here.")
    monkeypatch.setattr(book, "checks", lambda: {id: Check(id, never, deepspeed_keys.why_not) for id in IDS})
    assert claims.ledger().equals(claims.ledger(live=False))
    assert command.main([]) == 0
    assert "C7   not run, the stored result stays. DeepSpeed is not installed here.\n" in capsys.readouterr().out


def test_a_deepspeed_that_is_bound_to_another_device_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def bound() -> None:
        raise RuntimeError("imported for 'cuda'")

    monkeypatch.setattr(deepspeed_peer, "why_not", lambda: "")
    monkeypatch.setattr(deepspeed_peer, "load", bound)
    assert {check.why_not() for check in deepspeed_keys.CHECKS} == {"imported for 'cuda'"}


@pytest.mark.parametrize(
    ("version", "reason"), [("2.6.0+cpu", "FSDP on a CPU was not tried with torch 2.6.0+cpu."), ("2.7.1", "")]
)
def test_fsdp_is_measured_where_it_was_tried(monkeypatch: pytest.MonkeyPatch, version: str, reason: str) -> None:
    assert taken_for_offloading.why_no_fsdp(version) == reason
    monkeypatch.setattr(taken_for_offloading, "distributed", SimpleNamespace(is_available=lambda: False))
    assert taken_for_offloading.why_no_fsdp(version) == "This build of torch has no torch.distributed."


def test_fairscale_is_what_the_ledger_says_of_it() -> None:
    """Read, where it is installed: it needs CUDA to run."""
    offload = pytest.importorskip("fairscale.experimental.nn.offload", reason="FairScale is no requirement")
    assert inspect.signature(offload.OffloadModel).parameters["checkpoint_activation"].default is False
    assert "activation states on the CPU. Default value is False" in " ".join(offload.OffloadModel.__doc__.split())


# Verdicts follow from numbers


def test_a_verdict_counts_the_cases() -> None:
    assert judged("A1", {"it rains": True, "it snows": True}, "x") == Finding("A1", "x", HOLDS)
    assert judged("A1", {"it rains": False, "it snows": False}, "x") == Finding("A1", "x", DOES_NOT_HOLD)
    some = judged("A1", {"it rains": True, "it is dry": False, "it snows": True}, "x")
    assert some == Finding("A1", "x", HOLDS_WHEN, "it rains or it snows")
    assert some.words == "holds when it rains or it snows"
    with pytest.raises(ValueError, match="claim A1 is judged by no case"):
        judged("A1", {}, "x")


def test_near_is_a_tenth() -> None:
    assert near(9.0, 10) and near(11.0, 10) and near(10.4, 10, 0.05)
    assert not near(8.9, 10) and not near(11.1, 10) and not near(10.6, 10, 0.05)


def words(finding: Finding) -> str:
    return finding.words


def test_a1_with_other_sizes() -> None:
    as_claimed, more = (8_600_000_000, 34_000_000_000), (196_000_000_000, 782_000_000_000)
    assert words(offloading.judge_a1(as_claimed, 1, as_claimed, 1)) == HOLDS
    assert words(offloading.judge_a1(more, 1, more, 1)) == DOES_NOT_HOLD
    assert words(offloading.judge_a1(more, 1, as_claimed, 1)) == "holds when everything is kept"
    assert words(offloading.judge_a1((8_600_000_000, 40_000_000_000), 1, more, 1)) == DOES_NOT_HOLD


def test_a2_with_a_cache_that_grows() -> None:
    assert words(offloading.judge_a2(4096, 0, (23, 20, 4), 0.1)) == HOLDS
    assert words(offloading.judge_a2(0, 8, (23, 20, 4), 0.1)) == HOLDS
    assert words(offloading.judge_a2(4096, 0, (23, 23, 23), 0.1)) == DOES_NOT_HOLD
    assert "1 byte of 23 to 20 to 4." in offloading.judge_a2(4096, 0, (23, 20, 4), 0.1).figure


def test_a3_with_other_waiting() -> None:
    assert words(offloading.judge_a3(10**10, 0.8, 0.8)) == HOLDS
    assert words(offloading.judge_a3(10**10, 1.6, 0.0)) == DOES_NOT_HOLD
    assert words(offloading.judge_a3(10**10, 1.6, 0.8)) == "holds when copies run while the device computes"


def test_a4_with_other_slowdowns() -> None:
    slow, fast, half = ([2.5], [4.0]), ([1.0], [1.1]), ([2.5, 1.0], [4.0, 4.0])
    assert words(offloading.judge_a4({"x": slow, "y": slow, "z": slow})) == HOLDS
    assert words(offloading.judge_a4({"x": fast, "y": half, "z": fast})) == DOES_NOT_HOLD
    assert words(offloading.judge_a4({"x": slow, "y": half, "z": fast})) == "holds when x"
    too_fast, too_slow, no_overlap = ([2.5], [2.9]), ([2.5], [5.1]), ([3.1], [4.0])
    assert words(offloading.judge_a4({"x": too_fast, "y": too_slow, "z": no_overlap})) == DOES_NOT_HOLD


def test_a5_with_a_larger_last_block() -> None:
    assert words(offloading.judge_a5((5, 5, 6), 0.2, 0.1)) == HOLDS
    assert words(offloading.judge_a5((5, 5, 6), 0.1, 0.2)) == DOES_NOT_HOLD
    assert words(offloading.judge_a5((5, 5, 5), 0.2, 0.1)) == DOES_NOT_HOLD


def test_a6_with_an_autograd_that_calls_modules() -> None:
    assert words(taken_for_offloading.judge_a6(2, 100, 50, 0)) == HOLDS
    assert words(taken_for_offloading.judge_a6(2, 100, 110, 0)) == DOES_NOT_HOLD


def test_a8_with_other_bytes() -> None:
    assert words(taken_for_offloading.judge_a8(9, 100, 50, 50)) == HOLDS
    assert words(taken_for_offloading.judge_a8(9, 100, 100, 100)) == DOES_NOT_HOLD
    assert words(taken_for_offloading.judge_a8(9, 100, 100, 50)) == "holds when checkpoint_activation=True is set"


def test_a9_with_an_option_for_activations() -> None:
    assert words(taken_for_offloading.judge_a9(["offload_params", "offload_activations"], 100, 100)) == DOES_NOT_HOLD
    assert words(taken_for_offloading.judge_a9(["offload_params"], 100, 10)) == DOES_NOT_HOLD
    assert words(taken_for_offloading.judge_a9(["offload_params"], 100, 100)) == HOLDS


def test_a10_with_other_records() -> None:
    def row(peak: int, seconds: float, perplexity: float = 9.0) -> dict[str, float]:
        return {"peak_bytes": peak, "step_seconds": seconds, "perplexity": perplexity}

    plain, claimed = row(100, 1.0), row(70, 2.5)
    assert words(offloading.judge_a10(plain, claimed, claimed, exact=True)) == HOLDS
    assert words(offloading.judge_a10(plain, claimed, claimed, exact=False)) == DOES_NOT_HOLD
    assert words(offloading.judge_a10(plain, row(70, 2.5, 9.1), row(50, 2.5), exact=True)) == DOES_NOT_HOLD
    assert words(offloading.judge_a10(plain, row(50, 2.5), claimed, exact=True)) == (
        "holds when checkpoints are offloaded"
    )


def test_b1_with_a_larger_model() -> None:
    seven, seventy = (lambda batch: batch * 13 * 10**9), (lambda batch: batch * 130 * 10**9)
    assert words(recomputing.judge_b1(seventy, seventy)) == HOLDS
    assert words(recomputing.judge_b1(seven, lambda batch: batch * 31 * 10**9)) == (
        "holds when the batch is 8 or more (4 with attention written out and dropout)"
    )


def test_b2_with_other_shares() -> None:
    fair, slow = {True: 0.23, False: 0.33}, {True: 0.33, False: 0.33}
    assert words(recomputing.judge_b2(0.7, 0.7, 0.7, fair)) == HOLDS
    assert words(recomputing.judge_b2(0.7, 0.7, 0.7, slow)) == DOES_NOT_HOLD
    assert words(recomputing.judge_b2(0.7, 0.1, 0.1, fair)) == "holds when activations are meant"
    assert "The time is not fair" in recomputing.judge_b2(0.7, 0.7, 0.7, slow).figure


def test_b3_with_layers_that_save_their_input() -> None:
    assert words(recomputing.judge_b3([12, 13, 13], 1, 1, 81)) == DOES_NOT_HOLD
    assert words(recomputing.judge_b3([120, 20, 70], 10, 10, 81)) == HOLDS


@pytest.mark.parametrize(("share", "verdict"), [(0.5, HOLDS), (0.25, DOES_NOT_HOLD)])
def test_b4_with_a_backward_as_dear_as_forward(share: float, verdict: str) -> None:
    assert words(recomputing.judge_b4(100, int(50 / share), {True: 30, False: 50})) == verdict


def test_b5_with_other_shares() -> None:
    cheap, dear = {True: 0.11, False: 0.17}, {True: 0.17, False: 0.17}
    assert words(recomputing.judge_b5(0.5, 0.5, cheap)) == HOLDS
    assert words(recomputing.judge_b5(0.5, 0.5, dear)) == DOES_NOT_HOLD
    assert words(recomputing.judge_b5(0.2, 0.5, cheap)) == "holds when the peak is meant"


def test_b6_with_other_kernels() -> None:
    core = {"math": 0.7, "sdpa": 0.0}
    assert words(recomputing.judge_b6({"x": 4, "y": 4, "z": 12}, core)) == HOLDS
    assert words(recomputing.judge_b6({"x": 0, "y": 0, "z": 0}, core)) == DOES_NOT_HOLD
    assert words(recomputing.judge_b6({"x": 0, "y": 4, "z": 0}, core)) == "holds when y"


def test_b7_with_a_lower_peak() -> None:
    assert words(recomputing.judge_b7((0, 100, 0), (0, 90, 4))) == HOLDS


def test_c1_with_other_costs() -> None:
    cheap, dear = {"chunks": 0.33, "bisection": 0.3}, {"chunks": 1.0, "bisection": 1.0}
    assert words(chunking.judge_c1(2.0, 2.3, 68, 8, cheap)) == HOLDS
    assert words(chunking.judge_c1(2.0, 2.3, 68, 8, dear)) == DOES_NOT_HOLD
    assert words(chunking.judge_c1(4.0, 2.3, 68, 8, cheap)) == "holds when log L is meant"
    assert words(chunking.judge_c1(4.0, 2.3, 68, 128, cheap)) == DOES_NOT_HOLD


def test_c2_with_a_definition_that_fits() -> None:
    sizes = {"input": 10**8, "fused": 9 * 10**8, "written out": 3 * 10**9, "other": 1_400_000_000}
    assert words(chunking.judge_c2(sizes)) == "holds when other"


def test_c3_with_a_thousand_times_the_width() -> None:
    assert words(chunking.judge_c3(80, 8192 * 1000, 1)) == HOLDS


def test_c4_with_blocks_that_save_their_output_only() -> None:
    output = 64 * 2**20
    assert words(chunking.judge_c4(output, output, output)) == HOLDS
    assert words(chunking.judge_c4(output, output, 17 * output)) == "holds when blocks are GPT's"


def test_c8_with_other_best_numbers() -> None:
    good, bad = {30: (6, 1.0), 100: (10, 1.1)}, {30: (24, 1.8), 100: (39, 3.1)}
    assert words(chunking.judge_c8({"input": good, "block": good})) == HOLDS
    assert words(chunking.judge_c8({"input": bad, "block": bad})) == DOES_NOT_HOLD


def test_c9_with_another_record() -> None:
    def row(peak: float, seconds: float) -> dict[str, float]:
        return {"peak_bytes": peak, "step_seconds": seconds}

    assert words(chunking.judge_c9(10**9, row(1.5e9, 0.5), row(0.8e9, 0.65))) == HOLDS
    assert words(chunking.judge_c9(10**9, row(1.5e9, 0.5), row(0.8e9, 0.9))) == DOES_NOT_HOLD
    wrong = chunking.judge_c9(10**9, row(1.5e9, 0.5), row(1.3e9, 0.65))
    assert words(wrong) == DOES_NOT_HOLD
    assert "2.5 GB is right (2.50" in wrong.figure
    assert "1.8 is wrong: 3 chunks leave 2.30" in wrong.figure


def test_claims_about_deepspeed_with_another_deepspeed() -> None:
    assert words(deepspeed_keys.judge_a7("", ["activation_checkpointing.cpu_checkpointing"])) == HOLDS
    assert words(deepspeed_keys.judge_a7("Extra inputs are not permitted", [])) == DOES_NOT_HOLD
    assert words(deepspeed_keys.judge_c5(100, 20, 20)) == HOLDS
    assert words(deepspeed_keys.judge_c6({"checkpointable_modules": 1, "checkpointable_layers": 1})) == HOLDS
    assert words(deepspeed_keys.judge_c7((3,), {3: 3.0})) == HOLDS
    assert words(deepspeed_keys.judge_c7((None, None), {3: 3.0})) == DOES_NOT_HOLD


# The arithmetic behind


@pytest.mark.parametrize(
    ("chunks", "gigabytes"), [(1, 91.34), (8, 11.95), (9, 10.87), (20, 5.91), (40, 4.97), (80, 6.51)]
)
def test_llama_70b_in_chunks_by_the_schoolbook(chunks: int, gigabytes: float) -> None:
    """80 blocks of 34sbh, all checkpoints, the largest chunk; 91.27 GB kept without any chunk."""
    block, checkpoint = 34 * 4096 * 8192, 2 * 4096 * 8192
    assert round(80 * block / 1e9, 2) == 91.27
    peak = chunking.schoolbook_peak(80, chunks, block, checkpoint)
    assert round(peak / 1e9, 2) == gigabytes
    assert peak == chunks * checkpoint + math.ceil(80 / chunks) * block


def test_34_sbh_is_a_gpt_block_with_dropout_on_a_gpu_but_for_statistics() -> None:
    shape = replace(chunking.SEVENTY, dropout=0.1, device="cuda")
    terms = formulas.block_terms(shape)
    statistics = terms["norm 1 statistics"] + terms["norm 2 statistics"] + terms["log-sum-exp"]
    assert formulas.block_saved_bytes(shape) - statistics == chunking.GPT_BYTES * shape.elements


def test_llama_2_7b_at_131072_tokens_to_the_byte() -> None:
    """Closed form, and a fake run of all 32 layers: 748.22 GiB; the layers alone are 728.53."""
    tokens = 131_072
    shape = shapes.llama_shape("llama-2-7b", 1, tokens)
    terms = formulas.llama_terms(ms.KeepAll().plan(32), shape, 32_000)
    found = ms.estimate(
        lambda: ms.llama("llama-2-7b", max_position_embeddings=tokens), 1, tokens, dtype=torch.bfloat16, optimizer=None
    )
    assert found.saved_bytes == sum(terms.values()) == 803_396_386_828
    assert terms.pop("kept blocks") == 782_254_473_216
    # What is easily forgotten beside head and loss: the final norm, in float32 and normalized, and the two tables.
    norm = {name: terms.pop(name) for name in list(terms) if name.startswith("final norm")}
    assert sum(norm.values()) == 3 * 2**30 + 4 * tokens
    assert terms.pop("cosines and sines") == 2**26
    assert sum(terms.values()) == 17_853_054_988


def test_extra_flops_of_full_checkpointing() -> None:
    """A third of a step, or less: early stop leaves out the down-projection."""
    shape = formulas.BlockShape(1, 1, 4096, 32)
    plan = ms.FullCheckpoint().plan(4)
    assert shapes.extra_of_step(plan, shape, early_stop=False) == 1 / 3
    assert shapes.extra_of_step(plan, shape) == pytest.approx(2 / 9, abs=1e-4)


def test_a_second_process_group_is_refused() -> None:
    with (
        taken_for_offloading._group_of_one(),
        pytest.raises(RuntimeError, match="a process group exists already"),
        taken_for_offloading._group_of_one(),
    ):
        pass
    assert not torch.distributed.is_initialized()


def test_streamed_weights_come_back_and_are_gone_meanwhile() -> None:
    stack, x = ms.BlockStack(2, 64, 2), torch.randn(1, 16, 64)
    before = [parameter.detach().clone() for parameter in stack.parameters()]
    with taken_for_offloading._streamed(stack):
        assert {parameter.untyped_storage().nbytes() for parameter in stack.parameters()} == {4}
    assert all(map(torch.equal, stack.parameters(), before))
    held = taken_for_offloading.held_bytes_with_streamed_weights(stack, x)
    shape = formulas.BlockShape(1, 16, 64, 2)
    # The input is the caller's; the output, which is not saved, is alive in its place until the sum is taken.
    assert held == formulas.stack_saved_bytes(ms.KeepAll().plan(2), shape) - shape.checkpoint_bytes


def test_the_fsdp_check_needs_no_network() -> None:
    before = dict(os.environ)
    assert taken_for_offloading.fsdp_saved_bytes(offload=True) == taken_for_offloading.fsdp_saved_bytes(offload=False)
    assert dict(os.environ) == before
