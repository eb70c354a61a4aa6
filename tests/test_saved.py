"""What autograd packs for one operation, named and counted: against what is known of each operation."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import memsave_lib as ms
from memsave_lib.course.saved import saved_for_backward, saved_table
from memsave_lib.formulas import BlockShape, block_saved_bytes

B, S, H, A = 3, 10, 12, 2


def state() -> torch.Tensor:
    return torch.randn(B, S, H, requires_grad=True)


def test_matmul_keeps_what_the_other_gradient_needs() -> None:
    x, W = state(), nn.Parameter(torch.randn(H, H))
    both = saved_for_backward(lambda x, W: x @ W, x=x, W=W)
    assert (both.names, both.nbytes) == (("x", "W"), 4 * B * S * H)
    W.requires_grad_(False)
    assert saved_for_backward(lambda x, W: x @ W, x=x, W=W).names == ("W",)
    W.requires_grad_(True)
    assert saved_for_backward(lambda x, W: x @ W, x=x.detach(), W=W).names == ("x",)


def test_elementwise_operations() -> None:
    x, unit = state(), 4 * B * S * H
    saved = {
        "gelu": saved_for_backward(F.gelu, input=x),
        "softmax": saved_for_backward(lambda x: x.softmax(-1), x=x),
        "dropout": saved_for_backward(lambda x: F.dropout(x, 0.5), x=x),
        "add": saved_for_backward(torch.add, input=x, other=state()),
    }
    assert {name: one.names for name, one in saved.items()} == {
        "gelu": ("input",), "softmax": ("output",), "dropout": ("made inside",), "add": (),
    }  # fmt: skip
    assert {name: one.nbytes for name, one in saved.items()} == {
        "gelu": unit,
        "softmax": unit,
        "dropout": unit,
        "add": 0,
    }
    assert saved_table(saved, unit).splitlines()[1:] == [
        "gelu           1.00   input",
        "softmax        1.00   output",
        f"dropout        1.00   made inside: ({B}, {S}, {H})",
        "add            0.00   nothing",
    ]
    assert str(saved["add"]) == "nothing"


def test_a_module_names_its_parameters_and_does_not_count_them() -> None:
    saved = saved_for_backward(nn.LayerNorm(H), input=state())
    assert sorted(saved.names) == ["bias", "input", "made inside", "made inside", "weight"]
    assert saved.nbytes == 4 * B * S * H + 2 * 4 * B * S
    assert saved_table({"norm": saved}, 4 * B * S * H).splitlines()[1] == (
        f"norm           1.17   input, the parameters weight, bias, made inside: ({B}, {S}, 1), ({B}, {S}, 1)"
    )


def test_two_names_for_one_storage_count_once() -> None:
    x = state()
    assert saved_for_backward(lambda x: x * x.view(B, S, H), x=x).nbytes == 4 * B * S * H


def test_a_block_keeps_what_the_closed_form_says() -> None:
    block = ms.TransformerBlock(H, A)
    saved = saved_for_backward(block, x=state())
    assert saved.nbytes == block_saved_bytes(BlockShape(B, S, H, A))
    assert "qkv.weight" in saved.names
    line = next(line for line in str(saved).splitlines() if line.startswith("qkv.weight"))
    assert line.split() == ["qkv.weight", "(36,", "12)", "float32", "1.69", "KiB", "a", "parameter:", "alive", "anyway"]
