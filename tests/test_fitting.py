"""Plans for real models: the peak that was promised is measured to the byte, and nothing of the model changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memsave_lib as ms
from equality import SEED, TinyLanguageModel
from memsave_lib import devices, fake, fitting
from memsave_lib.costs import Needs
from memsave_lib.planner import BelowTheFloor

#: Tiny tensors travel too; a link that is worth using for them.
OPTIONS = {"device": replace(devices.A100, copy_out=4e12, copy_in=4e12), "min_bytes": 256}
OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def step(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor]) -> None:
    output = fake.call(model, batch)
    found = loss(output, batch)
    del output
    found.backward()


@dataclass(frozen=True)
class Task:
    """A model, what it is called with, its loss, and how it is fitted."""

    build: Callable[[], nn.Module]
    batch: Any
    loss: Callable[[Any, Any], Tensor] | None = None
    blocks: Callable[[nn.Module], list[nn.Module]] | None = None
    optimizer: str | None = "adamw"

    def model(self) -> nn.Module:
        torch.manual_seed(SEED)
        return self.build().train()

    def blocks_of(self, model: nn.Module) -> list[nn.Module] | None:
        return self.blocks and self.blocks(model)

    def fit(self, model: nn.Module, budget: int | str, **options: Any) -> ms.PlannedStrategy:
        made = {"loss": self.loss, "blocks": self.blocks_of(model), "optimizer": self.optimizer, **OPTIONS, **options}
        if made["optimizer"] == "sgd":
            made["optimizer"] = OPTIMIZERS["sgd"](model.parameters())  # one with settings of its own
        return ms.fit(model, self.batch, budget, **made)

    def train(self, strategy: ms.Strategy) -> tuple[int, dict[str, Tensor]]:
        """The peak of a real step from the middle of training, and its gradients."""
        model, loss = self.model(), self.loss or fake.loss_in_output
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = OPTIMIZERS[self.optimizer](trained) if self.optimizer else None
        if optimizer is not None:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        fake.switch_cache_off(model)
        torch.manual_seed(SEED + 1)
        with ms.apply(model, strategy, blocks=self.blocks_of(model)), ms.MemoryMeter(model, optimizer) as meter:
            step(model, self.batch, loss)
            gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
            if optimizer is not None:
                optimizer.step()
        return meter.trace.peak_bytes, gradients


def tokens(vocabulary: int, batch: int = 4, seq_len: int = 32) -> dict[str, Tensor]:
    ids = torch.randint(vocabulary, (batch, seq_len), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2(**config: Any) -> nn.Module:
    return ms.gpt2("tiny", **{"n_layer": 3, "vocab_size": 64, "n_positions": 32, **config})


def llama(**config: Any) -> nn.Module:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
    return ms.llama("tiny", **{**shape, **config})


def frozen_embeddings() -> nn.Module:
    model = llama()
    model.get_input_embeddings().requires_grad_(False)
    return model


def cross_entropy(output: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch.flatten())


def squares(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


class TwoStacks(nn.Module):
    """``find_blocks`` cannot tell which of the two is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ms.BlockStack(3, 32, 4), ms.BlockStack(3, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
HIDDEN = torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(0))
IDS = tokens(11)["input_ids"]
TASKS = {
    "stack": Task(lambda: ms.BlockStack(4, 32, 4), HIDDEN, squares),
    "stack-math-dropout": Task(
        lambda: ms.BlockStack(3, 32, 4, attention="math", dropout=0.1), HIDDEN, squares, optimizer=None
    ),
    "by-hand": Task(TwoStacks, HIDDEN, squares, lambda model: list(model.second.blocks), "sgd"),
    "course-tied": Task(lambda: TinyLanguageModel(4, 16, tied=True), IDS, cross_entropy, optimizer="sgd"),
    "gpt2": Task(gpt2, tokens(64)),
    "gpt2-dropout": Task(lambda: gpt2(**DROPOUT), tokens(64), optimizer="sgd"),
    "llama": Task(llama, tokens(64), optimizer=None),
    "llama-bf16-grouped": Task(lambda: llama(num_key_value_heads=2).to(torch.bfloat16), tokens(64)),
    "llama-frozen-embeddings": Task(frozen_embeddings, tokens(64)),
}


def floor_of(task: Task, model: nn.Module, **options: Any) -> BelowTheFloor:
    with pytest.raises(BelowTheFloor) as refused:
        task.fit(model, 1, **options)
    return refused.value


