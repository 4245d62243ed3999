"""What a user calls past a streamed model's own forward, and changes on the model after it was opened."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import BASE, known_config, tiny_config
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import megatier
from megatier.errors import AbsentWeightError, MegatierError, StreamedModelError
from megatier.integrations.streamed import Streamed

TIERS = {"device": "cpu", "gpu": 4 << 20, "ram": 32 << 20, "update_threads": 1, "io_threads": 1}
OUTSIDE = "was called outside of the model's forward.*one_forward"


def tiny(family: str = "llama", **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config(family, num_hidden_layers=2, **settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train()
    return model


def streamed(model: PreTrainedModel, *, fused: bool = True) -> Streamed:
    tiers = {**TIERS, "device": torch.get_default_device().type}
    options: dict[str, Any] = {"compute_dtype": "fp32", "clip": None, "lr": 1e-2, "weight_decay": 0.0}
    return megatier.stream(model, tiers=tiers, fused_loss=fused, compile=False, **options)


def ids(seed: int = 0, tokens: int = 12) -> Tensor:
    found = torch.randint(3, 160, (2, tokens), generator=torch.Generator().manual_seed(seed), device="cpu")
    return found.to(torch.get_default_device())


def step(opened: Streamed) -> None:
    opened.model(input_ids=ids(), labels=ids()).loss.backward()
    opened.optimizer.step()


def plain_norm(model: PreTrainedModel, loss: Tensor) -> float:
    model.zero_grad()
    loss.backward()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()


# ---------------------------------------------------------------------- modules that are called by themselves


def hidden() -> Tensor:
    found = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(5), device="cpu")
    return found.to(torch.get_default_device())


def run_layer(model: Any) -> Any:
    tables = model.model.rotary_emb(hidden(), torch.arange(3)[None])
    return model.model.layers[1](hidden(), position_embeddings=tables)


CALLS: dict[str, Callable[[Any], Any]] = {
    "embedding": lambda model: model.get_input_embeddings()(ids()),
    "head": lambda model: model.lm_head(hidden()),
    "norm": lambda model: model.model.norm(hidden()),
    "layer": run_layer,
    "decoder": lambda model: model.model(ids(), use_cache=False).last_hidden_state,
}


@pytest.mark.parametrize("fused", [True, False])
def test_module_called_by_itself_has_the_weights_of_the_last_step_and_disturbs_none(fused: bool) -> None:
    plain = tiny()
    with streamed(tiny(), fused=fused) as opened, streamed(tiny(), fused=fused) as other:
        for _ in range(2):
            for call in CALLS.values():
                expected = call(plain).detach()
                assert torch.equal(call(opened.model).detach(), expected)
                with torch.no_grad():
                    assert torch.equal(call(opened.model), expected)

            # Between the forward and its backward too.
            loss = opened.model(input_ids=ids(), labels=ids()).loss
            assert torch.equal(CALLS["embedding"](opened.model).detach(), CALLS["embedding"](plain).detach())
            loss.backward()
            opened.optimizer.step()
            step(other)
            plain.load_state_dict(opened.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(*(x.state_dict().values() for x in (opened, other)), strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_backward_through_a_module_called_by_itself_is_refused(name: str) -> None:
    with streamed(tiny()) as opened:
        result = CALLS[name](opened.model)
        with pytest.raises(StreamedModelError, match=OUTSIDE):
            result.sum().backward()
        step(opened)


@pytest.mark.gpu
def test_modules_called_by_themselves_on_a_gpu_are_right_or_refused() -> None:
    with torch.device("cuda"):
        test_module_called_by_itself_has_the_weights_of_the_last_step_and_disturbs_none(fused=False)
        test_module_called_by_itself_has_the_weights_of_the_last_step_and_disturbs_none(fused=True)
        for name in CALLS:
            test_backward_through_a_module_called_by_itself_is_refused(name)
        test_weight_that_is_computed_with_by_itself_is_refused_by_name()


def test_rotary_tables_without_weights_are_called_by_themselves() -> None:
    model = tiny()
    with streamed(model) as opened:
        step(opened)
        found, expected = (
            m.model.rotary_emb(torch.zeros(1, 3, 64), torch.arange(3)[None]) for m in (opened.model, model)
        )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_weight_that_is_computed_with_by_itself_is_refused_by_name() -> None:
    with streamed(tiny()) as opened:
        step(opened)
        with pytest.raises(AbsentWeightError, match=r"lm_head\.weight.*Streamed\.read"):
            functional.linear(hidden(), opened.model.lm_head.weight)


@pytest.mark.parametrize("fused", [True, False])
def test_modules_called_in_one_forward_have_the_weights_of_now(fused: bool) -> None:
    model = tiny()
    with streamed(model, fused=fused) as opened:
        step(opened)
        plain = copy.deepcopy(model)
        plain.load_state_dict({name: tensor.clone() for name, tensor in opened.state_dict().items()}, strict=False)
        with torch.no_grad(), opened.one_forward("decoder and head"):
            found = opened.model.lm_head(opened.model.model(ids()).last_hidden_state)
        with torch.no_grad():
            assert torch.equal(found, plain(ids()).logits)

    # In a step of its own: all steps use their units in the order of the first one.
    with streamed(model, fused=fused) as opened:
        with opened.one_forward():
            loss = opened.model.lm_head(opened.model.model(ids()).last_hidden_state).logsumexp(-1).mean()
        loss.backward()
        expected = model(ids()).logits.logsumexp(-1).mean()
        assert loss.item() == expected.item()
        assert opened.grad_norm() == pytest.approx(plain_norm(model, expected), rel=1e-6)
        opened.optimizer.step()


@pytest.mark.parametrize("fused", [True, False])
def test_soft_prompt_in_one_forward_has_the_gradient_of_the_plain_model(fused: bool) -> None:
    prompt = nn.Parameter(torch.full((1, 3, 64), 0.1))

    def loss(model: Any) -> Tensor:
        rows = torch.cat([prompt.expand(2, -1, -1), model.get_input_embeddings()(ids())], 1)
        labels = torch.cat([torch.full((2, 3), -100), ids()], 1)
        found: Tensor = model(inputs_embeds=rows, labels=labels).loss
        return found

    model = tiny()
    norm = plain_norm(model, loss(model))
    expected, prompt.grad = prompt.grad, None
    with streamed(tiny(), fused=fused) as opened:
        with opened.one_forward():
            found = loss(opened.model)
        found.backward()
        assert opened.grad_norm() == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close(prompt.grad, expected)


PREFIXED: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "bloom": {"hidden_dropout": 0.0, "attention_dropout": 0.0, "n_layer": 2, "n_head": 4},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "mamba": {"state_size": 8},
}
"""Families that hand a cache on by different names and places."""


def name_of_cache(model: PreTrainedModel) -> str:
    """The argument by which a model takes its cache, which depends on the version of transformers."""
    known = inspect.signature(type(model).forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in known)


@pytest.mark.parametrize("family", PREFIXED)
def test_prefix_is_refused_where_gradients_are_taken_and_counts_where_none_are(family: str) -> None:
    torch.manual_seed(0)
    base = {"vocab_size": BASE["vocab_size"]} if family == "gpt2" else BASE
    plain = AutoModelForCausalLM.from_config(
        known_config(family, **{**base, "num_hidden_layers": 2, **PREFIXED[family]})
    )
    plain.eval()
    name = name_of_cache(plain)

    def prefix() -> Any:
        with torch.no_grad():
            return plain(ids(1), use_cache=True)[name]

    layers = tuple((torch.ones(2, 4, 3, 16), torch.ones(2, 4, 3, 16)) for _ in range(2))
    with streamed(plain, fused=False) as opened:
        model = opened.model.eval()
        for given in (prefix(), DynamicCache(), [prefix()], {"a": (prefix(),)}, layers):
            with pytest.raises(StreamedModelError, match=f"^{name} of the forward is a cache"):
                model(input_ids=ids(), labels=ids(), **{name: given})
        with torch.no_grad():
            found = model(ids(), **{name: prefix()}).logits
            torch.testing.assert_close(found, plain(ids(), **{name: prefix()}).logits, rtol=1e-5, atol=1e-5)
        step(opened)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "bloom"])
def test_prefix_of_a_part_of_the_model_that_is_called_by_itself_is_refused(family: str) -> None:
    model = AutoModelForCausalLM.from_config(
        known_config(family, **{**BASE, "num_hidden_layers": 2, **PREFIXED[family]})
    )
    with torch.no_grad():
        cache = model(ids(1), use_cache=True)[name_of_cache(model)]
    with streamed(model, fused=False) as opened:
        with pytest.raises(StreamedModelError, match=r"\.0 holds a cache"), opened.one_forward():
            opened.model.base_model(ids(), **{name_of_cache(model): cache})
        step(opened)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # PEFT calls transformers by older names
@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_virtual_tokens_of_peft_are_those_of_the_plain_model_or_refused(kind: str) -> None:
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(MegatierError, match="LORA alone"):
        streamed(peft.get_peft_model(tiny(), config))
    refused = pytest.raises(MegatierError, match=r"is a cache|outside of the model|whether .* is trained was decided")
    with streamed(tiny(), fused=False) as opened, refused:
        over = peft.get_peft_model(opened.model, config)
        over(input_ids=ids(), labels=ids()).loss.backward()


# ---------------------------------------------------------------------- a model that is changed once it is open


def replace_head(model: Any) -> None:
    model.lm_head = nn.Linear(64, 160, bias=False)


def replace_mlp(model: Any) -> None:
    model.model.layers[0].mlp = tiny().model.layers[0].mlp


def remove_layer(model: Any) -> None:
    del model.model.layers[1]


def compile_layer(model: Any) -> None:
    model.model.layers[0].compile(backend="eager")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("change", [replace_head, replace_mlp, remove_layer, compile_layer])
def test_module_that_is_exchanged_removed_or_compiled_once_the_model_is_open_is_refused(
    change: Callable[[Any], None], fused: bool
) -> None:
    with streamed(tiny(), fused=fused) as opened:
        step(opened)
        change(opened.model)
        with pytest.raises(StreamedModelError, match="after the model was opened"):
            step(opened)


def test_forward_of_another_thread_within_a_forward_is_refused() -> None:
    """It would be taken for a part of the first one."""
    found: list[BaseException] = []

    def evaluate() -> None:
        try:
            with torch.no_grad():
                opened.model(input_ids=ids(1), labels=ids(1))
        except StreamedModelError as error:
            found.append(error)

    def hook(*_: Any) -> None:
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()

    with streamed(tiny()) as opened:
        step(opened)
        handle = opened.model.model.layers[1].register_forward_pre_hook(hook)
        step(opened)
        handle.remove()
        after = opened.state_dict()
    assert [str(error).partition(" is in ")[0] for error in found] == ["another thread"]
    with streamed(tiny()) as opened:
        step(opened)
        step(opened)
        assert all(torch.equal(value, after[name]) for name, value in opened.state_dict().items())


@pytest.mark.parametrize("fused", [True, False])
def test_streamed_model_that_is_compiled_as_a_whole_gives_the_same_bits(fused: bool) -> None:
    losses = []
    for is_compiled in (False, True):
        with streamed(tiny(), fused=fused) as opened:
            model: Any = torch.compile(opened.model, backend="eager") if is_compiled else opened.model
            for seed in range(2):
                loss = model(input_ids=ids(seed), labels=ids(seed)).loss
                loss.backward()
                opened.optimizer.step()
                losses.append(loss.item())
    assert losses[:2] == losses[2:]


def test_text_of_a_streamed_model_is_that_of_the_plain_one() -> None:
    model = tiny()
    with streamed(model, fused=False) as opened:
        options = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(opened.model.generate(ids(), **options), model.eval().generate(ids(), **options))  # type: ignore[operator]


# ---------------------------------------------------------------------- what the loss is given


# ---------------------------------------------------------------------- what is changed after opening
