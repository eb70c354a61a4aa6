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
    block_terms,
    element_bytes,
    stack_saved_bytes,
)
from memsave_lib.formulas.timeline import (
    Moment,
    chunked_peak_bytes,
    stack_peak_bytes,
    step_moments,
    working_set_bytes,
)

__all__ = [
    "BlockShape",
    "Moment",
    "block_saved_bytes",
    "block_terms",
    "chunked_peak_bytes",
    "element_bytes",
    "stack_peak_bytes",
    "stack_saved_bytes",
    "step_moments",
    "working_set_bytes",
]
