"""What a user calls past a streamed model's own forward, and changes on the model after it was opened."""

from __future__ import annotations

import copy
import inspect
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_models import BASE, known_config, tiny_config
from tiny_runs import one_thread
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.loss import loss_utils

import megatier
from megatier.engine.head import check_fusable
from megatier.errors import AbsentWeightError, DataError, MegatierError, StreamedModelError, UnsupportedModelError
from megatier.integrations.streamed import Streamed
from megatier.models.decoder import build_skeleton, find_units

TIERS = {"device": "cpu", "gpu": 4 << 20, "ram": 32 << 20, "update_threads": 1, "io_threads": 1}
OUTSIDE = "was called outside of the model's forward.*one_forward"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


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


def arguments(draw: random.Random) -> dict[str, Any]:
    """Named arguments of a forward. Torch takes some of them, and refuses others."""
    torch.manual_seed(draw.randrange(1 << 30))
    labels = torch.randint(0, 160, (2, 12))
    for value in draw.sample([-100, -1, 0, 160, 7000], draw.choice([0, 1, 1, 2])):
        labels = labels.masked_fill(torch.rand(labels.shape) < 0.3, value)
    choices: dict[str, list[Any]] = {
        "attention_mask": [None, torch.ones(2, 12, dtype=torch.int64).triu(-5)],
        "ignore_index": [None, None, -1, 0],
        "num_items_in_batch": [None, None, 9, torch.tensor(13)],
        "logits_to_keep": [None, None, None, 5, torch.tensor([3, 5])],
        "shift_labels": [None, None, None, functional.pad(labels[:, 1:], (0, 1), value=-100), labels[:, -5:].clone()],
        "label_smoothing": [None, None, 0.2],
        "output_hidden_states": [None, True],
        "return_dict": [None, None, False],
    }
    given = {name: value for name, values in choices.items() if (value := draw.choice(values)) is not None}
    return {"input_ids": ids(draw.randrange(100)), "labels": labels, **given}


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gemma2"])
def test_forward_of_a_fused_loss_is_equal_to_the_plain_model_or_refused_by_name(family: str) -> None:
    model = tiny(family)
    outcomes = Counter[str]()
    with streamed(tiny(family)) as opened:
        for seed in range(60):
            given = arguments(random.Random(seed))
            try:
                expected = model(**given)
            except (IndexError, ValueError, RuntimeError):
                expected = None
            try:
                found = opened.model(**given)
            except DataError:
                outcomes["refused" if expected is not None else "refused by both"] += 1
                continue

            found[0].backward()
            norm = opened.grad_norm()
            if expected is None:
                outcomes["not a number"] += 1
                assert found[0].isnan()
                with pytest.raises(DataError, match="outside of the vocabulary of 160"):
                    opened.optimizer.step()
                continue

            outcomes["equal"] += 1
            assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-5, nan_ok=True), seed
            assert norm == pytest.approx(plain_norm(model, expected[0]), rel=1e-4), seed
            opened.abandon()

    assert outcomes["equal"] > 10
    assert outcomes["not a number"] > 5
    assert outcomes["refused by both"] > 5
    assert not outcomes["refused"]


def test_labels_outside_of_the_vocabulary_change_no_weight_and_the_next_step_is_taken() -> None:
    with streamed(tiny()) as opened:
        step(opened)
        before = {name: tensor.clone() for name, tensor in opened.state_dict().items()}
        opened.model(input_ids=ids(), labels=ids() * 0 - 1).loss.backward()
        with pytest.raises(
            DataError, match=r"22 labels of the step are outside of the vocabulary of 160.*first one is -1"
        ):
            opened.optimizer.step()
        assert all(torch.equal(before[name], tensor) for name, tensor in opened.state_dict().items())
        step(opened)
        assert opened.last is not None
        assert opened.last.skipped is None


def test_labels_given_by_place_are_taken() -> None:
    model = tiny()
    with streamed(model) as opened, torch.no_grad():
        for m in (opened.model, model):
            names = list(inspect.signature(m.forward).parameters)
            args = [{"input_ids": ids(), "labels": ids()}.get(name) for name in names[: names.index("labels") + 1]]
            loss = m(*args).loss
            assert loss.item() == pytest.approx(model(input_ids=ids(), labels=ids()).loss.item(), rel=1e-6)


# ---------------------------------------------------------------------- what is changed after opening


