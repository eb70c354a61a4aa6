"""One of several processes that do a job together; :mod:`memsave_lib.course.ranks` has torchrun start them.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m memsave_lib.course.rank_process FOLDER

reads FOLDER/job and writes FOLDER/rank0.json, FOLDER/rank1.json, ...
"""

from __future__ import annotations

import json
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import record

#: How long a rank waits for the others before it gives up.
PATIENCE = timedelta(seconds=120)


@record  # torchrun then ends what it says with the traceback of the rank that failed first
def main(folder: str) -> None:
    torch.set_num_threads(1)
    job = pickle.loads((Path(folder) / "job").read_bytes())
    distributed.init_process_group("gloo", timeout=PATIENCE)
    try:
        rows = job.rows()
        (Path(folder) / f"rank{distributed.get_rank()}.json").write_text(json.dumps(rows))
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
