from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny_models import tiny_config
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from megatier.engine.gradient import Gradients
from megatier.engine.head import IGNORE_INDEX
from megatier.engine.loss import FusedLoss
from megatier.engine.node import Node
from megatier.engine.stage import Stage
from megatier.errors import DataError, MegatierError
from megatier.layout import Layout
from megatier.tier import Activations, Leg, Phase
from megatier.tiered_adamw.parameters import schema_of

VOCAB, HIDDEN, ROWS, TOKENS = 37, 8, 3, 11


class Head:
    """A model that is only a head, with its weights; it takes the gradient."""

    def __init__(
        self, cap: float | None, chunk: int, dtype: torch.dtype, *, bias: bool = False, frozen: Sequence[str] = ()
    ) -> None:
        torch.manual_seed(0)
        layout = Layout.of([("weight", (VOCAB, HIDDEN)), *([("bias", (VOCAB,))] if bias else [])], set(frozen))
        self.layout = layout
        self.weights = torch.randn(layout.num_elements).to(dtype)
        self.weight = self.part(self.weights, "weight").view(VOCAB, HIDDEN)
        self.bias = self.part(self.weights, "bias") if bias else None
        self.grad = torch.full((layout.trained.num_elements,), float("nan"), dtype=dtype)
        self.phases: list[Phase] = []
        self.measured = 0
        config = tiny_config("gemma2", final_logit_softcapping=cap)
        self.module = nn.Linear(HIDDEN, VOCAB, bias=bias, device="meta")
        model = SimpleNamespace(config=config, loss_function=ForCausalLMLoss, get_output_embeddings=lambda: self.module)
        self.model = cast("PreTrainedModel", model)
        device = torch.device("cpu")
        gradients = Gradients({"head": replace(layout.trained, schema=schema_of(dtype))}, self, self, groups=1)
        gradients.begin_group(0)
        anchor = torch.zeros((), requires_grad=True)
        stage = Stage(source=self, gradients=gradients, dtypes={"head": dtype}, device=device, slices=1, anchor=anchor)
        bindings = [(self.module._parameters, tensor.name, tensor) for tensor in layout.tensors]
        node = Node(stage, "head", "lm_head", self.module, bindings, activations=Activations.KEEP)  # type: ignore[arg-type]
        self.fused = FusedLoss(self.model, node, chunk)

    def enter(self, unit: str, phase: Phase, group: int) -> SimpleNamespace:
        self.phases.append(phase)
        return SimpleNamespace(bytes=self.weights.view(torch.uint8), leave=lambda: None)

    def acquire_grad_buffer(self, unit: str, *, fits: bool = False) -> Tensor:
        return self.grad.view(torch.uint8)

    def submit_grad(self, unit: str, *, group: int) -> None: ...

    def sums_in_buffer(self, unit: str) -> bool:
        return False

    def measure(self, unit: str, grad: Tensor) -> None:
        self.measured += 1

    def begin_leg(self, leg: Leg) -> None: ...

    def stash(self, unit: str, tensor: Tensor) -> None: ...

    def stash_beside(self, unit: str, tensor: Tensor) -> bool:
        raise AssertionError("nothing was stashed")

    def fetch(self, unit: str) -> list[Tensor]:
        raise AssertionError("nothing was stashed")

    def __call__(self, hidden: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        with self.fused.standing_in():
            return self.fused(self.module(hidden), labels, **kwargs)

    def part(self, plane: Tensor, name: str) -> Tensor:
        """A parameter of the head, or its gradient, flat."""
        tensor = next(tensor for tensor in self.layout.tensors if tensor.name == name)
        return plane[tensor.start : tensor.stop]

    @property
    def weight_grad(self) -> Tensor:
        return self.part(self.grad, "weight").view(VOCAB, HIDDEN)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Hidden states and labels, a third of which do not count."""
    torch.manual_seed(1)
    hidden = torch.randn(ROWS, TOKENS, HIDDEN).to(dtype)
    labels = torch.randint(0, VOCAB, (ROWS, TOKENS))
    return hidden, labels.masked_fill(torch.rand(labels.shape) < 0.3, IGNORE_INDEX)


def reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    cap: float | None,
    count: int | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Loss and gradients of hidden states, weight and bias by torch's own cross-entropy in fp64."""
    parts = [part.double().requires_grad_() for part in (hidden, weight, *([] if bias is None else [bias]))]
    logits = functional.linear(*parts)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    total = functional.cross_entropy(
        logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    loss = total / (count or (labels[:, 1:] != IGNORE_INDEX).sum())
    return loss.detach(), *torch.autograd.grad(loss, parts)


@dataclass
class Case:
    """What a forward may be given for its loss."""

    bias: bool
    cap: float | None
    chunk: int
    hidden: Tensor
    labels: Tensor
    given: dict[str, Any]


def case(seed: int) -> Case:
    """Draw labels, masks and named arguments, of which some are none that torch takes."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kept = draw.choice([TOKENS] * 4 + [3])
    labels = torch.randint(0, VOCAB, (ROWS, draw.choice([kept] * 5 + [TOKENS])))
    for value in draw.sample([IGNORE_INDEX, -1, 0, 5, VOCAB, 10**6, -(2**40)], draw.choice([0, 1, 1, 2, 3])):
        labels = labels.masked_fill(torch.rand(labels.shape) < draw.choice([0.1, 0.5, 1.0]), value)

    choices: dict[str, list[Any]] = {
        "ignore_index": [None, None, None, -1, 0, 5, -(2**40), VOCAB],
        "num_items_in_batch": [None, None, 7, 2.5, torch.tensor(9), torch.tensor(3.5), torch.tensor([4])],
        "shift_labels": [None, None, None, labels.flip(0), labels.flatten(), labels[:, 1:]],
        "label_smoothing": [None, 0.1],
        "reduction": [None, "sum"],
        "weight": [None, torch.ones(VOCAB)],
    }
    given = {name: value for name, values in choices.items() if (value := draw.choice(values)) is not None}
    dtype = draw.choice([torch.int64] * 9 + [torch.int32, torch.uint8, torch.float32])
    hidden = torch.randn(ROWS, kept, HIDDEN)
    cap = draw.choice([None, 5.0])
    return Case(draw.choice([True, False]), cap, draw.choice(CHUNKS), hidden, labels.to(dtype), given)


def own_loss(head: Head, case: Case) -> tuple[Tensor, ...]:
    """The loss and the gradients of hidden states and head by the model's own loss function."""
    parts = [part.clone().requires_grad_() for part in (case.hidden, head.weight, head.bias) if part is not None]
    logits = functional.linear(*parts)
    logits = case.cap * torch.tanh(logits / case.cap) if case.cap else logits
    loss = ForCausalLMLoss(logits, case.labels, VOCAB, **case.given)
    return loss.detach(), *torch.autograd.grad(loss.sum(), parts)


def test_fused_loss_of_whatever_it_is_given_is_the_models_own_or_refused_by_name() -> None:
    outcomes = Counter[str]()
    for seed in range(300):
        drawn = case(seed)
        head = Head(drawn.cap, drawn.chunk, torch.float32, bias=drawn.bias)
        hidden = drawn.hidden.clone().requires_grad_()
        try:
            expected = own_loss(head, drawn)
        except (IndexError, RuntimeError, ValueError):
            expected = ()
        try:
            loss = head(hidden, drawn.labels, **drawn.given)
        except MegatierError as error:
            assert re.search("label|num_items_in_batch", str(error)), error
            outcomes["refused" if expected else "refused by both"] += 1
            continue

        loss.backward()
        assert hidden.grad is not None
        found = [loss.detach(), hidden.grad, head.weight_grad, *([head.part(head.grad, "bias")] if drawn.bias else [])]
        if not expected:
            outcomes["not a number"] += 1
            assert all(bool(part.isnan().any()) for part in found), seed
            with pytest.raises(DataError, match=r"labels of the step are outside of the vocabulary of 37"):
                head.fused.check_labels()
            continue

        outcomes["equal"] += 1
        head.fused.check_labels()
        for mine, own in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-6, equal_nan=True, msg=f"case {seed}")

    assert min(outcomes[kind] for kind in ("equal", "not a number", "refused by both")) > 20
    assert outcomes["refused"] < 60


CHUNKS = [1, 7, TOKENS, ROWS * TOKENS, 1000]


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_fused_loss_and_gradients_are_those_of_torch(chunk: int, cap: float | None) -> None:
    head = Head(cap, chunk, torch.float32)
    hidden, labels = batch()
    expected, hidden_grad, weight_grad = reference(hidden, head.weight, labels, cap)
    hidden.requires_grad_()
    loss = head(hidden, labels)
    loss.backward()
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-6, atol=0)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), hidden_grad, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(head.weight_grad.double(), weight_grad, rtol=1e-4, atol=1e-7)
    assert head.measured == 1
    assert head.phases == [Phase.FORWARD]  # both gradients are made there


