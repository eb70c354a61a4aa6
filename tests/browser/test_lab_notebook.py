"""A lab where readers meet it: the notebook on selective recomputation, opened and run from top to bottom."""

from __future__ import annotations

import pytest

import memsave_lib as ms
from memsave_lib import formulas
from memsave_lib.units import exact_bytes
from tests.browser.conftest import Opener
from tests.browser.lab_page import LabPage

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("nothing_reported")]

#: The parameters of the notebook.
N_LAYERS, HIDDEN, BATCH, SEQ_LEN = 6, 256, 2, 512


@pytest.fixture(scope="module")
def lab(open_shared: Opener) -> LabPage:
    page = open_shared("03_selective_recomputation.ipynb")
    page.run_all(seconds=400)
    return LabPage(page)


def numbers(seq_len: int, every: int) -> tuple[str, str]:
    """Saved bytes and the peak."""
    shape = formulas.BlockShape(BATCH, seq_len, HIDDEN, heads=4)
    plan = ms.Selective(every).plan(N_LAYERS)
    options = {"loss": "sum", "input_requires_grad": False, "new_gradients": True}
    parameters = 4 * N_LAYERS * formulas.block_parameters(HIDDEN)
    peak = parameters + formulas.stack_peak_bytes(plan, shape, **options)
    return exact_bytes(formulas.stack_saved_bytes(plan, shape)), exact_bytes(peak)


def test_the_lab_of_a_notebook_follows_its_sliders_and_runs(lab: LabPage) -> None:
    assert lab.page.locator(".jp-OutputArea-output:has(.noUi-handle)").count() == 1, "the notebook has one lab"
    saved, peak = numbers(SEQ_LEN, 2)
    lab.sentence(
        f"Predicted at seq_len {SEQ_LEN}, checkpoint_every 2: saved {saved}, peak of the whole step {peak} in "
    )
    before = [lab.image(alt).get_attribute("src") for alt in ("Memory against time", "Predicted at")]
    lab.set_slider("seq_len", 128)
    lab.set_slider("checkpoint_every", 3)
    saved, peak = numbers(128, 3)
    setting = "seq_len 128, checkpoint_every 3"
    lab.sentence(f"Predicted at {setting}: saved {saved}, peak of the whole step {peak} in ")
    lab.image(f"Memory against time at {setting}: predicted peak {peak} in ").wait_for()
    now = [lab.image(alt).get_attribute("src") for alt in ("Memory against time", "Predicted at")]
    assert [old == new for old, new in zip(before, now, strict=True)] == [False, False]
    watch = lab.watch_frames("Memory against time")
    lab.tab_stops(until="Run")
    lab.page.keyboard.press("Enter")
    lab.sentence(
        f"Run 1 at {setting}: saved {saved}, 0 bytes off the prediction; peak {peak}, 0 bytes off the prediction. ",
        seconds=90,
    )
    assert len({frame.src for frame in watch.stop()}) >= 3, "the outline fills while the step runs"
    lab.wait_until_idle()