@pytest.mark.parametrize("name", TASKS)
def test_a_real_step_has_the_peak_that_was_promised(name):
    """At the floor and above; gradients are those of keep-all, bit by bit."""
    task = TASKS[name]
    model = task.model()
    kept, expected = task.train(ms.KeepAll())
    floor = floor_of(task, model).floor_bytes
    assert floor < kept
    for place in (0.0, 0.4):
        budget = floor + int(place * (kept - floor))
        strategy = task.fit(model, budget)
        peak, gradients = task.train(strategy)
        assert (peak, strategy.budget) == (strategy.peak_bytes, budget)
        assert peak <= budget
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())
    if task.loss is not None:  # the smaller models
        with pytest.raises(BelowTheFloor, match=f"{floor:,} bytes"):
            task.fit(model, floor - 1)


def everything_of(model: nn.Module) -> dict[str, Any]:
    """What a fit must not change."""
    return {
        "parameters": {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()},
        "gradients": {name: _with_copy(p.grad) for name, p in model.named_parameters()},
        "needs": {name: p.requires_grad for name, p in model.named_parameters()},
        "classes": [(type(module), module.training, sorted(vars(module))) for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "cache": model.config.use_cache if hasattr(model, "config") else None,
        "attention": model.config._attn_implementation if hasattr(model, "config") else None,
        "random": torch.get_rng_state(),
    }


def _with_copy(gradient: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if gradient is None else (gradient, gradient.clone())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], Tensor):
        return one[0] is other[0] and torch.equal(one[1], other[1])
    return one == other


def looks_at_values(output: Any, batch: Any) -> Tensor:
    return output.loss if output.loss > 0 else -output.loss


