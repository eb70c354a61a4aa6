"""What notebook 06 asks: what a model needs that fits nowhere."""

from __future__ import annotations

from memsave_lib.course.predictions import Question
from memsave_lib.formulas import LlamaShape, llama_terms
from memsave_lib.strategies import KeepAll

GIB, GB = 2**30, 10**9
LAYERS, VOCABULARY = 32, 32_000
LLAMA_2_7B = LlamaShape(1, 131_072, 4096, heads=32, kv_heads=32, ffn=11_008)


def llama_saves() -> Question:
    """GiB that autograd holds for Llama-2-7B at 131,072 tokens, in half precision."""
    terms = llama_terms(KeepAll().plan(LAYERS), LLAMA_2_7B, vocab_size=VOCABULARY)
    saved, blocks, inputs = sum(terms.values()), terms["kept blocks"], LAYERS * LLAMA_2_7B.checkpoint_bytes
    return Question(
        "GiB that autograd holds, Llama-2-7B",
        {
            "These are the inputs of the 32 blocks alone. A block saves more than twenty times its input.": (
                inputs / GIB
            ),
            "This is claim A1's number: the inputs of the 32 blocks, in GB. What is inside the blocks is missing.": (
                inputs / GB
            ),
            "These are the 32 blocks. Behind them the loss holds float32 log-probabilities of 32,000 words for each "
            "token, and the last norm its input.": blocks / GIB,
            "You counted four bytes an element; half precision has two.": 2 * saved / GIB,
            "These are GB: a GiB has 1,073,741,824 bytes, and so there are 7 % fewer of them.": saved / GB,
            "34sbh is a GPT block. Llama's has a third matrix in a wider feed-forward, whose product is saved, too.": (
                17 * inputs / GIB
            ),
            "Sixteen hidden states are the course's block. Llama's saves 22.8 of them: its feed-forward has three "
            "matrices, and its norms and its rotation keep more.": 16 * inputs / GIB,
            "This is one block; there are 32.": blocks / LAYERS / GIB,
        },
        "Start from a block's input, 131,072 × 4,096 × 2 bytes = 1 GiB. How many times as much does a block save, and "
        "how many blocks are there?",
    )
