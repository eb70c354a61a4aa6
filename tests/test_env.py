"""The parameters of a notebook and the environment check."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import matplotlib
import pytest
import torch

from build import ROOT, Course
from memsave_lib.course import env
from memsave_lib.plots.drawing import SERIES

LEGAL = {"seq_len": 96, "checkpoint_every": 5, "n_layers": 7, "hidden": 128, "batch_size": 3, "steps": 2}
SMALLEST = {"seq_len": 8, "checkpoint_every": 1, "n_layers": 1, "hidden": 64, "batch_size": 1, "steps": 1}
WHOLE = "a whole number of at least"


def test_setup_gives_back_what_was_asked_for() -> None:
    here = env.setup(**LEGAL, device="cpu", seed=3)
    assert here == env.Setup(**LEGAL, device=torch.device("cpu"), seed=3)
    assert here.heads == 2
    assert str(here) == "7 blocks of width 128 (2 heads), 3 x 96 tokens a step, checkpoint_every=5, steps=2, on cpu"
    with pytest.raises(FrozenInstanceError):
        here.seq_len = 1


def test_the_smallest_parameters_are_legal_and_one_less_is_not() -> None:
    env.setup(**SMALLEST)
    for name in SMALLEST:
        with pytest.raises(ValueError, match=f"^{name} must be {WHOLE}"):
            env.setup(**{**SMALLEST, name: SMALLEST[name] - 1})


@pytest.mark.parametrize("name", LEGAL)
@pytest.mark.parametrize("value", [True, "96", 96.0, None])
def test_what_is_not_an_int_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(TypeError) as caught:
        env.setup(**{**LEGAL, name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} must be {WHOLE} ")
    assert message.endswith(f", got {value!r} ({type(value).__name__})")


def test_an_int_that_does_not_fit_is_refused_with_what_would_be_right() -> None:
    with pytest.raises(ValueError) as caught:
        env.setup(**{**LEGAL, "hidden": 100})
    assert str(caught.value) == "hidden must be a whole number of at least 64 and a multiple of 64, got 100"


@pytest.mark.parametrize("device", ["tpu", "cpu:0", "CPU", "cuda:", "cuda:x", "cuda:-1", ""])
def test_an_unknown_device_is_refused_by_name(device: str) -> None:
    with pytest.raises(ValueError) as caught:
        env.setup(**LEGAL, device=device)
    assert str(caught.value) == f'device must be "auto", "cpu", "cuda" or "cuda:0", got {device!r}'


def test_a_device_that_is_no_str_is_refused() -> None:
    with pytest.raises(TypeError, match="^device must be .* got 0 \\(int\\)$"):
        env.setup(**LEGAL, device=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    assert env.resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="on this machine, which has no GPU, got 'cuda'"):
        env.resolve_device("cuda")


@pytest.mark.gpu
def test_with_a_gpu_auto_is_cuda_and_a_gpu_too_many_is_refused() -> None:
    assert env.resolve_device("auto") == torch.device("cuda")
    assert env.resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ValueError, match=f"must name one of {torch.cuda.device_count()} GPUs, got 'cuda:99'"):
        env.resolve_device("cuda:99")


def test_setup_seeds_torch() -> None:
    def draw(seed: int) -> torch.Tensor:
        env.setup(**LEGAL, device="cpu", seed=seed)
        return torch.rand(4)

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_setup_bounds_the_threads_and_keeps_fewer() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        env.setup(**LEGAL, device="cpu")
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        env.setup(**LEGAL, device="cpu")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_setup_sets_the_style_of_figures() -> None:
    with matplotlib.rc_context({"figure.facecolor": "black"}):
        env.setup(**LEGAL, device="cpu")
        assert matplotlib.rcParams["figure.facecolor"] == "white"
        assert matplotlib.rcParams["axes.prop_cycle"].by_key()["color"] == [color for color, _, _ in SERIES]


GOOD = env.Machine(
    python=(3, 11),
    versions={"torch": "2.6.0+cpu", "transformers": "5.0.0", "ipywidgets": "8.1.9", "matplotlib": "3.11.2"},
    gpu=None,
    host_total_bytes=16 * env.GIB,
    host_free_bytes=8 * env.GIB,
    disk_free_bytes=50 * env.GIB,
    threads=2,
    colab=False,
)
T4 = env.Gpu("Tesla T4", (7, 5), total_bytes=int(14.56 * env.GIB), free_bytes=14 * env.GIB, native_bf16=False)


def warnings(machine: env.Machine) -> dict[str, str]:
    return {line.topic: line.advice for line in env.judge(machine).warnings}


def test_a_good_machine_gets_no_warning() -> None:
    report = env.judge(GOOD)
    assert report.warnings == ()
    assert str(report).splitlines() == [
        "OK   Python         3.11",
        "OK   torch          2.6.0+cpu",
        "OK   transformers   5.0.0",
        "OK   ipywidgets     8.1.9",
        "OK   matplotlib     3.11.2",
        "OK   device         CPU: every byte is counted as on a GPU, only the steps are slower",
        "OK   host memory    8.00 GiB free of 16.0 GiB",
        "OK   disk           50.0 GiB free for temporary files",
        "OK   threads        torch may use 2",
        "This machine is ready for the course.",
    ]


def with_version(name: str, version: str | None) -> env.Machine:
    return replace(GOOD, versions={**GOOD.versions, name: version})


@pytest.mark.parametrize(
    ("machine", "topic", "advice"),
    [
        (replace(GOOD, python=(3, 10)), "Python", "install Python 3.11 or newer"),
        (with_version("torch", "2.5.1"), "torch", 'pip install "torch>=2.6,<3", then restart the kernel'),
        (with_version("torch", "3.0.0a1"), "torch", 'pip install "torch>=2.6,<3", then restart the kernel'),
        (with_version("torch", None), "torch", 'pip install "torch>=2.6,<3", then restart the kernel'),
        (
            with_version("transformers", "4.57.1"),
            "transformers",
            'pip install "transformers>=5,<6", then restart the kernel',
        ),
        (
            with_version("transformers", "6.0"),
            "transformers",
            'pip install "transformers>=5,<6", then restart the kernel',
        ),
        (
            with_version("ipywidgets", "7.7.1"),
            "ipywidgets",
            'pip install "ipywidgets>=8.1,<9", then restart the kernel',
        ),
        (
            replace(GOOD, host_free_bytes=3 * env.GIB),
            "host memory",
            "free 4.00 GiB: close other programs, or set a smaller seq_len",
        ),
        (
            replace(GOOD, disk_free_bytes=env.GIB),
            "disk",
            "free 2.00 GiB, or set TMPDIR to a folder on a larger disk",
        ),
        (
            replace(GOOD, threads=1),
            "threads",
            "set OMP_NUM_THREADS=2 before Jupyter starts if the machine has two cores",
        ),
        (replace(GOOD, colab=True), "device", "Runtime > Change runtime type > T4 GPU, then run this again"),
        (
            replace(GOOD, gpu=T4),
            "half precision",
            "take here.half (torch.float16) wherever you want half precision",
        ),
        (
            replace(GOOD, gpu=replace(T4, native_bf16=True, free_bytes=env.GIB)),
            "device memory",
            "free 4.00 GiB: close other programs and notebooks that use the GPU",
        ),
    ],
)
def test_each_warning_says_what_to_do(machine: env.Machine, topic: str, advice: str) -> None:
    assert warnings(machine) == {topic: advice}


def test_a_warning_has_an_arrow_and_is_counted() -> None:
    lines = str(env.judge(replace(GOOD, gpu=T4))).splitlines()
    assert lines[5:9] == [
        "OK   device         Tesla T4 (sm_75)",
        "OK   device memory  14.0 GiB free of 14.6 GiB",
        "WARN half precision fp16 only: this GPU emulates bf16",
        "                    -> take here.half (torch.float16) wherever you want half precision",
    ]
    assert lines[-1] == "One line to look at: the arrow says what to do."
    two = str(env.judge(replace(GOOD, threads=1, python=(3, 9))))
    assert two.endswith("2 lines to look at: the arrows say what to do.")


def test_colab_keeps_its_own_widgets() -> None:
    machine = replace(with_version("ipywidgets", "7.7.1"), colab=True, gpu=replace(T4, native_bf16=True))
    assert warnings(machine) == {}


def test_unknown_host_memory_is_said_and_is_no_warning() -> None:
    report = env.judge(replace(GOOD, host_total_bytes=None, host_free_bytes=None))
    assert report.warnings == ()
    assert "OK   host memory    unknown on this system" in str(report)


def test_this_machine_can_be_looked_at() -> None:
    topics = [line.topic for line in env.check_environment().lines]
    assert topics[:6] == ["Python", "torch", "transformers", "ipywidgets", "matplotlib", "device"]
    assert topics[-3:] == ["host memory", "disk", "threads"]


def test_the_check_opens_no_connection() -> None:
    """A hub or a package index would be asked through a socket; there is none to open here."""
    code = (
        "import sys\n"
        "from memsave_lib.course.env import check_environment\n"
        "opened = []\n"
        "sys.addaudithook(lambda name, args: opened.append(name) if name.startswith('socket.') else None)\n"
        "check_environment()\n"
        "print(opened)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# Sizes that fit, and the 16-bit type


def test_the_heaviest_step_is_that_of_a_gpt2_with_its_real_vocabulary() -> None:
    """All of its terms, written out: 28 hidden states a block, statistics and log-sum-exp, four logits, four copies."""
    s, b, h, a, n, v = 96, 3, 128, 2, 7, 50_257
    parameters = n * (12 * h * h + 13 * h) + (v + s + 2) * h
    blocks = n * (28 * 4 * s * b * h + 16 * s * b + 4 * a * s * b)
    assert env.setup(**LEGAL, device="cpu").needed_bytes == 4 * 4 * parameters + blocks + 4 * 4 * b * s * v + 8


def test_seq_len_is_halved_until_the_heaviest_step_fits() -> None:
    asked = env.setup(**LEGAL, device="cpu")
    half, quarter = (replace(asked, seq_len=n, asked_seq_len=96) for n in (48, 24))
    assert env.setup(**LEGAL, device="cpu", free_bytes=asked.needed_bytes) == asked
    assert env.setup(**LEGAL, device="cpu", free_bytes=asked.needed_bytes - 1) == half
    assert env.setup(**LEGAL, device="cpu", free_bytes=half.needed_bytes) == half
    assert env.setup(**LEGAL, device="cpu", free_bytes=half.needed_bytes - 1) == quarter
    assert str(half) == (
        "7 blocks of width 128 (2 heads), 3 x 48 (not 96: free memory) tokens a step, "
        "checkpoint_every=5, steps=2, on cpu"
    )


def test_where_nothing_fits_the_smallest_seq_len_is_tried_all_the_same() -> None:
    assert env.setup(**LEGAL, device="cpu", free_bytes=0).seq_len == env.SMALLEST_SEQ_LEN
    assert env.setup(**{**LEGAL, "seq_len": 9}, device="cpu", free_bytes=0).seq_len == 8


@pytest.mark.parametrize("name", Course(ROOT).names())
def test_no_notebook_has_a_heavier_step_than_the_defaults(name: str) -> None:
    cells = Course(ROOT).generate(name, "student").cells
    (cell,) = (cell for cell in cells if "parameters" in cell.metadata.get("tags", []))
    parameters: dict[str, object] = {}
    exec(cell.source, {}, parameters)
    needed = env.setup(**parameters, free_bytes=2**62).needed_bytes
    assert needed <= env.DEFAULTS.needed_bytes
    assert needed == env.DEFAULTS.needed_bytes or not name.startswith("01")


def test_the_defaults_fit_the_memory_that_the_course_asks_for() -> None:
    assert env.DEFAULTS.needed_bytes < env.NEEDED_HOST_BYTES


def test_a_cpu_has_bfloat16() -> None:
    assert env.DEFAULTS.half == torch.bfloat16
    torch.ones(2, dtype=env.DEFAULTS.half).sum().item()


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_that_emulates_bfloat16_gets_float16(
    native: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """unsloth#2783: notebooks that asked for bf16 stopped on a T4, which says that it has it."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    assert replace(env.DEFAULTS, device=torch.device("cuda")).half == dtype


