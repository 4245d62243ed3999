"""A model in RAM is trained as it is, whatever was changed on it, or refused by the name of what was changed."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_models import (
    CHANGES,
    FAMILIES,
    OPTIONS,
    SMALL,
    TIERS,
    batch_of,
    check_same_or_refused,
    make,
    plain_steps,
    some_changes,
    streamed_steps,
)
from model_changes import Change
from small_optimizers import close_optimizer
from tiny_models import tiny_config
from tiny_runs import plain_model
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import megatier
from megatier.errors import ConfigError, UnsupportedModelError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # PEFT asks by a name that goes
SEEDS = 16
SLOW_SEEDS = 400


@pytest.mark.parametrize("number", range(len(CHANGES)), ids=[change.name for change in CHANGES])
def test_changed_model_is_trained_as_it_is_or_refused_by_name(number: int) -> None:
    change = CHANGES[number]
    family = list(FAMILIES)[number % len(FAMILIES)]
    model = make(family)
    change.apply(model)
    check_same_or_refused(model, change.named)


def check_seed(seed: int) -> None:
    family, changes = some_changes(seed)
    model = make(family, seed)
    made: list[Change] = []
    for change in changes:
        change.apply(model)
        made.append(change)
    check_same_or_refused(model, [name for change in made for name in change.named])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_model_with_several_changes_is_trained_as_it_is_or_refused_by_name(seed: int) -> None:
    check_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS, SLOW_SEEDS))
def test_model_with_many_changes_is_trained_as_it_is_or_refused_by_name(seed: int) -> None:
    check_seed(seed)


def test_untied_head_is_in_state_dict_and_in_an_export_that_loads_untied(tmp_path: Path) -> None:
    model = make("gemma3")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.5)
    with megatier.stream(model, tiers=TIERS, **OPTIONS) as streamed:
        assert torch.equal(streamed.state_dict()["lm_head.weight"], model.lm_head.weight)
        streamed.export(tmp_path / "out", dtype="fp32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert loaded.lm_head.weight is not loaded.get_parameter("model.embed_tokens.weight")
    assert model.config.tie_word_embeddings


def own_forward(model: Any) -> None:
    model.lm_head.forward = types.MethodType(lambda self, x: nn.Linear.forward(self, x) * 2, model.lm_head)


def own_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda _, __, output: output.clamp(max=0.1))


@pytest.mark.parametrize("change", [own_forward, own_hook])
def test_head_with_a_forward_or_a_hook_of_its_own_is_not_fused_with_the_loss(change: Callable[[Any], None]) -> None:
    model = make("llama")
    change(model)
    with pytest.warns(UserWarning, match="is no plain product|hooks on the output embedding"):
        losses, _ = streamed_steps(model, fused_loss=True)
    assert losses == plain_steps(model)[0]


def test_hooks_of_a_users_object_note_what_they_see_there() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def note(self, _: Any, __: Any, output: Any) -> None:
            self.sizes.append(output.shape[-1])

    model, recorder = make("llama"), Recorder()
    for module in (model.model.layers[0], model.model.layers[1].mlp):
        module.register_forward_hook(recorder.note)
    streamed_steps(model)
    assert recorder.sizes == [32] * 4


def test_attention_of_a_model_in_ram_is_its_own_unless_another_one_is_asked_for() -> None:
    model = plain_model(tiny_config("llama", **SMALL), "eager")
    asked: Any
    for asked, expected in ((None, "eager"), ("sdpa", "sdpa")):
        with megatier.stream(model, tiers=TIERS, attention=asked, **OPTIONS) as streamed:
            assert streamed.model.config._attn_implementation == expected
            assert streamed.model.model.layers[0].self_attn.config._attn_implementation == expected
    assert model.config._attn_implementation == "eager"
    model.config._attn_implementation_internal = "my_own"
    with pytest.raises(ConfigError, match="attention is 'my_own'"):
        streamed_steps(model)


def test_model_whose_hook_finds_the_model_among_globals_is_refused() -> None:
    model = make("llama")
    space = {"norm": model.model.norm}
    exec("def hook(module, _, output): return output * norm.weight.mean()", space)
    model.model.layers[0].register_forward_hook(space["hook"])
    with pytest.raises(UnsupportedModelError, match=r"a hook of model\.layers\.0 \(hook\) holds model\.norm"):
        streamed_steps(model)


def test_model_in_bf16_with_other_modules_and_buffers_is_taken_in_bf16() -> None:
    model = make("llama").bfloat16()
    model.model.layers[1].mlp = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
    model.register_buffer("tick", torch.zeros(1))
    with megatier.stream(model, tiers=TIERS, **{**OPTIONS, "compute_dtype": "bf16"}) as streamed:
        torch.manual_seed(0)
        loss = streamed.model(**batch_of(model, 0)).loss
        found = {name: buffer.dtype for name, buffer in streamed.model.named_buffers()}
    torch.manual_seed(0)
    assert loss.item() == model(**batch_of(model, 0)).loss.item()
    assert found == {name: buffer.dtype for name, buffer in model.named_buffers()}


def peft_model(**settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "up_proj"], **settings)
    model = peft.get_peft_model(make("llama"), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
    return model.train()


def test_peft_model_is_trained_with_the_scaling_and_dropout_that_its_layers_have() -> None:
    model = peft_model(lora_dropout=0.3)
    for module in model.modules():
        if hasattr(module, "lora_dropout") and module is not model:
            module.scaling["default"] = 3.0
            module.lora_dropout["default"].p = 0.0
    model.base_model.model.model.layers[0].register_forward_hook(lambda _, __, output: output * 1.5)
    found, weights = streamed_steps(model)
    losses, plain = plain_steps(model.base_model.model)
    assert found == losses
    assert [name for name, value in weights.items() if not torch.equal(plain[name], value)] == []


def test_hook_or_parameter_on_a_wrapper_around_the_model_is_refused() -> None:
    hooked = peft_model()
    hooked.register_forward_hook(lambda _, __, output: output)
    with pytest.raises(UnsupportedModelError, match="PeftModelForCausalLM is around the model"):
        streamed_steps(hooked)
    trained = peft_model()
    trained.base_model.gain = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedModelError, match=r"parameter base_model\.gain lies around"):
        streamed_steps(trained)


@pytest.mark.filterwarnings("default")  # of the Trainer
def test_trainer_that_is_given_a_model_in_ram_trains_it_as_it_is(tmp_path: Path) -> None:
    trainers = pytest.importorskip("megatier.integrations.transformers_trainer")
    model = make("llama")
    model.model.layers[0].register_forward_hook(lambda _, __, output: output * 1.5)
    model.model.norm.variance_epsilon = 0.5
    batches = [batch_of(model, step) for step in range(4)]
    rows = [{name: value[row] for name, value in batch.items()} for batch in batches for row in range(2)]
    args = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=3,
        max_grad_norm=0.0,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    options = {"compute_dtype": "fp32", "compile": False}
    given: dict[str, Any] = {"args": args, "train_dataset": rows}
    streaming = trainers.MegatierTrainer(model, tiers=megatier.TiersConfig(**TIERS), stream_kwargs=options, **given)
    streaming.train()
    streaming.streamed.close()
    plain = Trainer(model, **given)
    plain.optimizer_cls_and_kwargs = (megatier.TieredAdamW, {"lr": 1e-2, "weight_decay": 0.0, "ram": "64MiB"})
    plain.train()
    close_optimizer(plain)
    logs = [[entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (streaming, plain)]
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