SMALL_MACHINE = replace(OPTIONS["device"], name="not measured here")


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies are as fast as anybody likes, its FLOPs still those of real steps."""
    monkeypatch.setattr(devices, "measure", lambda place, seconds: SMALL_MACHINE)


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize("how", ["fits", "by real steps", "below the floor", "refused", "no such blocks"])
def test_a_fit_leaves_the_model_as_it_was(how):
    """Also where it fails, and where it runs real steps because no device is named."""
    torch.manual_seed(0)
    model = gpt2(**DROPOUT, n_layer=2).train()
    model.config.use_cache = True
    model.transformer.h[1].eval()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    batch, before = tokens(64), everything_of(model)
    options: dict[str, Any] = dict(OPTIONS)
    if how == "by real steps":
        options["device"] = None
    elif how == "refused":
        options["loss"] = looks_at_values
    elif how == "no such blocks":
        options["blocks"] = [ms.find_blocks(gpt2(n_layer=1))[0]]
        torch.set_rng_state(before["random"])
    if how in ("fits", "by real steps"):
        ms.fit(model, batch, "1 GiB", **options)
    else:
        expected = {"below the floor": "below the floor", "refused": "values", "no such blocks": "not a part of GPT2LM"}
        with pytest.raises(ValueError, match=expected[how]):
            ms.fit(model, batch, 1, **options)
    assert same(everything_of(model), before)


@pytest.mark.usefixtures("no_measuring")
def test_this_machine_is_known_by_the_steps_of_the_model(monkeypatch):
    """Twice as slow steps, half as many FLOPs a second; the plan and its certificate are those of any device."""
    model, batch, seen = gpt2(n_layer=2), tokens(64), []
    plan = fitting.fastest_in_simulation
    monkeypatch.setattr(
        fitting, "fastest_in_simulation", lambda *args, **options: seen.append(args) or plan(*args, **options)
    )
    for seconds in (0.5, 1.0):
        monkeypatch.setattr(
            fitting, "step_seconds", lambda step, restart, seconds=seconds: restart() or step() or seconds
        )
        planned = ms.fit(model, batch, "1 GiB", min_bytes=256)
        assert planned.actions == ("keep", "keep")
        assert planned.certificate.extra_seconds == planned.certificate.bound_seconds == 0.0
        assert 0 < planned.certificate.plain_seconds < seconds
    (costs, _, first), (_, _, second) = seen
    assert first.flops == pytest.approx(2 * second.flops, rel=1e-12)
    assert first.source["flops"] == "reached by steps of this model"
    again = sum(block.recompute_flops for block in costs.blocks)
    assert first.flops * 0.5 == pytest.approx(costs.step_flops + again, rel=0.05)


@pytest.mark.usefixtures("no_measuring")
def test_a_step_that_does_not_fit_is_not_run(monkeypatch):
    monkeypatch.setattr(fitting, "step_seconds", lambda *_: pytest.fail("a real step was run"))
    with pytest.raises(BelowTheFloor):
        ms.fit(gpt2(n_layer=2), tokens(64), 1)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"budget": "14 Gib"}, ValueError, "'14 Gib' has the unknown unit 'Gib': did you mean \"14 GiB\"?"),
        ({"budget": True}, TypeError, "got True"),
        ({"budget": 1.5}, TypeError, "got 1.5"),
        ({"budget": -3}, ValueError, "a size cannot be negative, got -3"),
        ({"device": "A100"}, TypeError, "device is a Device such as devices.A100, got 'A100'"),
        ({"actions": "keep"}, ValueError, "actions are some of 'keep', 'recompute', 'offload', got 'keep'"),
        ({"actions": 3}, ValueError, "actions are some of 'keep', 'recompute', 'offload', got 3"),
        ({"store": "tape"}, ValueError, 'store is "host" or "disk", got \'tape\''),
        ({"min_bytes": -1}, ValueError, "a size cannot be negative, got -1"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused_before_anything_runs(options, kind, message, monkeypatch):
    monkeypatch.setattr(fake, "copy_of", lambda *_: pytest.fail("the model was copied"))
    given = {"budget": "1 GiB", **OPTIONS, **options}
    with pytest.raises(kind) as refused:
        ms.fit(nn.Linear(2, 2), HIDDEN, given.pop("budget"), **given)
    assert message in str(refused.value)


def test_the_floor_of_a_large_vocabulary_is_its_logits():
    """What sets it, and what memory is made of there."""
    model = gpt2(n_layer=2, n_embd=16, vocab_size=4096)
    task = Task(lambda: model, tokens(4096), optimizer=None)
    error = floor_of(task, model)
    cause = "the turn from forward to backward: the head and the loss (logits of a large vocabulary)"
    assert error.cause == cause
    assert str(error).startswith("a budget of 1 B (1 bytes) is below the floor of ")
    assert f"{error.floor_bytes:,} bytes), which is set by {cause}. There the peak is in " in str(error)
    assert " and made of " in str(error)


@pytest.mark.parametrize("actions", [("offload",), ("keep", "recompute")], ids="-".join)
def test_a_fit_takes_allowed_actions_only(actions):
    task = TASKS["stack"]
    model = task.model()
    floor = floor_of(task, model, actions=actions).floor_bytes
    strategy = task.fit(model, floor, actions=actions)
    assert set(strategy.actions) <= set(actions)
    assert task.train(strategy)[0] == strategy.peak_bytes <= floor


def test_a_fit_for_the_disk_goes_to_the_disk():
    task = TASKS["stack"]
    device = replace(OPTIONS["device"], disk_write=1e12, disk_read=1e12)
    strategy = task.fit(task.model(), "1 GiB", device=device, store="disk", actions=("offload",))
    assert strategy.store == "disk"
    assert strategy.actions == ("offload",) * 4
    assert task.train(strategy)[0] == strategy.peak_bytes


def test_a_plan_that_turns_out_too_large_is_made_again_for_less(monkeypatch):
    """As where the planner's model of memory is too kind: here by a whole block."""
    task = TASKS["stack"]
    model, profile, plan, planned = task.model(), fitting.model_costs, fitting.fastest_in_simulation, []

    def too_kind(*args: Any) -> ms.ModelCosts:
        costs = profile(*args)
        less = costs.blocks[1].held

        def lowered(block: ms.BlockCosts) -> ms.BlockCosts:
            needs = Needs(*(need - less for need in vars(block.needs).values()))
            return replace(block, needs=needs)

        blocks = tuple(map(lowered, costs.blocks))
        return ms.ModelCosts(blocks, costs.turn - less, costs.elsewhere - less, costs.flops)

    def noted(*args: Any, **options: Any) -> ms.PlannedStrategy:
        planned.append(plan(*args, **options))
        return planned[-1]

    kept, options = task.train(ms.KeepAll())[0], {"actions": ("keep", "recompute")}
    honest = task.fit(model, kept - 1, **options)
    monkeypatch.setattr(fitting, "model_costs", too_kind)
    monkeypatch.setattr(fitting, "fastest_in_simulation", noted)
    strategy = task.fit(model, kept - 1, **options)
    assert [one.actions == strategy.actions for one in planned] == [False, True]
    assert (strategy, strategy.peak_bytes, strategy.budget) == (honest, honest.peak_bytes, kept - 1)
    monkeypatch.setattr(fitting, "ATTEMPTS", 1)  # no more plans: the leanest one will do
    assert task.fit(model, kept - 1, **options).actions == ("recompute",) * 4


