"""megatier.stream of a folder or a model in RAM: plain training's numbers, and what it leaves as it was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from streamed_loops import TIERS, counted, loop, same, train_config
from tiny_runs import exactness_config, plain_model, random_groups
from transformers import AutoModelForCausalLM, PreTrainedModel

import megatier
from megatier.config.schema import TrainConfig
from megatier.errors import ConfigError, StreamedModelError


def test_loop_agrees_with_plain_training_in_fp32() -> None:
    """torch's AdamW has another order of operations; the first step's losses are equal to the last bit."""
    plain = plain_model(exactness_config("plain"))
    decayed = [p for p in plain.parameters() if p.dim() > 1]
    others = [p for p in plain.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    train = TrainConfig(batch=4, groups=2)
    options: dict[str, Any] = {"weight_decay": 0.1, "clip": 0.5, "compute_dtype": "fp32", "fused_loss": False}
    with megatier.stream(plain, tiers=TIERS, accumulation_steps=2, **options) as streamed:
        for step in range(1, 11):
            pairs = []
            for batch in random_groups(train, 160, step):
                losses = [model(**batch).loss / 2 for model in (plain, streamed.model)]
                for loss in losses:
                    loss.backward()
                pairs.append(tuple(loss.item() for loss in losses))
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()
            assert streamed.grad_norm() == pytest.approx(norm, rel=1e-6)
            assert all(a == pytest.approx(b, rel=1e-6) for a, b in pairs)
            assert step > 1 or all(a == b for a, b in pairs)
            optimizer.step()
            optimizer.zero_grad()
            streamed.optimizer.step()
        found = streamed.state_dict()
    assert all(torch.allclose(found[name], p, rtol=0, atol=1e-6) for name, p in plain.named_parameters())


def test_export_and_stream_of_the_folder_give_the_same_weights(tmp_path: Path) -> None:
    plain = plain_model(exactness_config("untied"))
    with megatier.stream(plain, tiers=TIERS, compute_dtype="fp32") as streamed:
        loop(streamed, train_config("untied", groups=1), 2112, last=1)
        streamed.export(tmp_path / "model")
        expected = streamed.state_dict()
    with megatier.stream(tmp_path / "model", tiers=TIERS) as streamed:
        assert same(streamed.state_dict(), expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert same(dict(loaded.named_parameters()), expected)


def test_stream_of_experts_in_parts_reads_and_writes_whole_parameters(tmp_path: Path) -> None:
    plain = plain_model(exactness_config("moe"))
    with megatier.stream(plain, tiers=TIERS, compute_dtype="fp32", expert_parts=3) as streamed:
        assert same(streamed.state_dict(), dict(plain.named_parameters()))
        loop(streamed, train_config("moe", groups=1), 160, last=1)
        expected = streamed.state_dict()
        assert not same(expected, dict(plain.named_parameters()))
        assert all(torch.equal(streamed.read(name), value) for name, value in expected.items())
        streamed.export(tmp_path / "model", dtype="fp32")
        streamed.save(tmp_path / "saved")
    with megatier.stream(tmp_path / "model", tiers=TIERS, compute_dtype="fp32", expert_parts=2) as streamed:
        assert same(streamed.state_dict(), expected)
    with megatier.stream(plain, tiers=TIERS, compute_dtype="fp32") as streamed:
        streamed.restore(tmp_path / "saved")
        assert same(streamed.state_dict(), expected)


def test_closed_model_is_refused(tmp_path: Path) -> None:
    plain = plain_model(exactness_config("tied"))
    with megatier.stream(plain, tiers=TIERS) as streamed:
        pass
    streamed.close()
    with pytest.raises(StreamedModelError, match="closed"):
        streamed.read("model.norm.weight")


def test_stream_of_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such model folder"):
        megatier.stream(str(tmp_path / "nothing"), tiers=TIERS)


def test_stream_leaves_the_model_it_was_given_as_it_was() -> None:
    plain: PreTrainedModel = plain_model(exactness_config("tied"))
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    with megatier.stream(plain, tiers=TIERS, lr=0.5) as streamed:
        loop(streamed, train_config("tied", groups=1), 160, last=1)
    assert same(dict(plain.named_parameters()), before)


def test_stream_without_a_backward_per_step_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="accumulation_steps is 0; it must be at least 1"):
        megatier.stream("nowhere", accumulation_steps=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learning_rate": 1e-3}, "has no argument learning_rate. Did you mean lr?"),
        ({"attn_implementation": "sdpa"}, "Did you mean attention?"),
        ({"acumulation_step": 2}, "Did you mean accumulation_steps?"),
        ({"ram": "8GiB"}, 'Did you mean tiers={"ram": ...}?'),
        ({"zero_stage": 3}, "has no argument zero_stage. It takes tiers, train, accumulation_steps, lr, "),
    ],
)
def test_stream_argument_that_it_does_not_have_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        megatier.stream("nowhere", **options)


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ({"vram": "8GiB"}, "unknown setting tiers.vram; did you mean ram?"),
        ({"ram": 64}, "tiers.ram is 64, and a number without a unit is bytes"),
        ("8GiB", "tiers is '8GiB'; it must be a TiersConfig or keys with values"),
    ],
)
def test_stream_tiers_that_are_no_section_are_refused_by_name(tiers: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        megatier.stream("nowhere", tiers=tiers)


def test_streamed_taken_for_an_engine_names_what_it_has_instead() -> None:
    with megatier.stream(plain_model(exactness_config("plain")), tiers=TIERS) as streamed:
        engine: Any = streamed
        with pytest.raises(StreamedModelError, match=r"call its \.model, as in streamed\.model"):
            engine(input_ids=torch.zeros(1, 4))
        with pytest.raises(AttributeError, match=r"no attribute 'backward'\. Use loss\.backward\(\) instead"):
            engine.backward(torch.ones(()))
        with pytest.raises(AttributeError, match=r"To train it by a trainer, put the mixin before"):
            engine.get_input_embeddings()


def test_streamed_step_tells_the_loss_that_its_forwards_gave() -> None:
    train = train_config("untied")
    with megatier.stream(plain_model(exactness_config("untied")), tiers=TIERS, accumulation_steps=2) as streamed:
        for counts in (False, True):
            groups = random_groups(train, 2112, 1)
            options = {"num_items_in_batch": counted(groups)} if counts else {}
            losses = []
            for batch in groups:
                losses.append(streamed.model(**batch, **options).loss)
                losses[-1].backward()
            streamed.optimizer.step()
            assert streamed.last is not None
            whole = sum(loss.item() for loss in losses)
            assert streamed.last.loss == pytest.approx(whole if counts else whole / 2, rel=1e-6)


def test_streamed_model_moves_to_where_it_is_and_nowhere_else() -> None:
    with megatier.stream(plain_model(exactness_config("untied")), tiers=TIERS) as streamed:
        move: Any = streamed.model.to
        assert move("cpu") is move(torch.bfloat16) is streamed.model
        for place in ("cuda", torch.float16, torch.device("meta")):
            with pytest.raises(StreamedModelError, match="stay on megatier's tiers and compute on cpu"):
                move(place)


def test_streamed_gradients_that_torch_would_clip_or_unscale_are_refused_by_name() -> None:
    model = plain_model(exactness_config("untied"))
    with megatier.stream(model, tiers=TIERS, clip=0.5) as streamed:
        for batch in random_groups(train_config("untied", groups=1), 2112, 1):
            streamed.model(**batch).loss.backward()
        with pytest.raises(StreamedModelError, match="would find none: set streamed"):
            torch.nn.utils.clip_grad_norm_(streamed.model.parameters(), 0.5)
        with pytest.raises(StreamedModelError, match="A GradScaler would scale the norm as well"):
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(()))
            scaler.step(streamed.optimizer)
        streamed.model.zero_grad()
        assert streamed.steps == 0


def test_zero_grad_of_a_module_around_a_streamed_one_has_nothing_to_clear() -> None:
    with megatier.stream(plain_model(exactness_config("untied")), tiers=TIERS) as streamed:
        torch.nn.Sequential(streamed.model).zero_grad()
        with pytest.raises(StreamedModelError, match=r"never in \.grad"):
            _ = next(streamed.model.parameters()).grad


def test_stream_takes_a_torch_dtype_and_a_dict_of_tiers() -> None:
    tiers = {"device": "cpu", "gpu": "8MiB", "ram": "8MiB", "update_threads": 2, "io_threads": 2}
    plain = plain_model(exactness_config("plain"))
    with megatier.stream(plain, tiers=tiers, compute_dtype=torch.float32) as streamed:
        assert streamed.model.dtype is torch.float32
    with megatier.stream(plain, tiers=tiers, moments="bf16", seed=2) as streamed:
        session = streamed._session
        elements = sum(unit.layout.num_elements for unit in session.own_units)
        assert sum(session.placement.state_bytes.values()) == 8 * elements
    with megatier.stream(plain, tiers=tiers, optimizer="muon", momentum=0.9) as streamed:
        layers = [unit.layout for unit in streamed._session.own_units if unit.is_layer]
        assert {layout.schema.bytes_per_parameter for layout in layers} == {8}
        assert [group["momentum"] for group in streamed.optimizer.param_groups] == [0.9, 0.9]
    for wrong in ({"moments": "fp16"}, {"optimizer": "sgd"}, {"momentum": 1.0}, {"seed": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            megatier.stream(plain, tiers=tiers, **wrong)
    with pytest.raises(ConfigError, match=r"compute_dtype is torch\.float16; it must be bf16 or fp32"):
        megatier.stream(plain, tiers=tiers, compute_dtype=torch.float16)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (None, {}, "model is None; it must be a folder, a hub id, or a model of transformers"),
        ("", {}, "model is ''"),
        ("org/x", {"lr": "1e-4"}, "lr is '1e-4'; it must be a finite number"),
        ("org/x", {"clip": "1"}, "clip is '1'"),
        ("org/x", {"betas": 0.9}, "betas is 0.9; it must be two numbers"),
        ("org/x", {"betas": ("0.9", 0.99)}, "one of betas ('0.9', 0.99) is '0.9'"),
    ],
)
def test_stream_of_no_model_or_with_text_for_a_number_is_refused(
    model: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        megatier.stream(model, **options)
