"""The first two things a notebook does: look at the machine, and check its parameters.

``check_environment()`` says with OK and WARN lines whether this machine is ready for the course, and
what to do about each WARN. ``setup(...)`` turns the parameters cell into a validated, frozen ``Setup``.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace

import torch

from memsave_lib.arguments import whole_number
from memsave_lib.formulas import BlockShape, gpt2_block_terms, gpt2_parameters, loss_peak_bytes
from memsave_lib.units import human_bytes

#: Width of one attention head in the course's models, as in every GPT-2; ``hidden`` is a multiple of it.
HEAD_SIZE = 64
#: More threads do not help the small steps of the course, and the machines that check it have two.
MAX_THREADS = 2
SMALLEST_SEQ_LEN = 8

#: Tokens of the published GPT-2, whose logits are the largest tensors of the course.
VOCABULARY = 50_257

GIB = 2**30
#: What the notebooks need at their default parameters, with room for the browser beside them.
NEEDED_HOST_BYTES = 4 * GIB
NEEDED_DISK_BYTES = 2 * GIB
NEEDED_DEVICE_BYTES = 4 * GIB


@dataclass(frozen=True)
class Setup:
    """The parameters of a notebook, checked.

    ``seq_len`` positions per sequence, ``batch_size`` sequences per step, ``n_layers`` blocks of width
    ``hidden``, ``checkpoint_every`` the k of selective recomputation, ``steps`` training steps, ``device``
    where tensors live. ``asked_seq_len`` is set where free memory did not allow for the ``seq_len`` that was asked for.
    """

    seq_len: int
    checkpoint_every: int
    n_layers: int
    hidden: int
    batch_size: int
    steps: int
    device: torch.device
    seed: int = 0
    asked_seq_len: int | None = None

    @property
    def half(self) -> torch.dtype:
        """The 16-bit type of this device: bfloat16, or float16 on a GPU that only emulates that, such as a T4."""
        emulated = self.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.float16 if emulated else torch.bfloat16

    @property
    def needed_bytes(self) -> int:
        """Peak of the course's heaviest step at these sizes: a GPT-2 with its real vocabulary, gradients and AdamW."""
        shape = BlockShape(self.batch_size, self.seq_len, self.hidden, self.heads)
        parameters = 4 * gpt2_parameters(self.n_layers, self.hidden, VOCABULARY, self.seq_len)
        return (
            4 * parameters
            + self.n_layers * sum(gpt2_block_terms(shape).values())
            + loss_peak_bytes(self.batch_size, self.seq_len, VOCABULARY)
        )

    @property
    def heads(self) -> int:
        """Attention heads in a block: ``hidden / 64``."""
        return self.hidden // HEAD_SIZE

    def __str__(self) -> str:
        less = f" (not {self.asked_seq_len}: free memory)" if self.asked_seq_len is not None else ""
        return (
            f"{self.n_layers} blocks of width {self.hidden} ({self.heads} heads), "
            f"{self.batch_size} x {self.seq_len}{less} tokens a step, checkpoint_every={self.checkpoint_every}, "
            f"steps={self.steps}, on {self.device}"
        )


#: Parameters of notebook 01, and of most others; in none is the heaviest step heavier (a test compares).
DEFAULTS = Setup(
    seq_len=512, checkpoint_every=2, n_layers=6, hidden=256, batch_size=2, steps=2, device=torch.device("cpu")
)


def setup(
    seq_len: int,
    checkpoint_every: int,
    n_layers: int,
    hidden: int,
    batch_size: int,
    steps: int,
    device: str = "auto",
    *,
    seed: int = 0,
    free_bytes: int | None = None,
) -> Setup:
    """Check a notebook's parameters, seed torch, set the style of figures, and bound the threads on a CPU.

    ``device="auto"`` is ``cuda`` where there is one, else ``cpu``. Where the course's heaviest step would not fit in
    ``free_bytes`` (by default what the device has free), ``seq_len`` is halved until it does, and the result says so.
    Raises TypeError or ValueError with the parameter's name, its value and what would be right.
    """
    checked = Setup(
        seq_len=whole_number("seq_len", seq_len, at_least=SMALLEST_SEQ_LEN),
        checkpoint_every=whole_number("checkpoint_every", checkpoint_every),
        n_layers=whole_number("n_layers", n_layers),
        hidden=whole_number("hidden", hidden, at_least=HEAD_SIZE, multiple_of=HEAD_SIZE),
        batch_size=whole_number("batch_size", batch_size),
        steps=whole_number("steps", steps),
        device=resolve_device(device),
        seed=whole_number("seed", seed, at_least=0),
    )
    checked = _fitting(checked, _free_bytes(checked.device) if free_bytes is None else free_bytes)
    torch.manual_seed(checked.seed)
    if checked.device.type == "cpu":
        torch.set_num_threads(min(torch.get_num_threads(), MAX_THREADS))
    use_figure_style()
    return checked