def test_fused_loss_padding_of_the_head_is_zero() -> None:
    head = Head(None, 7, torch.float32)
    head(*batch()).backward()
    assert torch.equal(head.grad[VOCAB * HIDDEN :], torch.zeros(len(head.grad) - VOCAB * HIDDEN))


@pytest.mark.parametrize("cap", [None, 5.0])
def test_fused_loss_in_bf16_is_close_and_its_value_fp32(cap: float | None) -> None:
    head = Head(cap, 7, torch.bfloat16)
    hidden, labels = batch(torch.bfloat16)
    expected, hidden_grad, weight_grad = reference(hidden, head.weight, labels, cap)
    hidden.requires_grad_()
    loss = head(hidden, labels)
    loss.backward()
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    assert hidden.grad is not None
    assert hidden.grad.dtype is torch.bfloat16
    for found, wanted in ((hidden.grad, hidden_grad), (head.weight_grad, weight_grad)):
        assert (found.double() - wanted).norm() <= 2e-2 * wanted.norm()


def test_fused_loss_num_items_in_batch_is_the_denominator() -> None:
    head = Head(None, 7, torch.float32)
    hidden, labels = batch()
    expected, hidden_grad, _ = reference(hidden, head.weight, labels, None, count=100)
    hidden.requires_grad_()
    loss = head(hidden, labels, num_items_in_batch=100)
    loss.backward()
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad.double(), hidden_grad, rtol=1e-4, atol=1e-7)  # type: ignore[union-attr]


