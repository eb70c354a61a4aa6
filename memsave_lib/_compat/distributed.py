"""PyTorch's distributed package, where a program uses it."""

from __future__ import annotations

import sys

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``, of which each rank holds a part.

    Asked for each weight of each region: the class is not imported for that (it takes a third of a second, and is
    missing in builds without distributed training). Where nobody has, there is none.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