@pytest.mark.parametrize(
    ("machine", "sizes"),
    [
        (GOOD, "OK   sizes          8.00 GiB are free: seq_len up to 4,096 fits, the other parameters as they are"),
        (
            replace(GOOD, host_free_bytes=env.GIB),
            "WARN sizes          1.00 GiB are free: seq_len becomes 256, for the course's heaviest step\n"
            "                    -> close other notebooks and programs",
        ),
        (
            replace(GOOD, gpu=T4, host_free_bytes=0),
            "OK   sizes          14.0 GiB are free: seq_len up to 4,096 fits, the other parameters as they are",
        ),
        (
            replace(GOOD, host_free_bytes=None),
            "OK   sizes          free memory is unknown here: the parameters below are used as they are",
        ),
    ],
    ids=["a laptop", "little memory", "a T4", "unknown"],
)
def test_the_first_cell_says_which_sizes_fit(machine: env.Machine, sizes: str) -> None:
    report = env.judge_beginning(machine)
    assert str(report.lines[-1]) == sizes
    assert str(report).startswith(str(report.lines[0]))


def test_the_first_cell_promises_no_more_than_it_looked_at() -> None:
    (*_, verdict) = str(env.judge_beginning(GOOD)).splitlines()
    assert verdict == "Device and sizes are fine. Notebook 00 looks at the rest of the machine."
    (*_, verdict) = str(env.judge_beginning(replace(GOOD, gpu=replace(T4, free_bytes=1)))).splitlines()
    assert "to look at: the arrow" in verdict


def test_the_first_cell_on_colab_says_how_to_get_a_gpu_and_on_a_t4_which_half() -> None:
    (without, _sizes) = env.judge_beginning(replace(GOOD, colab=True)).lines
    assert without.advice == "Runtime > Change runtime type > T4 GPU, then run this again"
    *_, half, _sizes = env.judge_beginning(replace(GOOD, colab=True, gpu=T4)).lines
    assert half.finding == "fp16 only: this GPU emulates bf16"
    assert half.advice == "take here.half (torch.float16) wherever you want half precision"