def test_planned_strategies_are_measured_and_compared_like_others():
    task = TASKS["stack"]
    lean = task.fit(task.model(), "1 GiB", actions=("recompute", "offload"))

    def make_step() -> tuple[nn.Module, Callable[[], Tensor]]:
        stack = task.model()

        def run() -> Tensor:
            loss = stack(HIDDEN).square().mean()
            loss.backward()
            return loss

        return stack, run

    compared = ms.compare(make_step, [ms.KeepAll(), lean], repeats=0)
    assert [one.equal_gradients for one in compared.measurements] == [True, True]
    assert lean.label in compared.frame().index
    assert compared.measurements[1].peak_bytes < compared.measurements[0].peak_bytes
    with pytest.raises(ValueError, match="PerBlock names 4 actions, this stack has 3 blocks"):
        ms.apply(ms.BlockStack(3, 32, 4), lean)
    assert len(lean.describe().splitlines()) == 4


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        torch.optim.RMSprop,
    ],
    ids=["AdamW", "AdamW, foreach", "SGD", "RMSprop"],
)
def test_an_optimizer_that_exists_says_its_kind_and_settings(make):
    model, batch = ms.gpt2("tiny"), tokens(256)
    optimizer = make(model.parameters())
    strategy = ms.fit(model, batch, "1 GiB", optimizer=optimizer, **OPTIONS)
    assert not optimizer.state
    for number in range(2):  # the first makes the optimizer's state
        with ms.apply(model, strategy), ms.MemoryMeter(model, optimizer) as meter:
            model(**batch).loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        assert (meter.trace.peak_bytes == strategy.peak_bytes) == (number == 1)


def test_groups_of_an_optimizer_and_what_it_trains_count():
    model, batch = ms.gpt2("tiny"), tokens(256)
    head, rest = [model.transformer.wte.weight], [model.transformer.wpe.weight]
    settings = [{"params": head, "momentum": 0.9}, {"params": rest}]
    strategy = ms.fit(model, batch, "1 GiB", optimizer=torch.optim.SGD(settings, lr=0.1), **OPTIONS)
    plain = ms.fit(model, batch, "1 GiB", optimizer=torch.optim.SGD(head + rest, lr=0.1), **OPTIONS)
    assert strategy.peak_bytes - plain.peak_bytes == head[0].nbytes
    with pytest.raises(ValueError, match="1 parameters of the optimizer's group 0 are not GPT2LMHeadModel's"):
        ms.fit(model, batch, "1 GiB", optimizer=torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1), **OPTIONS)


@pytest.mark.parametrize(
    ("batch", "loss", "message"),
    [(None, None, "batch is what"), ([1], None, "got list"), ({"input_ids": 1}, "mse", "loss must be a function")],
)
def test_what_a_model_cannot_be_called_with_is_refused(batch, loss, message):
    with pytest.raises(TypeError, match=message):
        ms.fit(ms.gpt2("tiny"), batch, "1 GiB", loss=loss, **OPTIONS)


def test_the_floor_is_that_of_the_leanest_plan_that_is_run():
    """Tensors of an offloaded block come back one by one: where that tells, sending everything away needs least."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = BertForSequenceClassification(BertConfig(vocab_size=1000, max_position_embeddings=128, **sizes)).train()
    ids = torch.randint(3, 900, (8, 128))
    batch = {"input_ids": ids, "labels": ids[:, 0] % 2}
    with pytest.raises(BelowTheFloor) as raised:
        ms.fit(model, batch, 1, devices.A100, optimizer=None)
    with ms.apply(model, ms.Offload(keep_last=0, prefetch=0)), ms.MemoryMeter(model) as meter:
        model(**batch).loss.backward()
    assert raised.value.floor_bytes == meter.trace.peak_bytes


def test_real_steps_leave_no_gradient_on_the_batch():
    """Without a device the model itself is timed; the batch is put back as the model is."""
    stack, x = ms.BlockStack(2, 32, 2), torch.randn(1, 16, 32, requires_grad=True)
    ms.fit(stack, x, "1 GiB", loss=lambda output, batch: output.sum(), optimizer=None)
    assert x.grad is None


def test_a_model_that_follows_a_strategy_already_is_refused_at_once():
    model = ms.gpt2("tiny")
    with ms.apply(model, ms.FullCheckpoint()), pytest.raises(ValueError, match="follows a strategy already"):
        ms.fit(model, tokens(256), "1 GiB", **OPTIONS)
