"""What lies between a model's head and its loss, found without weights; where it is too much, the loss is not fused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gradients import attention_of, far, padded_batch, plain_gradients, streamed_gradients
from tiny_models import BASE, FAMILIES, known_config, tiny_config
from tiny_runs import PLACES, opened, plain_model
from tiny_vision import VISION_FAMILIES, vision_config
from torch import Tensor, nn
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

import megatier
from megatier.config.schema import TiersConfig, TrainConfig
from megatier.engine.head import can_fuse, check_fusable
from megatier.errors import UnsupportedModelError
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.export import export

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TINY: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {**BASE, "lru_width": 64, "attention_window_size": 8, "logits_soft_cap": 2.0},
    "inkling2_text": {
        **BASE,
        "moe_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "unpadded_vocab_size": 150,
    },
    "xlstm": {
        "vocab_size": 160,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_heads": 4,
        "output_logit_soft_cap": 2.0,
    },
    "mistral_large4": {"text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 2}},
    "rembert": {**BASE, "is_decoder": True, "input_embedding_size": 16, "output_embedding_size": 32, **NO_DROPOUT},
    "bert": {**BASE, "is_decoder": True, "tie_word_embeddings": False, **NO_DROPOUT},
    "mamba": {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "phi": BASE,
    "gptj": {**BASE, "n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8, "tie_word_embeddings": False},
}


def config_of(model_type: str) -> PretrainedConfig:
    return known_config(model_type, **TINY[model_type])


def reason_of(model: PreTrainedModel) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        check_fusable(model, find_units(model))
    return str(caught.value)


# ---- models of transformers


@pytest.mark.parametrize("family", [*FAMILIES, *VISION_FAMILIES])
def test_loss_of_a_proven_family_is_fused(family: str) -> None:
    model = build_skeleton(vision_config(family) if family in VISION_FAMILIES else tiny_config(family), "sdpa")
    before = model.config.to_dict()
    state, loss = torch.random.get_rng_state(), model.loss_function
    check_fusable(model, find_units(model))
    assert model.config.to_dict() == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.loss_function is loss
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []


@pytest.mark.parametrize("model_type", ["mamba", "phi", "gptj"])
def test_loss_of_a_head_with_a_bias_or_a_cast_is_fused(model_type: str) -> None:
    model = build_skeleton(config_of(model_type), "sdpa")
    check_fusable(model, find_units(model))


MORE = "does more to the logits than to scale or cap them once"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("recurrent_gemma", MORE),
        ("mistral_large4", MORE),
        ("xlstm", MORE),
        # Before transformers 5.24 its head was as wide as its padded vocabulary, and the forward cut the logits.
        ("inkling2_text", f"({MORE}|hands the loss function 150 numbers for a token, but the head gave 160)"),
        ("rembert", "the output embedding of RemBertForCausalLM is not a unit of its own"),
        ("bert", "the output embedding of BertLMHeadModel is not a unit of its own"),
    ],
)
def test_model_that_does_more_between_head_and_loss_is_named_with_the_reason(model_type: str, reason: str) -> None:
    model = build_skeleton(config_of(model_type), "sdpa")
    with pytest.warns(UserWarning, match=f"the loss is not fused with the head, .* {reason}"):
        assert not can_fuse(model, find_units(model))


def test_chameleon_which_masks_image_tokens_is_not_fused() -> None:
    names = {f"IMGIMG{letter}": token for token, letter in enumerate("ABCDEFGH", start=100)}
    config = ChameleonConfig(vocabulary_map={"<image>": 99, **names}, num_hidden_layers=2)
    with torch.device("meta"):
        model = ChameleonForConditionalGeneration(config)
    assert MORE in reason_of(model)


# ---- what a forward may do in between


class Between(LlamaForCausalLM):
    """Llama with something between head and loss."""

    change: Callable[[Tensor], Tensor] = staticmethod(lambda logits: logits)
    add: Callable[[Any, Tensor, Tensor, Tensor], Tensor] = staticmethod(lambda _, loss, __, ___: loss)
    loss_options: Mapping[str, Any] = {}

    def forward(self, input_ids: Tensor, labels: Tensor, **options: Any) -> CausalLMOutputWithPast:
        logits = self.change(self.lm_head(self.model(input_ids, **options)[0]))
        loss = self.loss_function(logits, labels, self.config.vocab_size, **self.loss_options)
        return CausalLMOutputWithPast(loss=self.add(self, loss, logits, labels))


def between(change: Callable[[Tensor], Tensor] | None = None, **settings: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model = Between(tiny_config("llama"))  # type: ignore[arg-type]
    for name, value in {"change": change or model.change, **settings}.items():
        setattr(model, name, value)
    return model


def mask(logits: Tensor) -> Tensor:
    logits[..., 7] = torch.finfo(logits.dtype).min
    return logits


SCALES = [lambda x: x * 0.25, lambda x: -x.float() / 3, lambda x: x.flatten(0, 1), lambda x: x.contiguous().double()]
OTHERS: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (lambda x: torch.tanh(x / 50) * 50, MORE),
    (lambda x: x.clamp(max=100), MORE),
    (lambda x: x + 0.1, MORE),
    (lambda x: x.roll(1, -1), MORE),
    (lambda x: x - x.mean(-1, keepdim=True), MORE),
    (lambda x: x * torch.tensor([[[1.0], [1.0], [2.0]]]), MORE),
    (mask, MORE),
    (lambda x: x[..., :150], "hands the loss function 150 numbers for a token, but the head gave 160"),
    (lambda x: x[:, :-1], "hands only the logits of some tokens"),
    (lambda x: x.view(-1, 160), "cannot be asked without its decoder: shape '[-1, 160]' is invalid"),
]


@pytest.mark.parametrize("change", SCALES)
def test_forward_that_scales_logits_is_fused(change: Callable[[Tensor], Tensor]) -> None:
    model = between(change)
    check_fusable(model, find_units(model))


@pytest.mark.parametrize(("change", "reason"), OTHERS)
def test_forward_that_does_anything_else_to_logits_is_not_fused(
    change: Callable[[Tensor], Tensor], reason: str
) -> None:
    assert reason in reason_of(between(change))


def test_forward_with_another_loss_of_the_logits_is_not_fused() -> None:
    model = between(add=lambda _, loss, logits, __: loss + 1e-4 * logits.logsumexp(-1).square().mean())
    assert "adds a loss of the logits" in reason_of(model)
    model = between(add=lambda model, loss, logits, labels: loss + model.loss_function(logits, labels, 160))
    assert "calls the head 1 times, and the loss function 2 times" in reason_of(model)


def test_loss_function_of_other_labels_or_of_its_own_is_not_fused() -> None:
    assert "leaves labels other than -100 out of its loss" in reason_of(between(loss_options={"ignore_index": 0}))
    model = between()
    model.loss_function = ForMaskedLMLoss
    assert "has a loss function of its own, ForMaskedLMLoss" in reason_of(model)


def test_head_that_is_no_plain_product_is_not_fused() -> None:
    class Normed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x / x.norm(dim=-1, keepdim=True))

    model = between()
    model.lm_head.__class__ = Normed
    assert "is no plain product but a Normed" in reason_of(model)


# ---- training


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "rembert", "bert"])
def test_model_whose_loss_cannot_be_fused_trains_as_the_plain_one(model_type: str, tmp_path: Path) -> None:
    config = config_of(model_type)
    loss, expected, source = plain_gradients(config, attention_of(config))
    with pytest.warns(UserWarning, match="the loss is not fused with the head"):
        found_loss, found = streamed_gradients(config, tmp_path, source, fused_loss=True)
    assert found_loss == loss
    assert [name for name, grad in expected.items() if not torch.equal(found[name], grad)] == []


@pytest.mark.parametrize("model_type", ["mamba", "phi", "gptj"])
def test_head_with_a_bias_or_a_cast_has_nearly_the_plain_gradients_by_a_fused_loss(
    model_type: str, tmp_path: Path
) -> None:
    config = config_of(model_type)
    loss, expected, source = plain_gradients(config, attention_of(config))
    found_loss, found = streamed_gradients(config, tmp_path, source, fused_loss=True)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert far(found, expected) == {}
    for fused in (True, False):
        found_loss, found = streamed_gradients(config, tmp_path, source, fused_loss=fused, compute_dtype="bf16")
        assert found_loss == pytest.approx(loss, rel=1e-2)
        assert far(found, expected, 0.2) == {}


def test_stream_of_a_model_whose_loss_cannot_be_fused_gives_logits() -> None:
    plain = plain_model(config_of("bert"))
    tiers = TiersConfig(device="cpu", gpu=64 << 20, ram=64 << 20)
    with (
        pytest.warns(UserWarning, match="the loss is not fused with the head"),
        megatier.stream(plain, tiers=tiers, compute_dtype="fp32") as streamed,
        torch.no_grad(),
    ):
        assert streamed.has_logits
        ids = torch.arange(8)[None]
        assert torch.equal(streamed.model(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)


def test_export_after_a_fused_loss_has_the_soft_cap_in_its_config(tmp_path: Path) -> None:
    config, train = tiny_config("gemma2"), TrainConfig(steps=1, batch=1)
    with opened(config, tmp_path, PLACES["gpu"], train, fused_loss=True) as session:
        session.engine.train_step(1, 0.0, [padded_batch()])
        folder = tmp_path / "model"
        export(folder, session.model, session.own_units, session.read_master, torch.float32, 10**9)
    assert json.loads((folder / "config.json").read_text()).get("final_logit_softcapping", 30.0) == 30.0
