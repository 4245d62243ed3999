"""What a model does between its head and its loss, found by asking the model's own forward.

A fused loss stands where the head and the loss function were: the forward has hidden states under the name of logits.
That is right only where all it does to them is to scale them. A soft cap that the config names can be taken out of the
forward; the fused loss applies it then. So the forward is run on a stand-in for its decoder, which takes no weights and
no time: with known logits as what the head gives, and as the fused loss would run it, with known hidden states and
without the cap. What comes to the loss function is compared with what was given.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from megatier.errors import UnsupportedModelError
from megatier.foreign import reading
from megatier.models.decoder import Unit, decoder_layers

IGNORED = -100
"""Label of a token that does not count."""
ROWS = 2
TOKENS = 3
"""Of the batch that the forward is asked with."""
ROUNDING = 64
"""Units in the last place by which two ways of computing a logit may differ."""
CAP = "final_logit_softcapping"
"""What configs call the soft cap of logits that is taken out of the forward."""


def can_fuse(model: PreTrainedModel, units: Sequence[Unit]) -> bool:
    """Whether head and loss of a skeleton may be one node; if not, warns and says why.

    Args:
        model: whose modules have no nodes yet.
        units: its own.
    """
    try:
        check_fusable(model, units)
    except UnsupportedModelError as reason:
        warnings.warn(f"the loss is not fused with the head, so a group's logits exist whole: {reason}", stacklevel=2)
        return False
    return True


def check_fusable(model: PreTrainedModel, units: Sequence[Unit]) -> None:
    """Ask the model's forward what it does between head and loss. Draws no random numbers that others see.

    Raises:
        UnsupportedModelError: something that a fused loss does not; the message says what.
    """
    name = type(model).__name__
    head = model.get_output_embeddings()
    if not _calls_loss_function(model):
        raise UnsupportedModelError(f"{name} of transformers {transformers.__version__} takes its loss by itself.")
    if not any(model.get_submodule(module) is head for unit in units for module in unit.module_names):
        raise UnsupportedModelError(f"the output embedding of {name} is not a unit of its own.")
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise UnsupportedModelError(f"the output embedding of {name} is no plain product but a {type(head).__name__}.")
    if model.loss_function is not ForCausalLMLoss:
        raise UnsupportedModelError(f"{name} has a loss function of its own, {_name_of(model.loss_function)}.")
    logits, whole = _ask(model, head, head.out_features)
    with without_softcap(model) as cap:
        hidden, bare = _ask(model, head, head.in_features)  # as the fused loss has it
    scale = (hidden * bare).sum() / hidden.square().sum()
    if not (_agree(bare, scale * hidden) and _agree(whole, capped(scale * logits, cap))):
        raise UnsupportedModelError(f"the forward of {name} does more to the logits than to scale or cap them once.")


def check_calls_loss_function(model: PreTrainedModel, remedy: str) -> None:
    """Most models take their loss by way of `loss_function`.

    Raises:
        UnsupportedModelError: this one does not.
    """
    if not _calls_loss_function(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} of transformers {transformers.__version__} takes its loss by itself, where it "
            f"cannot be replaced; {remedy}, or take another version of transformers."
        )


def _calls_loss_function(model: PreTrainedModel) -> bool:
    return "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names


@contextmanager
def without_softcap(model: PreTrainedModel) -> Iterator[float | None]:
    """Inside, the config names no soft cap of logits; gives the one that it names."""
    text = model.config.get_text_config()
    cap = getattr(text, CAP, None)
    # Some configs are strict dataclasses that refuse None.
    holders = [config.__dict__ for config in (text, model.config) if cap and config.__dict__.get(CAP)]
    before = [holder[CAP] for holder in holders]
    for holder in holders:
        holder[CAP] = None

    try:
        yield cap or None
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder[CAP] = value


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Soft-capped logits, of the same shape and dtype."""
    return torch.tanh(logits / cap) * cap if cap else logits


