"""The course's block against the same mathematics written out, and blocks found in other people's models."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

import memsave_lib as ms
from memsave_lib.models import GPT2_SIZES, LLAMA_SIZES, find_blocks

B, S, H, A = 2, 11, 24, 3


def block_of(**options):
    torch.manual_seed(0)
    return ms.TransformerBlock(H, A, **options).double()


def state():
    torch.manual_seed(1)
    return torch.randn(B, S, H, dtype=torch.float64)


def norm(x, layer):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + layer.eps) * layer.weight + layer.bias


def written_out(block, x, causal):
    """A pre-LN block, one head at a time, in formulas of a textbook."""
    q, k, v = (norm(x, block.norm1) @ block.qkv.weight.T + block.qkv.bias).split(H, dim=-1)
    width = H // A
    heads = []
    for head in range(A):
        part = slice(head * width, (head + 1) * width)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(width)
        if causal:
            scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
        exponentials = scores.exp()
        heads.append(exponentials / exponentials.sum(-1, keepdim=True) @ v[..., part])
    x = x + torch.cat(heads, -1) @ block.proj.weight.T + block.proj.bias
    wide = norm(x, block.norm2) @ block.up.weight.T + block.up.bias
    gelu = wide * (1 + torch.erf(wide / math.sqrt(2))) / 2
    return x + gelu @ block.down.weight.T + block.down.bias


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("ffn_mult", [4, 3])
def test_block_is_what_the_textbook_says(ffn_mult, attention, causal):
    block = block_of(ffn_mult=ffn_mult, attention=attention, causal=causal)
    x = state()
    torch.testing.assert_close(block(x), written_out(block, x, causal), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_causal_means_that_the_future_does_not_matter(attention):
    x = state()
    later = x.clone()
    later[:, 6:] *= -1
    for causal in (True, False):
        block = block_of(causal=causal, attention=attention)
        past, past_with_other_future = block(x)[:, :6], block(later)[:, :6]
        assert torch.allclose(past, past_with_other_future) is causal


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_dropout_drops_in_training_only(attention):
    x = state()
    without, block = block_of(attention=attention), block_of(attention=attention, dropout=0.5)
    assert not torch.equal(block(x), without(x))
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), without(x))


@pytest.mark.parametrize("place", ["attention weights", "attention projection", "feed-forward"])
def test_dropout_has_three_places(place, monkeypatch):
    dropped = []
    monkeypatch.setattr(F, "dropout", lambda x, p, training: dropped.append((tuple(x.shape), p, training)) or x)
    block_of(attention="math", dropout=0.25)(state())
    shapes = {"attention weights": (B, A, S, S), "attention projection": (B, S, H), "feed-forward": (B, S, H)}
    order = list(shapes)
    assert dropped[order.index(place)] == (shapes[place], 0.25, True) and len(dropped) == 3


def test_stack_runs_its_blocks_in_order():
    torch.manual_seed(0)
    stack = ms.BlockStack(3, H, A, attention="math", causal=False, ffn_mult=2)
    x = torch.randn(B, S, H)
    expected = stack.blocks[2](stack.blocks[1](stack.blocks[0](x)))
    assert torch.equal(stack(x), expected)
    assert {(b.attention, b.causal, b.up.out_features) for b in stack.blocks} == {("math", False, 2 * H)}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(hidden=True), TypeError, "hidden must be a whole number of at least 1, got True"),
        (dict(hidden=24.0), TypeError, "hidden must be a whole number of at least 1, got 24.0"),
        (dict(hidden=0), ValueError, "hidden must be a whole number of at least 1, got 0"),
        (dict(heads="3"), TypeError, "heads must be a whole number of at least 1, got '3'"),
        (dict(heads=5), ValueError, "heads must divide hidden: 24 is not a multiple of 5"),
        (dict(ffn_mult=-1), ValueError, "ffn_mult must be a whole number of at least 1, got -1"),
        (dict(dropout=1.0), ValueError, "dropout must be a number of at least 0 and below 1, got 1.0"),
        (dict(dropout=False), ValueError, "dropout must be a number of at least 0 and below 1, got False"),
        (dict(dropout="0.1"), ValueError, "dropout must be a number of at least 0 and below 1, got '0.1'"),
        (dict(causal=1), TypeError, "causal must be True or False, got 1"),
        (dict(attention="flash"), ValueError, 'attention must be "sdpa" or "math", got \'flash\''),
        (dict(n_layers=0), ValueError, "n_layers must be a whole number of at least 1, got 0"),
        (dict(n_layers=True), TypeError, "n_layers must be a whole number of at least 1, got True"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        ms.BlockStack(**{"n_layers": 2, "hidden": 24, "heads": 3, **options})


# Hugging Face's GPT-2 and Llama


def test_gpt2_has_no_dropout_unless_asked_for():
    assert {module.p for module in ms.gpt2("tiny").modules() if isinstance(module, nn.Dropout)} == {0.0}
    config = ms.gpt2("tiny", attn_pdrop=0.1, n_positions=77, n_layer=3).config
    assert (config.attn_pdrop, config.resid_pdrop, config.n_positions, config.n_layer) == (0.1, 0.0, 77, 3)


@pytest.mark.parametrize("size", [size for size in GPT2_SIZES if size in ("tiny", "mini")])
def test_small_gpt2s_learn(size):
    torch.manual_seed(0)
    model = ms.gpt2(size)
    ids = torch.randint(model.config.vocab_size, (2, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
    assert losses[0] == pytest.approx(math.log(model.config.vocab_size), rel=0.05)


def test_gpt2_warns_of_nothing(caplog, recwarn):
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        ids = torch.zeros(1, 4, dtype=torch.int64)
        ms.gpt2("tiny")(input_ids=ids, labels=ids)
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records] == []
    assert list(recwarn) == []


def test_llama_takes_any_field_of_its_configuration():
    model = ms.llama("tiny", num_hidden_layers=3, num_key_value_heads=1)
    assert len(model.model.layers) == 3
    assert model.model.layers[0].self_attn.k_proj.out_features == 16


def test_llama_shapes_are_those_of_the_papers():
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert {size: tuple(LLAMA_SIZES[size][field] for field in fields) for size in LLAMA_SIZES} == {
        "tiny": (64, 172, 2, 4, 2),
        "llama-2-7b": (4096, 11008, 32, 32, 32),
        "llama-2-70b": (8192, 28672, 80, 64, 8),
        "llama-3-8b": (4096, 14336, 32, 32, 8),
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ms.gpt2("huge"), r"gpt2\(size='huge'\): known sizes are tiny, mini, small, medium, large, xl"),
        (lambda: ms.llama("7b"), r"llama\(size='7b'\): known sizes are tiny, llama-2-7b"),
        (lambda: ms.gpt2("tiny", pretrained=True), r"no pretrained weights for gpt2\('tiny'\)"),
    ],
    ids=["gpt2", "llama", "pretrained"],
)
def test_unknown_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Finding blocks

WIDTHS = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
SHORT = dict(vocab_size=50, bos_token_id=0, eos_token_id=0, pad_token_id=0)
DECODER = dict(**WIDTHS, **SHORT, num_key_value_heads=2, max_position_embeddings=32)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
OPT = dict(ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=32)
IMAGES = dict(image_size=32, patch_size=8)

HUGGING_FACE = {
    "GPT2LMHeadModel": ("GPT2Config", dict(n_layer=3, n_embd=32, n_head=4, **SHORT), "transformer.h"),
    "LlamaForCausalLM": ("LlamaConfig", DECODER, "model.layers"),
    "MistralForCausalLM": ("MistralConfig", DECODER, "model.layers"),
    "Qwen2ForCausalLM": ("Qwen2Config", DECODER, "model.layers"),
    "Qwen3ForCausalLM": ("Qwen3Config", dict(head_dim=8, **DECODER), "model.layers"),
    "Gemma2ForCausalLM": ("Gemma2Config", dict(head_dim=8, **DECODER), "model.layers"),
    "Phi3ForCausalLM": ("Phi3Config", DECODER, "model.layers"),
    "OPTForCausalLM": ("OPTConfig", dict(**WIDTHS, **SHORT, **OPT), "model.decoder.layers"),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", dict(**WIDTHS, **SHORT), "gpt_neox.layers"),
    "MixtralForCausalLM": ("MixtralConfig", dict(num_local_experts=4, **DECODER), "model.layers"),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", dict(**MOE, **DECODER), "model.layers"),
    "FalconForCausalLM": ("FalconConfig", dict(**WIDTHS, **SHORT), "transformer.h"),
    "BloomForCausalLM": ("BloomConfig", dict(hidden_size=32, n_layer=3, n_head=4, **SHORT), "transformer.h"),
    "BertForMaskedLM": ("BertConfig", dict(**WIDTHS, **SHORT), "bert.encoder.layer"),
    "ViTForImageClassification": ("ViTConfig", dict(**WIDTHS, **IMAGES), "vit.layers"),
}


def build(model_class, config_class, config):
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**config))


@pytest.mark.parametrize("model_class", HUGGING_FACE)
def test_blocks_of_hugging_face_models(model_class):
    config_class, config, where = HUGGING_FACE[model_class]
    model = build(model_class, config_class, config)
    blocks = find_blocks(model)
    assert len(blocks) == 3
    assert all(block is expected for block, expected in zip(blocks, model.get_submodule(where), strict=True))


def test_a_model_with_one_layer_has_one_block():
    model = build("MistralForCausalLM", "MistralConfig", {**DECODER, "num_hidden_layers": 1})
    assert find_blocks(model) == list(model.model.layers)


T5 = dict(d_model=32, d_kv=8, d_ff=64, num_layers=3, num_decoder_layers=3, num_heads=4, **SHORT)


@pytest.mark.parametrize(
    ("make", "stacks"),
    [
        (
            lambda: build("T5ForConditionalGeneration", "T5Config", dict(T5, decoder_start_token_id=0)),
            ("encoder.block", "decoder.block"),
        ),
        (
            lambda: nn.Transformer(8, 2, 2, 2, batch_first=True, norm_first=True),
            ("encoder.layers", "decoder.layers"),
        ),
        (
            lambda: nn.ModuleDict({"left": ms.BlockStack(2, 8, 2), "right": ms.BlockStack(3, 8, 2)}),
            ("left.blocks", "right.blocks"),
        ),
    ],
    ids=["T5", "nn.Transformer", "two stacks"],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_several_stacks_are_named_and_refused(make, stacks):
    model = make()
    with pytest.raises(ValueError) as caught:
        find_blocks(model)
    assert str(caught.value) == (
        f"found several stacks of blocks in {type(model).__name__}: {stacks[0]}, {stacks[1]}; "
        f"pass one of them as blocks=list(model.{stacks[0]})"
    )
    assert len(list(model.get_submodule(stacks[0]))) >= 2


def test_a_small_stack_beside_the_blocks_does_not_count():
    model = nn.ModuleDict(
        {
            "heads": nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)),
            "trunk": ms.BlockStack(3, 8, 2),
        }
    )
    assert find_blocks(model) == list(model["trunk"].blocks)


@pytest.mark.parametrize(
    "model",
    [
        ms.BlockStack(3, 8, 2),
        nn.Sequential(*(ms.TransformerBlock(8, 2) for _ in range(3))),
        nn.ModuleList(ms.TransformerBlock(8, 2) for _ in range(3)),
        nn.Sequential(nn.Embedding(5, 8), ms.BlockStack(3, 8, 2), nn.Linear(8, 5)),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3, enable_nested_tensor=False),
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))),
    ],
    ids=["BlockStack", "Sequential", "ModuleList", "inside a Sequential", "TransformerEncoder", "small MLPs"],
)
def test_blocks_of_plain_models(model):
    blocks = find_blocks(model)
    assert len(blocks) == 3 and len({type(block) for block in blocks}) == 1
    inside = list(model.modules())
    assert all(any(block is module for module in inside) for block in blocks)


def test_a_block_used_twice_appears_twice():
    first, second = ms.TransformerBlock(8, 2), ms.TransformerBlock(8, 2)
    model = nn.Sequential(first, second, first)
    assert [block is first for block in find_blocks(model)] == [True, False, True]


def test_a_copy_gives_the_blocks_of_the_copy():
    stack = ms.BlockStack(2, 8, 2)
    copied = copy.deepcopy(stack)
    assert all(block is expected for block, expected in zip(find_blocks(copied), copied.blocks, strict=True))


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 3),
        ms.TransformerBlock(8, 2),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        nn.ModuleList(),
        nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())]),
    ],
    ids=["layer", "one block", "layers of torch.nn", "an MLP", "empty", "without parameters"],
)
def test_models_without_blocks_are_refused(model):
    with pytest.raises(ValueError) as caught:
        find_blocks(model)
    assert str(caught.value) == (
        f"found no blocks in {type(model).__name__}: looked for a ModuleList or Sequential whose entries are all of "
        f"one class and have parts of their own; pass the list as blocks=[...]"
    )


def test_lists_inside_blocks_are_not_stacks():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))

    model = nn.Sequential(Mixture(), Mixture())
    assert find_blocks(model) == list(model)


def test_blocks_of_two_classes_count_if_hugging_face_marks_them_as_layers():
    class Attention(GradientCheckpointingLayer):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(8, 8)

    class Recurrent(Attention):
        pass

    marked = nn.ModuleList([Attention(), Recurrent(), Attention()])
    assert find_blocks(marked) == list(marked)
    with pytest.raises(ValueError, match="found no blocks"):
        find_blocks(nn.ModuleList([ms.TransformerBlock(8, 2), nn.Sequential(nn.Linear(8, 8))]))


@pytest.mark.parametrize(("build", "wrong"), [(ms.gpt2, "n_layers"), (ms.llama, "hidden")])
def test_a_misspelt_field_of_a_configuration_is_refused(build, wrong):
    with pytest.raises(TypeError, match=f"got {wrong}=3, which is no field"):
        build("tiny", **{wrong: 3})


def test_blocks_are_found_while_a_strategy_is_applied():
    stack = ms.BlockStack(2, 16, 2)
    with ms.apply(stack, ms.FullCheckpoint()):
        assert ms.find_blocks(stack) == list(stack.blocks)
        with pytest.raises(ValueError, match="follows a strategy already"):
            ms.apply(stack, ms.KeepAll())