def test_fused_loss_scaled_afterwards_scales_both_gradients() -> None:
    head = Head(None, 7, torch.float32)
    hidden, labels = batch()
    _, hidden_grad, weight_grad = reference(hidden, head.weight, labels, None)
    hidden.requires_grad_()
    (head(hidden, labels) * 3).backward()
    torch.testing.assert_close(hidden.grad.double(), 3 * hidden_grad, rtol=1e-4, atol=1e-7)  # type: ignore[union-attr]
    torch.testing.assert_close(head.weight_grad.double(), 3 * weight_grad, rtol=1e-4, atol=1e-7)


def test_fused_loss_shifted_labels_are_taken_as_they_are() -> None:
    head = Head(None, 7, torch.float32)
    hidden, labels = batch()
    shifted = functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
    assert torch.equal(head(hidden, labels, shift_labels=shifted), head(hidden, labels))


def test_fused_loss_of_tokens_that_do_not_count_moves_nothing() -> None:
    head = Head(None, 7, torch.float32)
    hidden, labels = batch()
    labels[1] = IGNORE_INDEX
    hidden.requires_grad_()
    head(hidden, labels).backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad[1], torch.zeros(TOKENS, HIDDEN))
    assert torch.equal(hidden.grad[:, -1], torch.zeros(ROWS, HIDDEN))  # nothing follows the last token
    assert hidden.grad[0].abs().max() > 0