def halved(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return loss_utils.ForCausalLMLoss(logits, labels, vocab_size) / 2


def test_loss_function_of_a_model_that_is_not_fused_may_change_at_any_time() -> None:
    with streamed(tiny(), fused=False) as opened, torch.no_grad():
        own = opened.model.loss_function
        whole = opened.model(input_ids=ids(), labels=ids()).loss
        opened.model.loss_function = halved
        assert torch.equal(opened.model(input_ids=ids(), labels=ids()).loss, whole / 2)
        assert opened.model.loss_function is halved
        opened.model.loss_function = own
        assert torch.equal(opened.model(input_ids=ids(), labels=ids()).loss, whole)


def test_loss_function_outside_of_the_forward_is_the_models_own() -> None:
    with streamed(tiny()) as opened:
        step(opened)
        assert opened.model.loss_function is loss_utils.ForCausalLMLoss


def hook(model: Any) -> Callable[[], None]:
    handle = model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    return handle.remove  # type: ignore[no-any-return]


def other_head(model: Any) -> Callable[[], None]:
    own = model.lm_head
    model.lm_head = nn.Linear(64, 160, bias=False)
    return lambda: setattr(model, "lm_head", own)


def other_forward(model: Any) -> Callable[[], None]:
    own = model.lm_head.forward
    model.lm_head.forward = lambda x: own(x) * 2
    return lambda: setattr(model.lm_head, "forward", own)


def other_loss(model: Any) -> Callable[[], None]:
    own = model.loss_function
    model.loss_function = halved
    return lambda: setattr(model, "loss_function", own)


def other_size(model: Any) -> Callable[[], None]:
    model.config.vocab_size = 80
    return lambda: setattr(model.config, "vocab_size", 160)


def new_cap(model: Any) -> Callable[[], None]:
    model.config.final_logit_softcapping = 2.0
    return lambda: delattr(model.config, "final_logit_softcapping")


CHANGES = {
    "hook": (hook, "has hooks"),
    "head": (other_head, r"lm_head\.weight was replaced"),
    "forward of the head": (other_forward, "output embedding is another one"),
    "loss": (other_loss, "its loss function is now halved"),
    "vocabulary": (other_size, "vocab_size is 80"),
    "cap": (new_cap, "names a soft cap of logits"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_model_that_was_changed_under_a_fused_loss_is_refused_until_that_is_undone(kind: str) -> None:
    change, message = CHANGES[kind]
    with streamed(tiny()) as opened:
        step(opened)
        undo = change(opened.model)
        with pytest.raises(StreamedModelError, match=f"{message}.*(fused_loss=False|open it then)"):
            opened.model(input_ids=ids(), labels=ids())
        undo()
        step(opened)
        assert opened.last is not None
        assert opened.last.skipped is None


def test_soft_cap_that_is_changed_after_opening_is_the_one_that_counts() -> None:
    model = tiny("gemma2")
    with streamed(model) as opened:
        for cap in (0.1, None, 0.2):
            for m in (opened.model, model):
                m.config.final_logit_softcapping = cap
            loss = opened.model(input_ids=ids(), labels=ids()).loss
            loss.backward()
            expected = model(input_ids=ids(), labels=ids()).loss
            assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
            assert opened.grad_norm() == pytest.approx(plain_norm(model, expected), rel=1e-5)
            opened.abandon()


def smoothed(model: Any) -> None:
    """Give a model a forward of its own, which computes the loss by itself."""

    class Smoothed(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            output = super().forward(input_ids=input_ids)
            rows = output.logits[:, :-1].flatten(0, 1)
            output.loss = functional.cross_entropy(rows, labels[:, 1:].flatten(), label_smoothing=0.1)
            return output

    model.__class__ = Smoothed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook, "hooks on the output embedding"),
        (lambda model: model.lm_head.register_full_backward_hook(lambda *found: (found[1][0] * 2,)), "hooks on"),
        (lambda model: setattr(model, "loss_function", halved), "a loss function of its own, halved"),
        (smoothed, "computes its loss by itself"),
    ],
)
def test_model_that_has_another_loss_when_it_is_opened_runs_with_that(
    change: Callable[[Any], object], reason: str
) -> None:
    model, given = tiny(), tiny()
    change(model)
    change(given)
    expected = model(input_ids=ids(), labels=ids()).loss
    with pytest.warns(UserWarning, match=f"not fused.*{reason}"), streamed(given) as opened:
        loss = opened.model(input_ids=ids(), labels=ids()).loss
        loss.backward()
        assert loss.item() == expected.item()
        assert opened.grad_norm() == pytest.approx(plain_norm(model, expected), rel=1e-6)


def test_hooks_on_a_head_before_opening_keep_the_loss_from_being_fused() -> None:
    model = build_skeleton(tiny_config("llama"), "sdpa")
    units = find_units(model)
    undo = hook(model)
    with pytest.raises(UnsupportedModelError, match="hooks on the output embedding"):
        check_fusable(model, units)
    undo()
    check_fusable(model, units)


def test_loss_function_of_another_version_with_more_arguments_has_them_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = loss_utils.fixed_cross_entropy

    def newer(*args: Any, label_smoothing: float = 0.0, **kwargs: Any) -> Tensor:
        return own(*args, **kwargs) * (1 + label_smoothing)

    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", newer)
    with streamed(tiny()) as opened, torch.no_grad():
        assert not opened.has_logits
        opened.model(input_ids=ids(), labels=ids(), label_smoothing=None)
        with pytest.raises(StreamedModelError, match="takes label_smoothing, and the loss that is fused"):
            opened.model(input_ids=ids(), labels=ids(), label_smoothing=0.1)


def test_loss_function_that_computes_something_else_than_its_name_says_is_not_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = loss_utils.fixed_cross_entropy
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", lambda *args, **kwargs: own(*args, **kwargs) * 1.01)
    with pytest.warns(UserWarning, match="has a loss function of its own"), streamed(tiny()) as opened:
        assert opened.has_logits
