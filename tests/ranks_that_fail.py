"""Jobs for ranks that do not end well. Ranks import this module by its name."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memsave_lib as ms


@dataclass(frozen=True)
class StaleWeights:
    """An optimizer step between forward and backward, with weights that are shared out and recomputed from."""

    n_ranks: int = 2

    def rows(self) -> list[dict[str, Any]]:
        import torch
        from torch import distributed
        from torch.distributed.fsdp import fully_shard

        stack, mesh = ms.BlockStack(2, 64, 1), distributed.init_device_mesh("cpu", (self.n_ranks,))
        for part in (*stack.blocks, stack):
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.AdamW(stack.parameters())
        x = torch.randn(1, 8, 64)
        with ms.apply(stack, ms.FullCheckpoint()):
            stack(x).sum().backward()
            loss = stack(x).sum()
            optimizer.step()
            loss.backward()
        return []


@dataclass(frozen=True)
class Stuck:
    """Writes its process down and waits for something that does not come."""

    folder: Path
    n_ranks: int = 2

    def rows(self) -> list[dict[str, Any]]:
        note = self.folder / os.environ["RANK"]
        note.with_suffix(".new").write_text(str(os.getpid()))
        note.with_suffix(".new").rename(note)
        time.sleep(600)
        return []