def _fitting(asked: Setup, free_bytes: int | None) -> Setup:
    """With the largest half, quarter, ... of ``seq_len`` whose heaviest step fits; the smallest one if none does."""
    found = asked
    while free_bytes is not None and found.needed_bytes > free_bytes and found.seq_len > SMALLEST_SEQ_LEN:
        smaller = max(found.seq_len // 2, SMALLEST_SEQ_LEN)
        found = replace(found, seq_len=smaller, asked_seq_len=asked.seq_len)
    return found


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _host_memory()[1]


def resolve_device(device: str) -> torch.device:
    """The device that ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"`` means on this machine.

    Raises TypeError or ValueError that names the parameter ``device``.
    """
    wanted = '"auto", "cpu", "cuda" or "cuda:0"'
    if not isinstance(device, str):
        raise TypeError(f"device must be {wanted}, got {device!r} ({type(device).__name__})")
    kind, colon, index = device.partition(":")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or (colon and not index.isdecimal()):
        raise ValueError(f"device must be {wanted}, got {device!r}")
    if not torch.cuda.is_available():
        raise ValueError(f'device must be "auto" or "cpu" on this machine, which has no GPU, got {device!r}')
    if colon and int(index) >= torch.cuda.device_count():
        raise ValueError(f"device must name one of {torch.cuda.device_count()} GPUs, got {device!r}")
    return torch.device(device)


def use_figure_style() -> None:
    """Set matplotlib's defaults, so that a reader's own figures look like those of the course."""
    import matplotlib

    from memsave_lib.plots.drawing import DPI, SERIES, WIDTH

    matplotlib.rcParams.update(
        {
            "figure.figsize": (WIDTH, 3.6),
            "figure.dpi": DPI,
            "figure.facecolor": "white",
            "axes.facecolor": "white",
            "axes.prop_cycle": matplotlib.cycler(color=[color for color, _marker, _line in SERIES]),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "font.size": 10.5,
            "legend.frameon": False,
            "savefig.facecolor": "white",
        }
    )


@dataclass(frozen=True)
class Gpu:
    """What torch says about one GPU; memory in bytes, ``capability`` as in sm_75 -> (7, 5)."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    native_bf16: bool


@dataclass(frozen=True)
class Machine:
    """What the environment check looks at; memory and disk in bytes, None where it cannot be known."""

    python: tuple[int, int]
    versions: dict[str, str | None]
    gpu: Gpu | None
    host_total_bytes: int | None
    host_free_bytes: int | None
    disk_free_bytes: int
    threads: int
    colab: bool


@dataclass(frozen=True)
class Line:
    """One finding: ``advice`` is empty when all is well, else what to do."""

    topic: str
    finding: str
    advice: str = ""

    def __str__(self) -> str:
        state = "WARN" if self.advice else "OK"
        return f"{state:<5}{self.topic:<15}{self.finding}" + (f"\n{'':<20}-> {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class EnvironmentReport:
    """What ``check_environment`` or ``begin`` found; print it. ``ready`` is the verdict where every line is OK."""

    lines: tuple[Line, ...]
    ready: str = "This machine is ready for the course."

    @property
    def warnings(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.advice)

    def __str__(self) -> str:
        count = len(self.warnings)
        verdict = {
            0: self.ready,
            1: "One line to look at: the arrow says what to do.",
        }.get(count, f"{count} lines to look at: the arrows say what to do.")
        return "\n".join(map(str, self.lines)) + "\n" + verdict


def check_environment() -> EnvironmentReport:
    """Look at this machine: versions, device, memory, disk, threads. Asks no network and changes nothing."""
    return judge(look_at_machine())


def begin() -> EnvironmentReport:
    """What the first cell of a notebook says: the device, how to get a GPU on Colab, which 16-bit type, which sizes."""
    return judge_beginning(look_at_machine())


def judge_beginning(machine: Machine) -> EnvironmentReport:
    """The lines of ``begin``, from facts alone."""
    ready = "Device and sizes are fine. Notebook 00 looks at the rest of the machine."
    return EnvironmentReport((*_judge_device(machine), _judge_sizes(machine)), ready)


def look_at_machine() -> Machine:
    """Collect what ``judge`` needs."""
    total, free = _host_memory()
    return Machine(
        python=sys.version_info[:2],
        versions={name: _version(name) for name in SUPPORTED},
        gpu=_gpu() if torch.cuda.is_available() else None,
        host_total_bytes=total,
        host_free_bytes=free,
        disk_free_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
        threads=torch.get_num_threads(),
        colab="COLAB_RELEASE_TAG" in os.environ,
    )


#: Package -> (lowest supported version, first version that is too new).
SUPPORTED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "torch": ((2, 6), (3,)),
    "transformers": ((5,), (6,)),
    "ipywidgets": ((8, 1), (9,)),
    "matplotlib": ((3, 9), (4,)),
}
#: Colab brings its own widgets and cannot change them; the course uses what both versions share.
_COLAB_WIDGETS = (7, 7)


def judge(machine: Machine) -> EnvironmentReport:
    """The lines of the report, from facts alone."""
    return EnvironmentReport(
        (
            _judge_python(machine),
            *(_judge_version(name, version, machine.colab) for name, version in machine.versions.items()),
            *_judge_device(machine),
            _judge_host(machine),
            _judge_disk(machine),
            _judge_threads(machine),
        )
    )


def _judge_python(machine: Machine) -> Line:
    found = "{}.{}".format(*machine.python)
    return Line("Python", found, "" if machine.python >= (3, 11) else "install Python 3.11 or newer")


def _judge_version(name: str, version: str | None, colab: bool) -> Line:
    lowest, too_new = SUPPORTED[name]
    if name == "ipywidgets" and colab:
        lowest = _COLAB_WIDGETS
    wanted = f"{name}>={dotted(lowest)},<{dotted(too_new)}"
    advice = f'pip install "{wanted}", then restart the kernel'
    if version is None:
        return Line(name, "not installed", advice)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[: len(lowest)])
    fits = lowest <= numbers < too_new
    return Line(name, version, "" if fits else advice)


def _judge_device(machine: Machine) -> list[Line]:
    gpu = machine.gpu
    if gpu is None:
        advice = "Runtime > Change runtime type > T4 GPU, then run this again" if machine.colab else ""
        return [Line("device", "CPU: every byte is counted as on a GPU, only the steps are slower", advice)]
    name = f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})"
    low = gpu.free_bytes < NEEDED_DEVICE_BYTES
    memory = Line(
        "device memory",
        f"{human_bytes(gpu.free_bytes)} free of {human_bytes(gpu.total_bytes)}",
        f"free {human_bytes(NEEDED_DEVICE_BYTES)}: close other programs and notebooks that use the GPU" if low else "",
    )
    half = Line(
        "half precision",
        "bf16" if gpu.native_bf16 else "fp16 only: this GPU emulates bf16",
        "" if gpu.native_bf16 else "take here.half (torch.float16) wherever you want half precision",
    )
    return [Line("device", name), memory, half]


def _judge_sizes(machine: Machine) -> Line:
    free = machine.gpu.free_bytes if machine.gpu else machine.host_free_bytes
    if free is None:
        return Line("sizes", "free memory is unknown here: the parameters below are used as they are")
    asked = replace(DEFAULTS, device=torch.device("cuda" if machine.gpu else "cpu"))
    fits = _fitting(asked, free)
    said = f"{human_bytes(free)} are free"
    if fits.asked_seq_len is not None:
        return Line(
            "sizes",
            f"{said}: seq_len becomes {fits.seq_len}, for the course's heaviest step",
            "close other notebooks and programs",
        )
    while (longer := replace(fits, seq_len=2 * fits.seq_len)).needed_bytes <= free:
        fits = longer
    return Line("sizes", f"{said}: seq_len up to {fits.seq_len:,} fits, the other parameters as they are")


def _judge_host(machine: Machine) -> Line:
    if machine.host_free_bytes is None or machine.host_total_bytes is None:
        return Line("host memory", "unknown on this system")
    low = machine.host_free_bytes < NEEDED_HOST_BYTES
    return Line(
        "host memory",
        f"{human_bytes(machine.host_free_bytes)} free of {human_bytes(machine.host_total_bytes)}",
        f"free {human_bytes(NEEDED_HOST_BYTES)}: close other programs, or set a smaller seq_len" if low else "",
    )


def _judge_disk(machine: Machine) -> Line:
    low = machine.disk_free_bytes < NEEDED_DISK_BYTES
    advice = f"free {human_bytes(NEEDED_DISK_BYTES)}, or set TMPDIR to a folder on a larger disk" if low else ""
    return Line("disk", f"{human_bytes(machine.disk_free_bytes)} free for temporary files", advice)


def _judge_threads(machine: Machine) -> Line:
    single = machine.threads < MAX_THREADS and machine.gpu is None
    advice = "set OMP_NUM_THREADS=2 before Jupyter starts if the machine has two cores" if single else ""
    return Line("threads", f"torch may use {machine.threads}", advice)


def _gpu() -> Gpu:
    free, total = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(0)
    return Gpu(
        name=properties.name,
        capability=(properties.major, properties.minor),
        total_bytes=total,
        free_bytes=free,
        # Without the argument a T4 says yes, because torch can emulate bf16 there.
        native_bf16=torch.cuda.is_bf16_supported(including_emulation=False),
    )


def _host_memory() -> tuple[int | None, int | None]:
    """Total and available bytes of RAM; psutil comes with ipykernel, outside a notebook it may be missing."""
    try:
        import psutil
    except ModuleNotFoundError:
        return None, None
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def dotted(version: tuple[int, ...]) -> str:
    """A version as people write it: (2, 6) -> "2.6"."""
    return ".".join(map(str, version))
