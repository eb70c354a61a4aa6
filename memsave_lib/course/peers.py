"""Other tools for the same purpose, side by side on one small GPT-2: does it run here, is it exact, what does it hold?

    python -m memsave_lib.course.peers

Some of them warn as they are imported or leave settings behind, so all run in a process of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

#: What a tool does to the model for as long as the context lasts.
Use = Callable[["nn.Module"], AbstractContextManager[object]]


@dataclass(frozen=True)
class Peer:
    """What was seen of one tool."""

    tool: str
    verdict: str  # "runs", or the first line of its error
    equal: bool | None = None  # loss and every gradient are bit-equal to keep-all's
    held_bytes: int | None = None  # activations alive at the end of forward
    peak_bytes: int | None = None


def table() -> pd.DataFrame:
    """One row a tool: whether it runs here or why not, whether it is exact, bytes held after forward, and its peak."""
    import pandas as pd

    command = [sys.executable, "-m", "memsave_lib.course.peers"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the comparison of tools ended with an error:\n{done.stderr.strip()}")
    rows = json.loads(done.stdout.splitlines()[-1])
    return pd.DataFrame(rows).astype({"held_bytes": "Int64", "peak_bytes": "Int64"}).set_index("tool")


def compare() -> list[Peer]:
    """Run every tool, in this process."""
    plain = _run(lambda model: nullcontext())
    return [_peer(tool, use, plain) for tool, use in _tools().items()]


def _tools() -> dict[str, Use]:
    import torch

    import memsave_lib as ms
    from memsave_lib.models import hugging_face_checkpointing

    def ours(strategy: ms.Strategy) -> Use:
        return lambda model: ms.apply(model, strategy)

    def switch(**settings: bool) -> Use:
        @contextmanager
        def use(model: nn.Module) -> Iterator[None]:
            model.config.use_cache = False
            hugging_face_checkpointing(model, **settings)
            yield

        return use

    def each_block(wrap: Callable[[nn.Module], nn.Module]) -> Use:
        @contextmanager
        def use(model: nn.Module) -> Iterator[None]:
            model.config.use_cache = False
            for index, block in enumerate(model.transformer.h):
                model.transformer.h[index] = wrap(block)
            yield

        return use

    def torch_wrapper(name: str) -> Use:
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

        return each_block(getattr(checkpoint_wrapper, name))

    def fairscale(**settings: bool) -> Use:
        def wrap(block: nn.Module) -> nn.Module:
            from fairscale.nn.checkpoint import checkpoint_wrapper

            return checkpoint_wrapper(block, **settings)

        return each_block(wrap)

    return {
        "keep all": ours(ms.KeepAll()),
        "FullCheckpoint()": ours(ms.FullCheckpoint()),
        "Offload(KeepAll())": ours(ms.Offload()),
        "Offload(FullCheckpoint())": ours(ms.Offload(ms.FullCheckpoint())),
        "Hugging Face's switch": switch(),
        "Hugging Face, offload=True": switch(offload=True),
        "torch checkpoint_wrapper": torch_wrapper("checkpoint_wrapper"),
        "torch offload_wrapper": torch_wrapper("offload_wrapper"),
        "torch save_on_cpu()": lambda model: torch.autograd.graph.save_on_cpu(),
        "torch save_on_cpu(pin_memory=True)": lambda model: torch.autograd.graph.save_on_cpu(pin_memory=True),
        "FairScale checkpoint_wrapper": fairscale(),
        "FairScale, offload_to_cpu=True": fairscale(offload_to_cpu=True),
    }


def _run(use: Use) -> tuple[Tensor, list[Tensor], int, int]:
    """Loss, gradients, bytes held after forward, peak."""
    import torch

    import memsave_lib as ms

    torch.manual_seed(0)
    model = ms.gpt2("mini", n_layer=4).train()
    tokens = torch.randint(1024, (2, 128))
    # The meter's hooks must be the outermost: tools that use hooks of their own put them inside.
    with ms.MemoryMeter(model) as meter, use(model):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
    frame = meter.trace.frame()
    after_forward = frame.iloc[(frame["phase"] != "forward").argmax() - 1]
    gradients = [parameter.grad for parameter in model.parameters()]
    return loss.detach(), gradients, int(after_forward["activation"]), meter.trace.peak_bytes


def _peer(tool: str, use: Use, plain: tuple[Tensor, list[Tensor], int, int]) -> Peer:
    import torch

    try:
        loss, gradients, held, peak = _run(use)
    except (ImportError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        # Whatever kind of error a tool ends with is the very answer to the question whether it runs here.
        return Peer(tool, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    equal = torch.equal(loss, plain[0]) and all(map(torch.equal, gradients, plain[1]))
    return Peer(tool, "runs", equal, held, peak)


if __name__ == "__main__":
    print(json.dumps([asdict(peer) for peer in compare()]))
