"""Unmodified Hugging Face decoder models follow every strategy, or are refused with a sentence."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import pickle

import pytest
import torch
import transformers
from torch import Tensor, nn

import memsave_lib as ms
from equality import (
    ATTENTION_ONLY,
    BLOCK_BY_BLOCK,
    STRATEGIES,
    VARIANTS,
    Build,
    assert_equal_to_plain,
    build_gpt2,
    build_llama,
    gradients,
    label,
    language_step,
    outcome,
)
from memsave_lib.models import hugging_face_checkpointing

EVERY = (*STRATEGIES, ATTENTION_ONLY)
CHUNKED = (ms.Chunked(num_checkpoints=2), ms.Recursive())

every_strategy = pytest.mark.parametrize("strategy", EVERY, ids=label)
both_models = pytest.mark.parametrize("build", [build_gpt2, build_llama], ids=lambda f: f.__name__)


@both_models
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("variant", VARIANTS)
@every_strategy
def test_loss_gradients_and_random_state_are_those_of_plain(strategy, variant, dropout, build):
    """OLMo-core#828 (dropout), transformers#21381, #23170 (frozen), trl#4247 (tied)."""
    assert_equal_to_plain(lambda: build(variant, dropout=dropout), strategy)


@both_models
@every_strategy
def test_a_padded_batch_with_the_cache_on_outside(strategy, build):
    """Attention masks, position ids, two forwards in one step, the last backward first."""

    def build_step():
        model, _ = build(dropout=0.5)
        model.config.use_cache = True
        tokens = torch.randint(13, (3, 7))
        mask = torch.ones_like(tokens)
        mask[0, 4:] = 0

        def step() -> Tensor:
            first, second = (
                model(input_ids=ids, attention_mask=mask, labels=ids).loss for ids in (tokens, tokens.flip(0))
            )
            second.backward()
            first.backward()
            return first + second

        return model, step

    assert_equal_to_plain(build_step, strategy)


# The key-value cache


@both_models
def test_the_cache_is_off_inside_and_back_afterwards(build):
    """transformers#28056, pytorch#155171."""
    model, step = build()
    model.config.use_cache = True
    tokens, stored = torch.randint(13, (2, 5)), model.config.to_dict()
    assert model(input_ids=tokens).past_key_values is not None
    with ms.apply(model, ms.FullCheckpoint()):
        assert model.config.use_cache is False
        assert model(input_ids=tokens).past_key_values is None
        with torch.no_grad():
            assert model(input_ids=tokens).past_key_values is None
        assert model.config.to_dict() == stored
    assert model.config.use_cache is True
    assert type(model.config).__mro__[1].__name__ != type(model.config).__name__
    assert model(input_ids=tokens).past_key_values is not None


def test_a_configuration_set_meanwhile_keeps_what_was_set():
    model, _ = build_gpt2()
    model.config.use_cache = True
    with ms.apply(model, ms.FullCheckpoint()):
        model.config.use_cache = False
    assert model.config.use_cache is False


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # its new name is not in 5.0
@both_models
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != ms.KeepAll()], ids=label)
def test_a_cache_with_gradients_is_refused(strategy, build):
    """transformers#28056, pytorch#155171: gradients stay equal while the cache doubles, so nobody would notice."""
    model, step = build()
    tokens = torch.randint(13, (2, 5))
    with ms.apply(model, strategy):
        with pytest.raises(ValueError, match="got a key-value cache .* while gradients are on"):
            model(input_ids=tokens, use_cache=True)
        cache = transformers.DynamicCache(config=model.config)
        with pytest.raises(ValueError, match="got a key-value cache"):
            model(input_ids=tokens, past_key_values=cache)
        with torch.no_grad():
            cache = model(input_ids=tokens, use_cache=True).past_key_values
        assert cache.get_seq_length() == 5
        step()


@both_models
@every_strategy
def test_generate_gives_the_same_tokens(strategy, build):
    model, _ = build()
    model.config.use_cache = True
    model.eval()
    prompt = torch.tensor([[1, 2, 3]])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert plain.shape == (1, 9)
    with ms.apply(model, strategy) as applied:
        for use_cache in (True, False, None):
            more = {} if use_cache is None else {"use_cache": use_cache}
            assert torch.equal(model.generate(prompt, attention_mask=torch.ones_like(prompt), **options, **more), plain)
    assert applied.report.region_forwards == 0


# Nothing shows outside


@both_models
def test_copies_saved_models_and_configurations_show_no_trace(build, tmp_path):
    """pytorch#77224: no key prefixes; configuration files as without the strategy."""
    model, step = build()
    model.config.use_cache = True
    keys = list(model.state_dict())
    model.save_pretrained(tmp_path / "plain")
    for strategy in (ms.FullCheckpoint(), *CHUNKED, ATTENTION_ONLY):
        with ms.apply(model, strategy):
            assert list(model.state_dict()) == keys
            assert isinstance(model, transformers.PreTrainedModel)
            model.save_pretrained(tmp_path / "applied")
            twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            assert repr(model.config) == repr(twins[0].config)
        read = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "applied")]
        assert read[0] == read[1] and read[1].get("use_cache", True) is True
        again = type(model).from_pretrained(tmp_path / "applied")
        for twin in (*twins, again):
            assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
            assert type(twin.config) is type(model.config) and twin.config.use_cache is True
            assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
            assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    step()


