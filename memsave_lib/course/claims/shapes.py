"""What several checks compute with: sizes of published models, and FLOPs of a block by closed form."""

from __future__ import annotations

import memsave_lib as ms
from memsave_lib import formulas
from memsave_lib.course import costs
from memsave_lib.formulas import BlockShape, LlamaShape
from memsave_lib.models import GPT2_SIZES, LLAMA_SIZES
from memsave_lib.plan import BlockFlops


def llama_shape(size: str, batch: int, seq_len: int) -> LlamaShape:
    """What the blocks of a published Llama save depends on, in bfloat16."""
    config = LLAMA_SIZES[size]
    return LlamaShape(
        batch,
        seq_len,
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["intermediate_size"],
    )


def training_state_bytes() -> int:
    """Of GPT-2 with 124M parameters between two steps: the parameters and what AdamW keeps; no gradients."""
    config = GPT2_SIZES["small"]
    layers, width, vocabulary = config["n_layer"], config["n_embd"], config["vocab_size"]
    parameters = formulas.gpt2_parameters(layers, width, vocabulary, 1024)
    terms = formulas.state_terms(parameters, formulas.gpt2_parameter_tensors(layers))
    return sum(size for name, size in terms.items() if name != "gradients")


def extra_of_step(plan: ms.Plan, shape: BlockShape, early_stop: bool = True) -> float:
    """FLOPs of recomputation as a share of a step, which is three forwards."""
    cost = costs.paper_costs(shape)
    flops = BlockFlops(forward=int(cost.forward), tail=int(cost.forward - cost.recompute))
    return plan.extra_flops([flops] * plan.n_blocks, early_stop) / (3 * plan.n_blocks * flops.forward)
