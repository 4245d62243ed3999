"""A loss that is fused with the head: every call and change of the model is equal to the plain one, or refused."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_integrations_calls import ids, plain_norm, step, streamed, tiny
from tiny_models import tiny_config
from torch import Tensor, nn
from torch.nn import functional
from transformers.loss import loss_utils

from megatier.engine.head import check_fusable
from megatier.errors import DataError, StreamedModelError, UnsupportedModelError
from megatier.models.decoder import build_skeleton, find_units


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