@both_models
@every_strategy
def test_hidden_states_are_every_blocks_own_or_refused(strategy, build):
    """Some versions collect them between the calls of the blocks, which chunks refuse."""
    model, _ = build()
    tokens = torch.randint(13, (2, 5))

    def use(context):
        with context:
            output = model(input_ids=tokens, labels=tokens, output_hidden_states=True)
            as_tuple = model(input_ids=tokens, output_hidden_states=True, return_dict=False)[-1]
            loss = output.loss + sum(state.square().sum() for state in output.hidden_states)
            return output.hidden_states, as_tuple, torch.autograd.grad(loss, list(model.parameters()))

    plain = use(contextlib.nullcontext())
    assert len(plain[0]) == 5
    try:
        ours = use(ms.apply(model, strategy))
    except ValueError as refusal:
        assert strategy not in BLOCK_BY_BLOCK and "needs every block's output" in str(refusal)
    else:
        for mine, theirs in zip(ours, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_hidden_states_collected_between_the_calls_are_refused_in_chunks():
    """A model that notes what its blocks hand on would note a chunk's end in place of each block's output."""

    class Output:
        def __init__(self, hidden_states):
            self.hidden_states = hidden_states

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(4))

        def forward(self, x):
            states = [x]
            for block in self.blocks:
                states.append(block(states[-1]))
            return Output(tuple(states))

    model, x = Model(), torch.randn(2, 4)
    plain = model(x)
    for strategy in BLOCK_BY_BLOCK:
        with ms.apply(model, strategy):
            assert all(map(torch.equal, model(x).hidden_states, plain.hidden_states))
    for strategy in CHUNKED:
        with ms.apply(model, strategy), pytest.raises(ValueError, match="needs every block's output"):
            model(x)


# Hugging Face's own switch


@both_models
def test_hugging_faces_own_switch_is_refused_before_and_meanwhile(build):
    model, step = build()
    hugging_face_checkpointing(model, on=True)
    with pytest.raises(ValueError, match="own gradient checkpointing is on"):
        ms.apply(model, ms.FullCheckpoint())
    hugging_face_checkpointing(model, on=False)
    for strategy in EVERY:
        with ms.apply(model, strategy):
            hugging_face_checkpointing(model, on=True)
            with pytest.raises(RuntimeError, match="own gradient checkpointing is on"):
                step()
            hugging_face_checkpointing(model, on=False)
            step()


# Other decoder models: tiny, of four blocks, built from their configuration


_SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
_OLDER = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2}
_MIXED = ["full_attention", "sliding_attention"] * 2