@pytest.mark.parametrize("cap", [None, 5.0])
def test_fused_loss_evaluation_gives_the_training_value_and_expects_no_backward(cap: float | None) -> None:
    head = Head(cap, 7, torch.float32)
    hidden, labels = batch()
    with torch.no_grad():
        value = head(hidden, labels)
    assert not value.requires_grad
    assert torch.equal(value, head(hidden.requires_grad_(), labels).detach())


def test_fused_loss_takes_the_soft_cap_out_of_the_models_forward_and_leaves_the_config() -> None:
    head = Head(5.0, 7, torch.float32)
    with head.fused.standing_in():
        assert head.model.config.final_logit_softcapping is None
    assert head.model.config.final_logit_softcapping == 5.0


def test_fused_loss_head_returns_the_hidden_states_in_the_models_forward_alone() -> None:
    head, (hidden, _) = Head(None, 7, torch.float32), batch()
    with head.fused.standing_in():
        assert head.module(hidden) is hidden
    with torch.no_grad():
        assert torch.equal(head.module(hidden), functional.linear(hidden, head.weight))


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",), ("weight", "bias")])
def test_fused_loss_of_a_head_with_a_bias_has_the_gradients_of_torch(
    frozen: tuple[str, ...], cap: float | None
) -> None:
    head = Head(cap, 7, torch.float32, bias=True, frozen=frozen)
    hidden, labels = batch()
    loss, hidden_grad, *grads = reference(hidden, head.weight, labels, cap, bias=head.bias)
    found = head(hidden.requires_grad_(), labels)
    found.backward()
    torch.testing.assert_close(found.detach().double(), loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad.double(), hidden_grad, rtol=1e-4, atol=1e-7)  # type: ignore[union-attr]
    for name, expected in zip(("weight", "bias"), grads, strict=True):
        if name not in frozen:
            grad = head.part(head.grad, name).view(expected.shape)
            torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-7)
    assert head.measured == (len(frozen) < 2)
    with torch.no_grad():
        assert torch.equal(head(hidden, labels), found)


def test_fused_loss_of_hidden_states_cast_to_fp32_is_that_of_what_they_were() -> None:
    head, (hidden, labels) = Head(None, 7, torch.bfloat16), batch(torch.bfloat16)
    wide, narrow = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    losses = [head(wide.float(), labels), head(narrow, labels)]  # as Mamba does
    torch.stack(losses).sum().backward()
    assert torch.equal(*losses)
    assert wide.grad is not None
    assert narrow.grad is not None
    assert torch.equal(wide.grad, narrow.grad)


@pytest.mark.parametrize("bias", [False, True])
def test_fused_loss_under_autocast_is_that_of_operands_in_its_dtype(bias: bool) -> None:
    wide, narrow = (Head(5.0, 7, dtype, bias=bias) for dtype in (torch.float32, torch.bfloat16))
    hidden, labels = batch()
    inputs = [hidden.clone().requires_grad_(), hidden.bfloat16().requires_grad_()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [head(found, labels) for head, found in zip((wide, narrow), inputs, strict=True)]
        with torch.no_grad():
            assert torch.equal(wide(inputs[0], labels), losses[0])
    torch.stack(losses).sum().backward()

    assert losses[0].dtype is torch.float32
    assert torch.equal(*losses)
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert torch.equal(inputs[0].grad, inputs[1].grad.float())

    # The sums over chunks are fp32. A head in fp32 gets them as they are.
    assert torch.equal(wide.grad.bfloat16(), narrow.grad)
    assert not torch.equal(wide.grad, narrow.grad.float())
