"""Closed forms for the memory of training a transformer: whole numbers of bytes, term by term, without torch.

Letters, where a formula is written out: ``s`` positions, ``b`` sequences in the batch, ``h`` width of the
residual stream, ``a`` attention heads, ``f`` width of the feed-forward layer, ``V`` vocabulary, ``c`` bytes
per element, ``L`` blocks; ``sbh = s*b*h``.

*Saved bytes* are the unique storages that autograd holds at the end of forward, parameters left out and the
input of the first block included. Every CPU formula is compared with PyTorch's own saved-tensor hooks in
the tests: the difference is 0 bytes. Formulas for ``device="cuda"`` follow from the source of the kernels
and have not been run on a GPU yet.

The 16 units of ``c*sbh`` and the terms quadratic in ``s`` are those of Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022), section 4; the LayerNorm statistics and the
log-sum-exp, which the paper leaves out, are counted here.
"""

from memsave_lib.formulas.blocks import (
    BlockShape,
    block_saved_bytes,
    block_storages,
    block_terms,
    element_bytes,
    offloaded_bytes,
    stack_saved_bytes,
)
from memsave_lib.formulas.forecast import Forecast, block_flops, stack_forecast, stack_parameter_bytes
from memsave_lib.formulas.language_model_peaks import (
    gpt2_peak_bytes,
    llama_block_parameters,
    llama_parameters,
    llama_peak_bytes,
)
from memsave_lib.formulas.language_models import (
    LlamaShape,
    gpt2_block_terms,
    gpt2_terms,
    llama_block_saved_bytes,
    llama_block_terms,
    llama_terms,
    loss_peak_bytes,
    loss_terms,
)
from memsave_lib.formulas.offloading import copy_hides, hiding_bandwidth, hiding_seq_len
from memsave_lib.formulas.script import Moment
from memsave_lib.formulas.timeline import (
    chunked_peak_bytes,
    stack_peak_bytes,
    step_moments,
    working_set_bytes,
)
from memsave_lib.formulas.training import (
    best_chunk_count,
    block_parameters,
    checkpointing_moves_peak,
    gpt2_parameter_tensors,
    gpt2_parameters,
    state_terms,
)

__all__ = [
    "BlockShape",
    "Forecast",
    "LlamaShape",
    "Moment",
    "best_chunk_count",
    "block_flops",
    "block_parameters",
    "block_saved_bytes",
    "block_storages",
    "block_terms",
    "checkpointing_moves_peak",
    "chunked_peak_bytes",
    "copy_hides",
    "element_bytes",
    "gpt2_block_terms",
    "gpt2_parameter_tensors",
    "gpt2_parameters",
    "gpt2_peak_bytes",
    "gpt2_terms",
    "hiding_bandwidth",
    "hiding_seq_len",
    "llama_block_parameters",
    "llama_block_saved_bytes",
    "llama_block_terms",
    "llama_parameters",
    "llama_peak_bytes",
    "llama_terms",
    "loss_peak_bytes",
    "loss_terms",
    "offloaded_bytes",
    "stack_forecast",
    "stack_parameter_bytes",
    "stack_peak_bytes",
    "stack_saved_bytes",
    "state_terms",
    "step_moments",
    "working_set_bytes",
]
