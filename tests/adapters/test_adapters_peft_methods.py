"""PEFT's methods at a streamed model with adapters: each is right, or refused by name with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_adapters import STACKS, peft
from tiny_models import tiny_config
from tiny_runs import MIB, plain_model
from torch import nn
from transformers.integrations.peft import PeftAdapterMixin

import megatier
from megatier.adapters.peft_methods import _ALLOWED, _LAYER_METHODS, _MODEL_METHODS, METHODS, refuse_unknown
from megatier.config.schema import TiersConfig
from megatier.errors import ConfigError, StreamedModelError
from megatier.integrations.streamed import Streamed
from megatier.models.decoder import is_adapter

TIERS = TiersConfig(device="cpu", gpu=8 * MIB, ram=8 * MIB, update_threads=2, io_threads=2)
OPTIONS: dict[str, Any] = {"tiers": TIERS, "compute_dtype": "fp32", "fused_loss": False}
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # PEFT asks by a name that goes
LORA = peft.tuners.lora
LAYERS = [LORA.Linear, LORA.Embedding, LORA.layer.ParamWrapper, peft.utils.other.ModulesToSaveWrapper]
OF_FORWARDS = frozenset(
    (
        *("adapter_state_dict", "adapter_state_dict_load_map", "check_module", "check_set_adapter"),
        *("get_base_layer", "get_base_weight", "get_delta_factors", "get_delta_weight", "get_param"),
        *("resolve_lora_variant", "scale_layer", "set_scale", "supports_lora_conversion", "unmerge", "unscale_layer"),
    )
)
"""Methods of PEFT's layers that look at them, scale what they add, or belong to their forwards."""


def given(family: str = "llama", **settings: Any) -> Any:
    """A `PeftModel` in RAM."""
    settings = {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["model.norm"], **settings}
    return peft.get_peft_model(
        plain_model(tiny_config(family)), peft.LoraConfig(task_type="CAUSAL_LM", r=4, **settings)
    )


@pytest.fixture(scope="module")
def plain() -> Any:
    return given()


@pytest.fixture(scope="module")
def streamed(plain: Any) -> Iterator[Streamed]:
    with megatier.stream(plain, **OPTIONS) as streamed:
        yield streamed


def around(streamed: Streamed) -> Any:
    """The `PeftModel` that trainers get."""
    from megatier.adapters.peft_model import StreamedPeftModel  # needs PEFT

    return StreamedPeftModel(streamed.model)


def public(kind: type) -> set[str]:
    """The public names of a class that torch's modules do not have."""
    return {name for name in dir(kind) if not name.startswith("_")} - {*dir(nn.Module)}


@pytest.mark.parametrize("kind", [peft.PeftModel, LORA.LoraModel, PeftAdapterMixin])
def test_every_public_method_of_peft_is_in_the_table(kind: type) -> None:
    assert public(kind) - METHODS.keys() == set()
    if kind is PeftAdapterMixin:
        assert public(kind) - {*_MODEL_METHODS, "active_adapters"} == set()


@pytest.mark.parametrize("kind", LAYERS)
def test_every_public_method_of_the_layers_of_peft_is_known(kind: type) -> None:
    methods = {name for name in public(kind) if callable(getattr(kind, name))}
    assert methods - _LAYER_METHODS.keys() - OF_FORWARDS == set()


@pytest.mark.parametrize("name", sorted(name for name, remedy in METHODS.items() if remedy is not _ALLOWED))
def test_refused_method_of_peft_names_itself_and_the_remedy(name: str, streamed: Streamed) -> None:
    model = around(streamed)
    holders = [holder for holder in (model, model.base_model) if hasattr(type(holder), name)]
    for holder in [*holders, *([streamed.model] if name in _MODEL_METHODS else [])]:
        if name in ("add_adapter", "load_adapter") and holder is model:
            continue  # says more, to TRL
        # Whatever it is given: it is refused before it looks at that.
        for arguments in ((), ("default",), (["default"], "folder")):
            with pytest.raises(StreamedModelError, match=f"^{name} would .*tiers\\. \\S+"):
                getattr(holder, name)(*arguments)


def test_methods_of_adapters_refuse_another_one_and_take_their_own(streamed: Streamed) -> None:
    for holder in (around(streamed), around(streamed).base_model):
        holder.set_adapter("default")
        holder.set_adapter(["default"])
        with pytest.raises(ConfigError, match="has one adapter, and another one, 'other'"):
            holder.set_adapter("other")
    for ask in (around(streamed).add_adapter, around(streamed).load_adapter):
        with pytest.raises(ConfigError, match="has one adapter, and another one, 'other'"):
            ask("other", None)


