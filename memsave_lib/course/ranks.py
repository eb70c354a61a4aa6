"""Several processes that train one model together, started from a notebook.

    job = ranks.Training((ranks.Run("DDP", ms.KeepAll()), ranks.Run("FSDP2", ms.Chunked(2))), n_layers=4, ...)
    for outcome in ranks.train(job):
        print(outcome.rank, outcome.run, outcome.saved_bytes)

Each process is a **rank**. ``torchrun`` starts them on this machine, on 127.0.0.1 and the CPU; they talk over gloo, as
they would over NCCL on as many GPUs. A job travels to them in a file of a temporary folder, each rank writes what it
found into another, and the folder goes when the ranks have ended: by themselves, by an error of one of them, which is
raised here, or because they take too long.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from memsave_lib.course import deepspeed_peer
from memsave_lib.course.rank_forecast import Expected, expected
from memsave_lib.course.rank_jobs import Held, Job, Outcome, Partitioning, Run, Training, why_not

__all__ = [
    "Expected",
    "Held",
    "Job",
    "Outcome",
    "Partitioning",
    "Run",
    "Training",
    "expected",
    "launch",
    "partition",
    "train",
    "why_not",
]

PROCESS = "memsave_lib.course.rank_process"
TIMEOUT_SECONDS = 240
#: torchrun asks its ranks to end, and waits for them half a minute before it kills them.
GRACE_SECONDS = 45
#: The network of this machine alone; elsewhere gloo finds one by the name of the machine.
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def train(job: Training) -> list[Outcome]:
    """What each rank found in each run: all ranks of the first run, then of the next.

    Raises RuntimeError where this PyTorch is too old for a wrapper, with :func:`why_not` as its text.
    """
    if reason := next(filter(None, (why_not(run.wrapper) for run in job.runs)), ""):
        raise RuntimeError(reason)
    found = launch(job)
    return [
        Outcome(rank=rank, run=run, **found[rank][number])
        for number, run in enumerate(job.runs)
        for rank in range(job.n_ranks)
    ]


def partition(job: Partitioning) -> list[Held]:
    """What each rank held: rank 0 with each end, without and with ``partition_activations``, then the next rank.

    Raises RuntimeError where DeepSpeed is missing, with what to do.
    """
    if reason := deepspeed_peer.why_not():
        raise RuntimeError(reason)
    return [Held(rank, **row) for rank, found in enumerate(launch(job)) for row in found]


def launch(job: Job, timeout_seconds: float = TIMEOUT_SECONDS) -> list[list[dict[str, Any]]]:
    """Do a job in ``job.n_ranks`` processes: the rows that each found, by rank.

    Raises:
        RuntimeError: a rank failed; with the end of what the ranks wrote to stderr.
        TimeoutError: they have not ended in time, and were ended.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(job))
        with (folder / "stderr").open("w") as errors:
            process = subprocess.Popen(
                _command(job.n_ranks, folder), env=_environment(), stdout=errors, stderr=errors, text=True
            )
            try:
                status = process.wait(timeout_seconds)
            except subprocess.TimeoutExpired as error:
                said = _end_of(folder / "stderr")
                raise TimeoutError(
                    f"{job.n_ranks} ranks have not ended in {timeout_seconds:g} seconds:\n{said}"
                ) from error
            finally:
                _end(process)
        if status:
            raise RuntimeError(f"{job.n_ranks} ranks ended with status {status}:\n{_end_of(folder / 'stderr')}")
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(job.n_ranks)]


def _command(n_ranks: int, folder: Path) -> list[str]:
    """torchrun, which gives the ranks a place to meet on this machine: any free port of 127.0.0.1."""
    where = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(n_ranks)]
    return [sys.executable, "-m", "torch.distributed.run", *where, "-m", PROCESS, str(folder)]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    network = {"GLOO_SOCKET_IFNAME": LOOPBACK[sys.platform]} if sys.platform in LOOPBACK else {}
    alone = {deepspeed_peer.ACCELERATOR: "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **network, **alone, "PYTHONPATH": path}


def _end(process: subprocess.Popen) -> None:
    """Ask torchrun to end its ranks and itself, when something else than its own end has ended the wait."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]