FAMILIES: dict[str, dict[str, object]] = {
    **dict.fromkeys(("Mistral", "Qwen2", "Qwen3", "Gemma", "Phi3", "StableLm", "Olmo2", "Cohere", "Granite"), _SHAPE),
    "Phi": _SHAPE | {"attention_dropout": 0.3, "resid_pdrop": 0.3},
    "Mixtral": _SHAPE | {"num_local_experts": 4},
    "Qwen3Moe": _SHAPE | _EXPERTS | {"num_experts": 4},
    "GPTNeoX": _SHAPE | {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "Falcon": _OLDER | {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "hidden_dropout": 0.3},
}
WITHOUT_SDPA = {
    "Bloom": _OLDER | {"hidden_size": 16, "n_layer": 4, "n_head": 2, "hidden_dropout": 0.3},
    "Mpt": _OLDER | {"d_model": 16, "n_layers": 4, "n_heads": 2, "expansion_ratio": 2, "max_seq_len": 32},
}
DIFFERENT_PER_BLOCK = {
    "Gemma2": _SHAPE | {"layer_types": _MIXED, "sliding_window": 4},
    "Gemma3": _SHAPE | {"layer_types": _MIXED, "sliding_window": 4},
    "Qwen2": _SHAPE | {"layer_types": _MIXED, "sliding_window": 4, "use_sliding_window": True},
}
OPT = _SHAPE | {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.3}
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def build_family(name: str, config: dict[str, object]) -> Build:
    def build():
        kind = getattr(transformers, _CONFIGS.get(name, f"{name}Config"))
        model = getattr(transformers, f"{name}ForCausalLM")(kind(**config)).train()
        return model, language_step(model, vocabulary=30)

    return build


@pytest.mark.parametrize("name", FAMILIES)
def test_other_decoder_models_follow_every_strategy(name):
    build = build_family(name, FAMILIES[name])
    for strategy in (ms.FullCheckpoint(), ms.Selective(2), ms.Chunked(3), ms.Recursive(), ATTENTION_ONLY):
        assert_equal_to_plain(build, strategy)


@pytest.mark.parametrize("name", WITHOUT_SDPA)
def test_models_without_fused_attention_follow_all_but_attention(name):
    build = build_family(name, WITHOUT_SDPA[name])
    for strategy in (ms.FullCheckpoint(), ms.Selective(2), ms.Chunked(3), ms.Recursive()):
        assert_equal_to_plain(build, strategy)
    with pytest.raises(RuntimeError, match="0 never called F.scaled_dot_product_attention"):
        outcome(build, ATTENTION_ONLY)


@pytest.mark.parametrize("name", DIFFERENT_PER_BLOCK)
def test_models_with_other_arguments_per_block_are_refused_in_chunks_only(name):
    """Gemma-2 and Gemma-3 hand other masks and position embeddings to every second block."""
    build = build_family(name, DIFFERENT_PER_BLOCK[name])
    for strategy in BLOCK_BY_BLOCK:
        assert_equal_to_plain(build, strategy)
    for strategy in CHUNKED:
        with pytest.raises(
            ValueError, match=r"layers.1 got other arguments compared with model.layers.0.* block by bl"
        ):
            outcome(build, strategy)


def test_layers_dropped_at_random_are_refused_in_chunks_only():
    """OPT with layerdrop draws a random number between its blocks, and a chunk would draw its own first."""
    for layerdrop in (0.0, 0.5):
        for strategy in (*BLOCK_BY_BLOCK, ATTENTION_ONLY):
            assert_equal_to_plain(build_family("OPT", OPT | {"layerdrop": layerdrop}), strategy)
    drawn = build_family("OPT", OPT | {"layerdrop": 1e-9})
    dropped = build_family("OPT", OPT | {"layerdrop": 1.0})
    for strategy in CHUNKED:
        with pytest.raises(ValueError, match="got other random numbers .the model draws some between its blocks"):
            outcome(drawn, strategy)
        plain, ours = outcome(dropped, None), outcome(dropped, strategy)
        assert torch.equal(ours.loss, plain.loss)


def test_an_encoder_and_a_decoder_are_told_apart_by_the_caller():
    config = transformers.T5Config(
        d_model=16, d_ff=24, d_kv=8, num_layers=3, num_heads=2, vocab_size=32, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).train()
    tokens = torch.randint(30, (2, 6))
    with pytest.raises(ValueError, match="several stacks .* encoder.block, decoder.block; pass one of them"):
        ms.apply(model, ms.FullCheckpoint())
    found = []
    for stack in (None, model.encoder, model.decoder):
        model.zero_grad()
        torch.manual_seed(0)
        blocks = None if stack is None else list(stack.block)
        with contextlib.nullcontext() if stack is None else ms.apply(model, ms.FullCheckpoint(), blocks) as applied:
            model(input_ids=tokens, labels=tokens).loss.backward()
        assert stack is None or applied.report.region_recomputes == 3
        found.append(gradients(model))
    for ours in found[1:]:
        assert all(torch.equal(gradient, found[0][name]) for name, gradient in ours.items())


def test_blocks_of_a_wrapped_model_are_found():
    """accelerate#389: DistributedDataParallel of one gloo process, with tied weights."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for build in (build_gpt2, build_llama):
            for strategy in (ms.FullCheckpoint(), ms.Selective(2), *CHUNKED, ATTENTION_ONLY):
                for apply_first in (True, False):
                    assert_equal_in_parallel(build, strategy, apply_first)
    finally:
        torch.distributed.destroy_process_group()


def assert_equal_in_parallel(build: Build, strategy: ms.Strategy, apply_first: bool) -> None:
    def in_parallel() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        model, _ = build("tied", dropout=0.5)
        return model, torch.randint(13, (2, 6))

    def run(wrapped: nn.Module, tokens: Tensor) -> None:
        for _ in range(2):  # the reducer is rebuilt after the first step
            wrapped(input_ids=tokens, labels=tokens).loss.backward()

    wrap = torch.nn.parallel.DistributedDataParallel
    model, tokens = in_parallel()
    torch.manual_seed(1)
    run(wrap(model), tokens)
    ours, tokens = in_parallel()
    if apply_first:
        with ms.apply(ours, strategy):
            wrapped = wrap(ours)
            torch.manual_seed(1)
            run(wrapped, tokens)
    else:
        wrapped = wrap(ours)
        torch.manual_seed(1)
        with ms.apply(wrapped, strategy):
            run(wrapped, tokens)
    for (name, mine), theirs in zip(ours.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


def test_families_name_what_they_test():
    """No configuration that a family's class would ignore: a misspelt size would test the default, billions large."""
    for name, config in {**FAMILIES, **WITHOUT_SDPA, **DIFFERENT_PER_BLOCK, "OPT": OPT}.items():
        model = build_family(name, config)()[0]
        assert len(ms.find_blocks(model)) == 4 and sum(p.numel() for p in model.parameters()) < 60_000, name
        assert inspect.getmodule(type(model)).__name__.startswith("transformers.models."), name