class _Outputs(tuple[Tensor]):
    """What a decoder gives: hidden states alone, under whatever name they are asked for."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


@dataclass(slots=True)
class _Passage:
    """What went from the head to the loss function in one forward, logits or what has another width."""

    given: list[Tensor] = field(default_factory=list)
    """Of each call of the head."""
    sources: list[Tensor] = field(default_factory=list)
    """The same, as leaves that autograd finds."""
    arrived: list[Tensor] = field(default_factory=list)
    """At each call of the loss function."""
    ignored: set[int] = field(default_factory=set)
    """Labels that these calls said not to count."""

    def head(self, hidden: Tensor, width: int) -> Tensor:
        """Logits of many sizes, so that a cap of any height shows."""
        generator = torch.Generator().manual_seed(len(self.given))
        shape = (*hidden.shape[:-1], width)
        logits = torch.randn(shape, generator=generator) * 10 ** (5 * torch.rand(shape, generator=generator) - 2)
        self.given.append(logits)
        self.sources.append(logits.clone().requires_grad_())
        return self.sources[-1] * 1.0  # may be changed in place

    def loss(self, logits: Tensor, *_: object, ignore_index: int = IGNORED, **__: object) -> Tensor:
        """A loss that does not depend on them; what the forward adds to it may."""
        self.arrived.append(logits.detach().clone())
        self.ignored.add(ignore_index)
        return torch.ones((), requires_grad=True) * 1.0

    def check(self, name: str, loss: object) -> None:
        """Refuse what a fused loss does not see."""
        if (len(self.given), len(self.arrived)) != (1, 1):
            counts = f"{len(self.given)} times, and the loss function {len(self.arrived)} times"
            raise UnsupportedModelError(f"the forward of {name} calls the head {counts}, rather than each once.")

        if self.ignored != {IGNORED}:
            raise UnsupportedModelError(f"{name} leaves labels other than {IGNORED} out of its loss.")
        given = self.given[0]
        arrived = self.arrived[0]
        if arrived.shape[-1] != given.shape[-1]:
            widths = f"the loss function {arrived.shape[-1]} numbers a token where the head gave {given.shape[-1]}"
            raise UnsupportedModelError(f"{name} hands {widths}.")

        if arrived.numel() != given.numel():
            raise UnsupportedModelError(f"{name} hands the logits of some tokens only to the loss.")
        if torch.is_tensor(loss) and loss.requires_grad:
            found = torch.autograd.grad(loss, self.sources, allow_unused=True)
            if any(grad is not None for grad in found):
                raise UnsupportedModelError(f"{name} has another loss of the logits beside the loss function's.")


def _ask(model: PreTrainedModel, head: nn.Linear, width: int) -> tuple[Tensor, Tensor]:
    """One forward: what the head gave, and what reached the loss function of it, fp64 [tokens, width]."""
    name = type(model).__name__
    passage = _Passage()
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    hidden = torch.empty(ROWS, TOKENS, head.in_features, device="meta")
    own_loss = model.loss_function
    loss = None
    model.loss_function = passage.loss

    try:
        with (
            reading(f"the forward of {name} cannot be asked without its decoder", UnsupportedModelError),
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            _calling(_body(model, head), lambda *_, **__: _Outputs((hidden,))),
            _calling(model.get_input_embeddings(), lambda *_, **__: hidden),  # where it is called outside of that
            _calling(head, lambda x: passage.head(x, width)),
        ):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    except UnsupportedModelError:
        if not passage.arrived:  # what comes after the loss may need more than a stand-in has
            raise
    finally:
        model.loss_function = own_loss

    passage.check(name, loss)
    given = passage.given[0]
    arrived = passage.arrived[0]
    return given.double().flatten(0, -2), arrived.double().reshape(-1, given.shape[-1])


def _body(model: PreTrainedModel, head: nn.Linear) -> nn.Module:
    """What the forward calls for its hidden states: the outermost module round the layers that leaves out the head."""
    layers = decoder_layers(model)
    module = cast("nn.Module", model)
    while True:
        module = next(child for child in module.children() if any(inside is layers for inside in child.modules()))
        if not any(inside is head for inside in module.modules()):
            return module


@contextmanager
def _calling(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module's forward is another."""
    before = module.__dict__.get("forward")
    module.forward = forward

    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Whether each pair of fp64 numbers is equal but for rounding in fp32."""
    most = ROUNDING * torch.finfo(torch.float32).eps * expected.abs()
    return bool(((found - expected).abs() <= most).all())


def _name_of(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)