@pytest.mark.gpu
def test_methods_of_peft_on_a_gpu_are_right_or_refused() -> None:
    ids = torch.randint(3, 160, (2, 8), generator=torch.Generator().manual_seed(0)).cuda()
    plain = given().cuda().eval()
    with megatier.stream(plain, **{**OPTIONS, "tiers": replace(TIERS, device="cuda"), "compile": False}) as streamed:
        model = around(streamed).eval()
        assert model.get_nb_trainable_parameters() == plain.get_nb_trainable_parameters()
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)
            with model.disable_adapter(), plain.disable_adapter():
                torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)
        assert torch.equal(model.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3))
        for name in ("merge_adapter", "merge_and_unload", "unload"):
            with pytest.raises(StreamedModelError, match=f"^{name} would "):
                getattr(model, name)()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        streamed.optimizer.step()
        plain.get_base_model().load_state_dict(streamed.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def test_right_methods_of_peft_give_what_they_give_of_the_given_model(
    plain: Any, streamed: Streamed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = around(streamed)
    assert model.get_layer_status() == plain.get_layer_status()
    found, expected = vars(model.get_model_status()), vars(plain.get_model_status())
    assert {key for key in found if found[key] != expected[key]} == {"adapter_model_type"}
    assert model.get_nb_trainable_parameters() == plain.get_nb_trainable_parameters()
    for each in (model, plain):
        each.print_trainable_parameters()
        each.create_or_update_model_card(tmp_path)
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    for name in ("active_adapter", "active_adapters", "base_model_torch_dtype", "has_active_enabled_adapter"):
        assert getattr(model, name) == getattr(plain, name), name
    for name in ("active_peft_config", "modules_to_save", "peft_config"):
        assert getattr(model, name) == getattr(plain, name), name
    assert model.supports_lora_conversion() == plain.supports_lora_conversion()
    assert model.get_base_model() is streamed.model
    assert streamed.model.active_adapters() == ["default"]

    tuner, other = model.base_model, plain.base_model
    assert isinstance(tuner, LORA.LoraModel)
    for name in ("prefix", "tuner_layer_cls", "target_module_mapping", "targeted_module_names"):
        assert getattr(tuner, name) == getattr(other, name), name
    assert tuner.get_model_config(tuner.model) == streamed.model.config.to_dict()
    with pytest.warns(UserWarning, match="Already unmerged"):
        tuner.unmerge_adapter()

    ids = torch.randint(3, 160, (2, 8), generator=torch.Generator().manual_seed(0))
    for each in (model, tuner):
        with torch.no_grad():
            assert torch.equal(each(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert torch.equal(model.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3))
    with model.disable_adapter(), plain.disable_adapter():
        assert model.has_active_enabled_adapter == plain.has_active_enabled_adapter
        assert [status.enabled for status in model.get_layer_status()] == [
            status.enabled for status in plain.get_layer_status()
        ]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"use_dora": True}),
        ("qwen3_moe", {"target_modules": ["q_proj"], "modules_to_save": None, "target_parameters": list(STACKS)}),
    ],
)
def test_parameters_of_a_streamed_peft_model_have_the_names_of_the_given_one(
    family: str, settings: dict[str, Any]
) -> None:
    plain = given(family, **settings)
    with megatier.stream(plain, **OPTIONS) as streamed:
        model = around(streamed)
        expected = [(name, value.shape, value.requires_grad) for name, value in plain.named_parameters()]
        assert [(name, value.shape, value.requires_grad) for name, value in model.named_parameters()] == expected
        assert model.state_dict(keep_vars=True).keys() == plain.state_dict().keys()
        assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
        assert sorted(model.targeted_parameter_names) == sorted(plain.targeted_parameter_names)
        inside = {f"base_model.model.{name}" for name in streamed.state_dict()}
        assert inside == plain.state_dict().keys()
        with pytest.raises(StreamedModelError, match=r"Streamed\.state_dict\(\)"):
            model.state_dict()


def test_refused_methods_of_layers_leave_the_adapters_as_they_are(streamed: Streamed) -> None:
    ids = torch.randint(3, 160, (2, 8), generator=torch.Generator().manual_seed(0))

    def logits() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = streamed.model(input_ids=ids).logits
            return found

    before = logits()
    refused = set()
    for module in streamed.model.modules():
        for name in _LAYER_METHODS:
            if is_adapter(module) and hasattr(module, name):
                refused.add(name)
                with pytest.raises(StreamedModelError, match=f"^{name} would "):
                    getattr(module, name)("default")
    assert {*_LAYER_METHODS} - refused <= {"init_modules", "unload_and_optionally_merge_module"}
    assert torch.equal(logits(), before)


def test_method_that_a_later_version_brings_is_refused() -> None:
    class Later(peft.PeftModel):  # type: ignore[misc]
        def rewrite_adapter(self) -> None:
            """Change weights in some way."""

    class Ours(Later):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    refuse_unknown(Ours)
    with pytest.raises(StreamedModelError, match="rewrite_adapter would change"):
        Ours().rewrite_adapter()
