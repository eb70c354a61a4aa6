"""``estimate`` against real steps: every figure must agree to the byte, and nothing may be left behind."""

from __future__ import annotations

import copy
import itertools
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import memsave_lib as ms
from memsave_lib import _compat, fake, formulas
from memsave_lib.formulas import BlockShape, LlamaShape

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, None: None}


def real_step(
    build: Callable[[], nn.Module],
    batch: int,
    seq_len: int,
    strategy: ms.Strategy = ms.KeepAll(),  # noqa: B008 - frozen
    dtype: torch.dtype = torch.float32,
    optimizer: str | Callable | None = "adamw",
    inputs: Callable | None = None,
    loss: Callable | None = None,
) -> ms.Trace:
    """The step that ``estimate`` describes, on a real model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    model = build()
    torch.set_default_dtype(before)
    model.train()
    for config in _compat.configs_with_cache(model):
        config.use_cache = False
    if inputs is None:
        tokens = torch.randint(3, model.config.vocab_size, (2, batch, seq_len))
        given = {"input_ids": tokens[0].clone(), "labels": tokens[1].clone()}
        del tokens
    else:
        given = inputs(batch, seq_len)
    make = OPTIMIZERS.get(optimizer, optimizer)
    chosen = make and make([parameter for parameter in model.parameters() if parameter.requires_grad])
    if chosen is not None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        chosen.step()
        chosen.zero_grad(set_to_none=True)

    def step() -> None:
        if isinstance(given, dict):
            output = model(**given)
        else:
            output = model(*given) if isinstance(given, tuple) else model(given)
        value = output.loss if loss is None else loss(output, given)
        del output
        value.backward()

    applied = nullcontext() if strategy == ms.KeepAll() else ms.apply(model, strategy)
    with applied, ms.MemoryMeter(model, chosen) as meter:
        step()
        if chosen is not None:
            chosen.step()
    return meter.trace


def figures(measured: ms.Trace | ms.Estimate) -> dict[str, int]:
    names = ("peak_bytes", "saved_bytes", "host_peak_bytes", "disk_peak_bytes")
    return {name: getattr(measured, name) for name in names}


def check(build: Callable[[], nn.Module], batch: int, seq_len: int, **options: Any) -> ms.Estimate:
    """Estimate it, run it, and compare; the place and the parts of the peak too."""
    estimated, trace = ms.estimate(build, batch, seq_len, **options), real_step(build, batch, seq_len, **options)
    assert figures(estimated) == figures(trace)
    assert (estimated.at_peak, estimated.peak_at) == (trace.at_peak, trace.peak_at)
    return estimated


def strategy_id(value: object) -> str | None:
    return value.label if isinstance(value, ms.Strategy) else None


STRATEGIES = [ms.KeepAll(), ms.FullCheckpoint(), ms.Selective(2), ms.Chunked(2), ms.Recursive()]


def small_gpt2(n_layer: int = 3, **config: Any) -> Callable[[], nn.Module]:
    return lambda: ms.gpt2("tiny", **{"n_layer": n_layer, "n_embd": 24, "n_head": 2, "n_positions": 64, **config})


def small_llama(n_layers: int = 3, kv_heads: int = 2, vocab_size: int = 301) -> Callable[[], nn.Module]:
    return lambda: ms.llama(
        "tiny", hidden_size=32, intermediate_size=50, num_hidden_layers=n_layers, vocab_size=vocab_size,
        num_attention_heads=4, num_key_value_heads=kv_heads,
    )  # fmt: skip


# Fake = real = closed form


@pytest.mark.parametrize("strategy", STRATEGIES, ids=strategy_id)
@pytest.mark.parametrize(
    ("batch", "seq_len", "optimizer"), [(3, 41, None), (1, 64, "adamw")], ids=lambda value: str(value)
)
def test_gpt2_takes_what_the_formulas_and_a_real_step_say(batch, seq_len, optimizer, strategy):
    estimated = check(small_gpt2(vocab_size=1003), batch, seq_len, strategy=strategy, optimizer=optimizer)
    shape, plan = BlockShape(batch, seq_len, 24, 2), strategy.plan(3)
    assert estimated.saved_bytes - sum(formulas.gpt2_terms(plan, shape, 1003).values()) == 0
    assert estimated.peak_at.op == "_log_softmax_backward_data"
    assert estimated.peak_bytes - formulas.gpt2_peak_bytes(plan, shape, 1003, 64, optimizer) == 0


@pytest.mark.parametrize("strategy", STRATEGIES, ids=strategy_id)
@pytest.mark.parametrize(
    ("batch", "seq_len", "kv_heads", "dtype", "optimizer"),
    [(3, 41, 4, "float32", None), (2, 61, 2, "bfloat16", "sgd")],
    ids=lambda value: str(value),
)
def test_llama_takes_what_the_formulas_and_a_real_step_say(batch, seq_len, kv_heads, dtype, optimizer, strategy):
    build = small_llama(kv_heads=kv_heads, vocab_size=1003)
    options = dict(strategy=strategy, dtype=getattr(torch, dtype), optimizer=optimizer)
    estimated = check(build, batch, seq_len, **options)
    shape, plan = LlamaShape(batch, seq_len, 32, 4, kv_heads, 50, dtype), strategy.plan(3)
    assert estimated.saved_bytes - sum(formulas.llama_terms(plan, shape, 1003).values()) == 0
    assert estimated.peak_at.op == "_log_softmax_backward_data"
    assert estimated.peak_bytes - formulas.llama_peak_bytes(plan, shape, 1003, optimizer) == 0


@pytest.mark.parametrize("build", [small_gpt2(), small_llama()], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    ("batch", "seq_len", "optimizer", "strategy"),
    [(1, 1, "adamw", ms.KeepAll()), (2, 7, "sgd", ms.Chunked(2)), (2, 7, None, ms.KeepAll())],
    ids=lambda value: strategy_id(value) or str(value),
)
def test_short_texts_peak_later_and_agree_too(batch, seq_len, optimizer, strategy, build):
    estimated = check(build, batch, seq_len, strategy=strategy, optimizer=optimizer)
    assert estimated.peak_at.op != "_log_softmax_backward_data"


def offloads() -> Iterator[ms.Strategy]:
    """Every inner strategy with every window, to both stores in turn, and two plans by hand."""
    stores = itertools.cycle(("host", "disk"))
    for inner, prefetch in itertools.product((ms.KeepAll(), ms.FullCheckpoint(), ms.Chunked(2)), (0, 2, 4)):
        yield ms.Offload(inner, store=next(stores), min_bytes=1024, prefetch=prefetch)
    yield ms.PerBlock(("offload", "recompute", "keep", "offload"), min_bytes=1024)
    yield ms.PerBlock(("recompute", "offload", "offload", "keep"), store="disk", min_bytes=1024)


OFFLOADS = list(offloads())


def offload_id(value: object) -> str:
    return f"{value.label}, prefetch {value.prefetch}"


@pytest.mark.parametrize("strategy", OFFLOADS, ids=offload_id)
def test_what_is_sent_away_leaves_and_comes_back_as_in_a_real_step(strategy):
    estimated = check(small_gpt2(n_layer=4), 2, 33, strategy=strategy, optimizer=None)
    assert estimated.host_peak_bytes + estimated.disk_peak_bytes > 0


@pytest.mark.parametrize(
    "strategy",
    [OFFLOADS[1], OFFLOADS[10], OFFLOADS[-1], ms.Offload(min_bytes=0, keep_last=0, store="disk")],
    ids=offload_id,
)
def test_stacks_send_away_as_in_a_real_step(strategy):
    options = dict(inputs=hidden_states, loss=square)
    check(lambda: ms.BlockStack(4, 24, 2), 2, 33, strategy=strategy, optimizer="sgd", **options)


def forward_peak(measured: ms.Trace) -> int:
    frame = measured.frame()
    return int(frame.total[frame.phase == "forward"].max())


def test_a_fake_file_holds_what_is_leaving_as_long_as_a_real_one():
    options = dict(inputs=hidden_states, loss=square, optimizer=None)
    peaks = []
    for prefetch in (0, 4):
        strategy = ms.Offload(store="disk", min_bytes=1024, keep_last=0, prefetch=prefetch)
        estimated = ms.estimate(lambda: ms.BlockStack(3, 24, 2), 2, 33, strategy, **options)
        real = real_step(lambda: ms.BlockStack(3, 24, 2), 2, 33, strategy, **options)
        assert forward_peak(estimated.trace) == forward_peak(real)
        peaks.append(forward_peak(real))
    assert peaks[1] > peaks[0]


def hidden_states(batch: int, seq_len: int) -> torch.Tensor:
    return torch.randn(batch, seq_len, 24)


def square(output: torch.Tensor, given: object) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=strategy_id)
@pytest.mark.parametrize(("attention", "optimizer"), [("sdpa", "adamw"), ("math", None)])
def test_stacks_take_what_the_timeline_and_a_real_step_say(attention, strategy, optimizer):
    stack = lambda: ms.BlockStack(4, 24, 2, attention=attention)  # noqa: E731
    options = dict(strategy=strategy, inputs=hidden_states, loss=square, optimizer=optimizer)
    estimated = check(stack, 2, 33, **options)
    shape = BlockShape(2, 33, 24, 2, attention=attention)
    settings = dict(hold_output=False, input_requires_grad=False, new_gradients=True)
    count = 4 * formulas.block_parameters(24)
    state = {"adamw": 2 * 4 * count + 4 * 4 * 12}.get(optimizer, 0)
    backward = 4 * count + state + formulas.stack_peak_bytes(strategy.plan(4), shape, **settings)
    squared = shape.checkpoint_bytes  # the loss saves what it squares
    assert estimated.saved_bytes - formulas.stack_saved_bytes(strategy.plan(4), shape) - squared == 0
    assert estimated.peak_at.phase == "optimizer" or estimated.peak_bytes - backward == 0
    assert estimated.peak_bytes >= backward


# A model that does not fit


LONG_TEXT = """
import resource, torch, memsave_lib as ms
from memsave_lib import formulas
long = ms.estimate(lambda: ms.llama("llama-2-7b"), 1, 131_072, dtype=torch.bfloat16, optimizer=None)
shape = formulas.LlamaShape(1, 131_072, 4096, 32, 32, 11008)
plan = ms.KeepAll().plan(32)
print(long.saved_bytes, sum(formulas.llama_terms(plan, shape, 32000).values()))
print(long.peak_bytes, formulas.llama_peak_bytes(plan, shape, 32000))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_llama_2_7b_on_131072_tokens_takes_748_gib_and_no_memory():
    done = subprocess.run([sys.executable, "-c", LONG_TEXT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    saved, peak, memory = ([int(number) for number in line.split()] for line in done.stdout.splitlines())
    assert saved == [803_396_386_828] * 2
    assert peak[0] == peak[1]
    kibibytes = memory[0] // (1024 if sys.platform == "darwin" else 1)
    assert kibibytes * 1024 < 1_500_000_000


# Nothing is left behind


def test_default_dtype_comes_back_also_after_an_error():
    def broken() -> nn.Module:
        assert torch.get_default_dtype() is torch.bfloat16
        raise KeyError("broken")

    ms.estimate(small_gpt2(), 1, 4, dtype="bfloat16", optimizer=None)
    assert torch.get_default_dtype() is torch.float32
    with pytest.raises(KeyError, match="broken"):
        ms.estimate(broken, 1, 4, dtype="bfloat16")
    assert torch.get_default_dtype() is torch.float32


def test_random_numbers_files_and_gradient_modes_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = torch.get_rng_state()
    strategy = ms.Offload(ms.Chunked(2), store="disk", min_bytes=0)
    store = ms.DiskStore()
    for chosen in (strategy, ms.Offload(store=store, min_bytes=0)):
        estimated = ms.estimate(small_gpt2(attn_pdrop=0.1, resid_pdrop=0.1), 2, 16, chosen)
        assert estimated.disk_peak_bytes > 0
    assert torch.equal(before, torch.get_rng_state())
    assert (list(tmp_path.iterdir()), store.file_bytes, store.stored_bytes) == ([], 0, 0)
    assert torch.is_grad_enabled()
    assert not _compat.active_dispatch_modes()


def test_a_configuration_of_the_users_stays_as_it_was():
    config = transformers.LlamaConfig(**ms.models.LLAMA_SIZES["tiny"])
    before = copy.deepcopy(vars(config))
    by_config = ms.estimate(config, 2, 9)
    assert vars(config) == before
    transformers.LlamaForCausalLM(config)  # makes its own notes in the configuration that it is given
    before = copy.deepcopy(vars(config))
    by_function = ms.estimate(lambda: transformers.LlamaForCausalLM(config), 2, 9)
    assert vars(config) == before
    assert figures(by_function) == figures(by_config)


def test_registries_of_transformers_get_one_name_each_and_keep_it():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ms.estimate(small_gpt2(), 1, 4)
    before = [set(registry.keys()) for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    ms.estimate(small_llama(), 1, 4)
    assert [set(registry.keys()) for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)] == before
    assert all("sdpa_of_plain_positions" in names for names in before)


def test_every_surrounding_gives_the_same_figures():
    def once() -> dict[str, int]:
        return figures(ms.estimate(small_gpt2(), 2, 9, ms.Chunked(2)))

    expected, found = once(), []
    thread = threading.Thread(target=lambda: found.append(once()))
    thread.start()
    thread.join()
    with torch.no_grad():
        found.append(once())
    with torch.inference_mode():
        found.append(once())
    found.append(once())
    assert found == [expected] * 4


def test_under_autocast_it_is_the_step_under_autocast():
    plain = ms.estimate(small_gpt2(), 2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        estimated = check(small_gpt2(), 2, 9)
    assert estimated.saved_bytes != plain.saved_bytes


def test_a_full_host_keeps_the_rest_on_the_device():
    sizes = []
    for limit in ("16 KiB", "1 MiB"):
        estimated = ms.estimate(small_gpt2(), 2, 33, ms.Offload(store=ms.HostStore(limit), min_bytes=1024))
        trace = real_step(small_gpt2(), 2, 33, ms.Offload(store=ms.HostStore(limit), min_bytes=1024))
        assert figures(estimated) == figures(trace)
        sizes.append(estimated.host_peak_bytes)
    assert 0 < sizes[0] <= 16 * 1024 < sizes[1]


# Other people's models


TINY = dict(
    vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def hugging_face(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    settings = {**TINY, **options}
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**settings))


SEQ2SEQ = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48,
)  # fmt: skip
FULL, CHUNK = ms.FullCheckpoint(), ms.Chunked(1)
MODELS = {
    "Mistral, window": (hugging_face("MistralForCausalLM", "MistralConfig", sliding_window=8), FULL),
    "Mistral, wide window": (hugging_face("MistralForCausalLM", "MistralConfig", sliding_window=18), CHUNK),
    "Mixtral": (hugging_face("MixtralForCausalLM", "MixtralConfig", num_local_experts=4), FULL),
    "Gemma 2": (hugging_face("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, sliding_window=8), FULL),
    "Qwen 3": (hugging_face("Qwen3ForCausalLM", "Qwen3Config", head_dim=8), CHUNK),
    "Phi": (hugging_face("PhiForCausalLM", "PhiConfig", num_key_value_heads=4), FULL),
    "OPT": (hugging_face("OPTForCausalLM", "OPTConfig", ffn_dim=48, word_embed_proj_dim=32), FULL),
    "GPT-NeoX": (hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig"), CHUNK),
    "Bloom": (hugging_face("BloomForCausalLM", "BloomConfig", n_layer=2, n_head=4), FULL),
    "Falcon": (hugging_face("FalconForCausalLM", "FalconConfig"), ms.KeepAll()),
    "BERT, with its dropout": (hugging_face("BertForMaskedLM", "BertConfig"), FULL),
    "ModernBERT": (hugging_face("ModernBertForMaskedLM", "ModernBertConfig", cls_token_id=1, sep_token_id=2), FULL),
    "T5": (hugging_face("T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, d_ff=48, num_layers=2,
                        num_heads=4, decoder_start_token_id=0), ms.KeepAll()),
    "BART": (hugging_face("BartForConditionalGeneration", "BartConfig", **SEQ2SEQ), ms.KeepAll()),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_nobody_named_take_what_a_real_step_takes(name, recwarn):
    build, strategy = MODELS[name]
    check(build, 2, 17, strategy=strategy, optimizer=None)
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("seen", ["all", "ends hidden"])
@pytest.mark.parametrize("name", ["Mistral, window", "GPT-NeoX", "BERT, with its dropout"])
def test_a_padding_mask_counts_if_it_hides_something(name, seen):
    def padded(batch: int, seq_len: int) -> dict[str, torch.Tensor]:
        tokens = torch.ones(batch, seq_len, dtype=torch.long)
        mask = torch.ones_like(tokens)
        if seen != "all":
            mask[:, -3:] = 0
        return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": mask}

    check(MODELS[name][0], 2, 17, strategy=ms.FullCheckpoint(), optimizer=None, inputs=padded)


def test_classifiers_have_a_label_a_sequence_and_pictures_come_as_inputs():
    build = hugging_face("BertForSequenceClassification", "BertConfig")
    labelled = lambda batch, seq_len: {  # noqa: E731
        "input_ids": torch.ones(batch, seq_len, dtype=torch.long),
        "labels": torch.ones(batch, dtype=torch.long),
    }
    given = ms.estimate(build, 3, 9, inputs=labelled)
    assert figures(ms.estimate(build, 3, 9)) == figures(given) == figures(real_step(build, 3, 9, inputs=labelled))

    settings = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16)
    pictures = lambda: transformers.ViTModel(transformers.ViTConfig(patch_size=4, **settings))  # noqa: E731
    options = dict(inputs=lambda batch, side: torch.randn(batch, 3, side, side), strategy=ms.FullCheckpoint())
    check(pictures, 2, 16, loss=lambda output, given: output.last_hidden_state.mean(), **options)


@pytest.mark.parametrize(
    ("build", "longest"),
    [
        (small_gpt2(), 64),
        (MODELS["OPT"][0], 64),
        (MODELS["BART"][0], 64),
        (hugging_face("RobertaForMaskedLM", "RobertaConfig"), 63),
        (
            hugging_face("GPTJForCausalLM", "GPTJConfig", n_positions=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=4),
            64,
        ),
    ],
    ids=["gpt2", "OPT", "BART", "RoBERTa", "GPT-J"],
)
def test_texts_longer_than_the_positions_are_refused_and_no_others(build, longest):
    ms.estimate(build, 1, longest, optimizer=None)
    with pytest.raises(ValueError, match=r"seq_len.* positions of .*max_position_embeddings="):
        ms.estimate(build, 1, longest + 1, optimizer=None)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (MODELS["Falcon"][0], dict(strategy=FULL), r"FalconForCausalLM makes .* KeepAll\(\) only, not for FullC"),
        (hugging_face("LongformerForMaskedLM", "LongformerConfig", attention_window=8), {}, "^Longformer.* values of"),
        (
            hugging_face("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", d_model=32, d_kv=8,
                         d_ff=48, num_layers=2, num_heads=4, num_experts=2, decoder_start_token_id=0),
            {}, r"^SwitchTransformers.* (looks at|converts) .*\(modeling_switch_transformers.py, line",
        ),
        (
            hugging_face("Mamba2ForCausalLM", "Mamba2Config", state_size=8, num_heads=8, head_dim=8, n_groups=2),
            dict(inputs=lambda batch, seq_len: {"attention_mask": torch.ones(batch, seq_len)}),
            "Mamba2ForCausalLM drops an attention_mask that hides nothing.*leave the mask out",
        ),
        (hugging_face("BigBirdForMaskedLM", "BigBirdConfig", attention_type="original_full"), {}, "written out drops"),
        (hugging_face("DogeForCausalLM", "DogeConfig"), {}, 'DogeForCausalLM asks .*attn_implementation="eager"'),
        (hugging_face("BertModel", "BertConfig"), {}, "BertModel is no language model .*not found: labels"),
    ],
    ids=["Falcon", "Longformer", "Switch", "Mamba", "BigBird", "Doge", "no labels"],
)  # fmt: skip
def test_models_that_cannot_be_estimated_say_why(build, options, message):
    with pytest.raises(ValueError, match=message):
        ms.estimate(build, 2, 16, **options)


# One's own models


class Own(nn.Module):
    """Three blocks, buffers from everywhere, and a last step of the caller's making."""

    def __init__(self, finish: Callable[[torch.Tensor], object] = lambda x: x) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24)) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.register_buffer("from_numpy", torch.from_numpy(np.ones(24, dtype=np.float32)))
        self.register_buffer("from_list", torch.tensor([1.0] * 24))
        self.finish = finish

    def forward(self, x: Any, scale: float = 1.0) -> object:
        x = x["deep"] if isinstance(x, dict) else x
        x = x * scale * torch.tensor(2.0) + self.from_numpy + self.from_list
        self.from_numpy.mul_(0.9).add_(x.detach().mean((0, 1)))
        for block in self.blocks:
            x = x + block(x)
        return self.finish(x)


INPUTS = {
    "tensor": hidden_states,
    "tuple": lambda batch, seq_len: (hidden_states(batch, seq_len), 0.5),
    "dict": lambda batch, seq_len: {"x": hidden_states(batch, seq_len), "scale": 2.0},
    "nested": lambda batch, seq_len: {"x": {"deep": hidden_states(batch, seq_len)}},
}


@pytest.mark.parametrize("kind", INPUTS)
def test_own_models_take_what_a_real_step_takes(kind):
    check(Own, 2, 9, inputs=INPUTS[kind], loss=square, strategy=ms.Selective(2))


def test_frozen_parameters_have_neither_gradients_nor_state():
    def half_frozen() -> nn.Module:
        model = ms.gpt2("tiny")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("h.1" in name)
        return model

    estimated = check(half_frozen, 2, 9, strategy=ms.FullCheckpoint())
    block = 4 * formulas.block_parameters(64)
    assert estimated.at_peak["optimizer"] == 2 * block + 4 * 12
    model = half_frozen().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of GPT2LMHeadModel requires a gradient"):
        ms.estimate(lambda: fake_twin(model), 1, 4)
    with pytest.raises(ValueError, match="the loss depends on nothing that requires a gradient"):
        ms.estimate(lambda: fake_twin(model), 1, 4, optimizer=None)


def fake_twin(model: nn.Module) -> nn.Module:
    return ms.gpt2("tiny").requires_grad_(next(model.parameters()).requires_grad)


LOOKS = {
    "item": lambda x: x * x.sum().item(),
    "if": lambda x: x if (x > 0).all() else -x,
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x * len(x.unique()),
    "tolist": lambda x: x * x.detach()[0, 0].tolist()[0],
    "numpy": lambda x: x * float(x.detach().numpy().sum()),
}


@pytest.mark.parametrize("kind", LOOKS)
def test_a_model_that_looks_at_values_is_told_where(kind):
    with pytest.raises(ValueError, match=r"^Own looks at the values of .*MemoryMeter.*\(test_estimation.py, line"):
        ms.estimate(lambda: Own(LOOKS[kind]), 2, 9, inputs=hidden_states, loss=square)


def test_an_error_of_the_models_own_is_not_logged_besides(caplog):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    try:
        with pytest.raises(RuntimeError, match="a and b must have same reduction dim"):
            ms.estimate(lambda: Own(lambda x: x @ torch.ones(3, 3)), 2, 9, inputs=hidden_states, loss=square)
    finally:
        log.removeHandler(caplog.handler)
    assert (caplog.records, log.filters) == ([], [])


CONVERSIONS = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_conversions_of_the_builder_are_refused_in_favor_of_dtype(kind):
    with pytest.raises(ValueError, match=r"build_model converts parameters .*dtype="):
        ms.estimate(lambda: CONVERSIONS[kind](Own()), 2, 9, inputs=hidden_states, loss=square)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is no device that this torch does not know")
@pytest.mark.parametrize("build", [lambda: Own().cuda(), lambda: nn.Linear(3, 3, device="cuda")], ids=["moved", "made"])
def test_other_devices_are_refused(build):
    with pytest.raises(ValueError, match="build_model asks for a device .* leave the model on the CPU"):
        ms.estimate(build, 2, 9, inputs=hidden_states, loss=square)


REAL = Own()


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (REAL, TypeError, "got a model, Own: hand in lambda: Own"),
        (lambda: REAL, ValueError, "blocks.0.0.weight of what it returned is a real tensor: it was there before"),
        (lambda: torch.compile(Own()), ValueError, "OptimizedModule is compiled"),
        (lambda: nn.Linear(3, 3, device="meta"), ValueError, "leave the model on the CPU.*weight is on meta"),
        (lambda: None, TypeError, "must return a model, an nn.Module; it returned NoneType"),
        (None, TypeError, "a function that builds a model, .* got None"),
        ("gpt2", TypeError, "a function that builds a model, .* got 'gpt2'"),
        (transformers.ViTConfig(), ValueError, "ViTConfig describes no causal language model"),
        (transformers.BertConfig(), ValueError, "BertConfig describes no causal language model"),
        (Own, ValueError, "Own is no language model with labels .*takes x, scale.*inputs=lambda batch, seq_len"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_builds_no_new_model_is_refused(build, error, message):
    with pytest.raises(error, match=message):
        ms.estimate(build, 2, 9)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(batch=True), TypeError, "batch must be a whole number of at least 1, got True"),
        (dict(seq_len=0), ValueError, "seq_len must be a whole number of at least 1, got 0"),
        (dict(strategy=ms.KeepAll), TypeError, r"strategy must be a strategy such as KeepAll\(\)"),
        (dict(strategy=ms.Chunked(9)), ValueError, "needs at least 9 blocks, this stack has 3"),
        (dict(dtype=torch.int8), ValueError, "float32, bfloat16, float16, as torch.float32 or by name, got torch.int8"),
        (dict(dtype="float33"), ValueError, "got 'float33'"),
        (dict(dtype=None), ValueError, "got None"),
        (dict(dtype=np.float32), ValueError, "got <class 'numpy.float32'>"),
        (dict(optimizer="adamv"), ValueError, "optimizer is one of 'adamw', 'adam', 'sgd', .* got 'adamv'"),
        (dict(optimizer=torch.optim.SGD([torch.zeros(1)])), ValueError, "got an optimizer, SGD"),
        (dict(optimizer=lambda parameters: None), TypeError, "optimizer must return an optimizer .* returned None"),
        (dict(optimizer=torch.optim.LBFGS), ValueError, "LBFGS runs forward as often as it likes"),
        (dict(optimizer=torch.optim.Adafactor), ValueError, "Adafactor looks at the values of a tensor"),
        (
            dict(inputs=torch.zeros(2, 9, 24)),
            TypeError,
            r"inputs must be a function, got a tensor of shape \(2, 9, ",
        ),
        (dict(loss="mse"), TypeError, "loss must be a function, got str"),
        (dict(loss=None), ValueError, r"returned no loss but a tensor of shape \(2, 9, 24\): hand in labels"),
        (dict(loss=lambda output, given: output), ValueError, r"returned a tensor of shape \(2, 9, 24\)"),
        (dict(loss=lambda output, given: 1.0), ValueError, "tensor with one number, it returned float"),
        (dict(loss=lambda output, given: output.mean().detach()), ValueError, "depends on nothing that requires a gr"),
        (dict(blocks=[1]), TypeError, r"blocks must be a function from the model .* got \[1\]"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(arguments, error, message):
    options = dict(build_model=Own, batch=2, seq_len=9, inputs=hidden_states, loss=square)
    with pytest.raises(error, match=message):
        ms.estimate(**{**options, **arguments})


def test_a_fake_copy_of_a_real_model_steps_as_that_does_and_leaves_it_alone():
    model = MODELS["Qwen 3"][0]().train()
    tokens = torch.randint(3, 101, (2, 17))
    batch = {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones(2, 17, dtype=torch.long)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = fake.copy_of(model, batch)
    with twin.running(), ms.MemoryMeter(twin.model) as copied:
        twin.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.config.use_cache, model.config._attn_implementation) == (True, "sdpa")
    model.config.use_cache = False
    with ms.MemoryMeter(model) as real:
        model(**batch).loss.backward()
    assert figures(copied.trace) == figures(real.trace)
