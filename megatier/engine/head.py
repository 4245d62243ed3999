"""Finds out what a model's forward does between its head and its loss, so that the two can be fused.

A fused loss replaces the head and the loss function, and the forward then has hidden states under the name of logits.
That is right only if the forward just scales them. A soft cap that the config names can be taken out of the forward,
because the fused loss applies it itself.

So the forward is run twice with a stand-in for its decoder, which takes no weights and no time: once with known logits
from the head, and once with known hidden states and without the cap, as the fused loss would run it. Each time, what
reaches the loss function is compared with what the head gave. `UnitModel` asks this once, before nodes are installed.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from megatier.errors import UnsupportedModelError
from megatier.foreign import reading
from megatier.models.decoder import Unit, decoder_layers, is_adapter
from megatier.models.model_class import is_classifier
from megatier.patch import patched

IGNORE_INDEX = -100
"""The label of a token that does not count, as in torch."""
PROBE_ROWS = 2
"""Rows of the probe's batch."""
PROBE_TOKENS = 3
"""Tokens in each of these rows."""
_ROUNDING_ULPS = 64
"""How many units in the last place two ways of computing a logit may differ by."""
_SOFTCAP_KEY = "final_logit_softcapping"
"""The config key of the soft cap of logits, which is taken out of the forward."""


def can_fuse(model: PreTrainedModel, units: Sequence[Unit]) -> bool:
    """Return whether head and loss of a skeleton can be fused. If those of a language model cannot, warn and say why.

    Args:
        model: the skeleton, on whose modules no nodes are installed yet.
        units: all of its units.
    """
    # A classifier has only a few numbers for each row, so fusing its loss saves nothing.
    if is_classifier(model.config):
        return False

    try:
        check_fusable(model, units)
    except UnsupportedModelError as reason:
        warnings.warn(f"the loss is not fused with the head, so a group's logits exist whole: {reason}", stacklevel=2)
        return False
    return True


def check_fusable(model: PreTrainedModel, units: Sequence[Unit]) -> None:
    """Probe what the model's forward does between head and loss. No random number is drawn that others see.

    Raises:
        UnsupportedModelError: the forward does something that a fused loss does not. The message says what.
    """
    name = type(model).__name__
    if not _calls_loss_function(model):
        raise UnsupportedModelError(f"{name} of transformers {transformers.__version__} computes its loss by itself.")

    head = model.get_output_embeddings()
    module_names = [module_name for unit in units for module_name in unit.module_names]
    if not any(model.get_submodule(module_name) is head for module_name in module_names):
        raise UnsupportedModelError(f"the output embedding of {name} is not a unit of its own.")

    # A forward on the instance was put there by somebody else, and the fused loss would bypass it.
    product = product_of(head)
    if product is None or "forward" in vars(product):
        raise UnsupportedModelError(f"the output embedding of {name} is no plain product but a {type(head).__name__}.")
    if has_hooks(head):
        raise UnsupportedModelError(f"hooks on the output embedding of {name} would see hidden states for logits.")
    if model.loss_function is not ForCausalLMLoss or not _is_cross_entropy(ForCausalLMLoss):
        raise UnsupportedModelError(f"{name} has a loss function of its own, {name_of(model.loss_function)}.")

    logits, scaled_logits = _ask(model, head, product.in_features, product.out_features)
    with without_softcap(model) as cap:
        hidden, scaled_hidden = _ask(model, head, product.in_features, product.in_features)

    # The best-fitting scale. If the forward does more than scale, it does not fit well.
    scale = (hidden * scaled_hidden).sum() / hidden.square().sum()
    scales_hidden = _agree(scaled_hidden, scale * hidden)
    scales_logits = _agree(scaled_logits, capped(scale * logits, cap))
    if not (scales_hidden and scales_logits):
        raise UnsupportedModelError(f"the forward of {name} does more to the logits than to scale or cap them once.")


def product_of(head: nn.Module | None) -> nn.Linear | None:
    """Return an output embedding as the plain linear layer that it is; None if it is something else.

    If PEFT trains a copy of the head (`modules_to_save`), that copy is returned.
    """
    if head is not None and is_adapter(head) and hasattr(head, "modules_to_save"):
        (head,) = cast("nn.ModuleDict", head.modules_to_save).values()

    if not isinstance(head, nn.Linear):
        return None
    # A subclass may compute something else, and a parametrized weight is no longer a parameter of the module.
    computes_product = type(head).forward is nn.Linear.forward
    return head if computes_product and "weight" in head._parameters else None


def has_hooks(head: nn.Module) -> bool:
    """Return whether any hook sees the output of an output embedding, or its gradient."""
    # Forward pre-hooks see hidden states in either case.
    return bool(head._forward_hooks or head._backward_hooks or head._backward_pre_hooks)


def check_calls_loss_function(model: PreTrainedModel, remedy: str) -> None:
    """Check that a model calls `self.loss_function`, as most do.

    Raises:
        UnsupportedModelError: the model computes its loss by itself.
    """
    if not _calls_loss_function(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} of transformers {transformers.__version__} computes its loss by itself, where it "
            f"cannot be replaced; {remedy}, or take another version of transformers."
        )


def _calls_loss_function(model: PreTrainedModel) -> bool:
    """Return whether the model's forward names `loss_function`."""
    forward = inspect.unwrap(vars(model).get("forward", type(model).forward))
    return "loss_function" in getattr(getattr(forward, "__code__", None), "co_names", ())


def _is_cross_entropy(function: Callable[..., Tensor]) -> bool:
    """Return whether a loss function computes what a fused loss does. It may call something that was replaced."""
    vocab_size = 5
    numbers = torch.linspace(-1.0, 7.0, PROBE_ROWS * PROBE_TOKENS * vocab_size, dtype=torch.float32, device="cpu")
    logits = 3 * numbers.square().sin().view(PROBE_ROWS, PROBE_TOKENS, vocab_size)
    labels = torch.tensor([[0, 1, 4], [2, 3, IGNORE_INDEX]], dtype=torch.int64, device="cpu")
    mean = function(logits=logits, labels=labels, vocab_size=vocab_size)
    seventh = function(logits=logits, labels=labels, vocab_size=vocab_size, num_items_in_batch=7)

    # The expected values by hand. A token predicts the next one's label, so three of the six count.
    log_probabilities = logits.double().log_softmax(-1)
    first = log_probabilities[0, 0, 1]
    second = log_probabilities[0, 1, 4]
    third = log_probabilities[1, 0, 3]
    total = -(first + second + third)
    computed = torch.stack([mean, seventh]).double()
    expected = torch.stack([total / 3, total / 7])
    return _agree(computed, expected)


@contextmanager
def calling_for_loss(model: PreTrainedModel, function: Callable[..., Tensor]) -> Iterator[None]:
    """Replace the model's loss function inside, and restore it afterwards unless somebody has changed it meanwhile."""
    # transformers has a property that reads the attribute with an underscore.
    names = ("_loss_function", "loss_function")
    before = {name: vars(model)[name] for name in names if name in vars(model)}
    model.loss_function = function
    try:
        yield
    finally:
        if model.loss_function is function:
            for name in names:
                vars(model).pop(name, None)
            vars(model).update(before)


@contextmanager
def without_softcap(model: PreTrainedModel) -> Iterator[float | None]:
    """Remove the soft cap of logits from the config inside; yields its value."""
    text = model.config.get_text_config()
    cap = getattr(text, _SOFTCAP_KEY, None)

    # Written into the instance's dictionary, since some configs are strict dataclasses that refuse None.
    without = {_SOFTCAP_KEY: None} if cap else {}
    with patched(vars(text), **without), patched(vars(model.config), **without):
        yield cap or None


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return logits with the soft cap applied, in the same shape and dtype."""
    return torch.tanh(logits / cap) * cap if cap else logits


class _Outputs(tuple[Tensor]):
    """The outputs of the decoder's stand-in: hidden states, and None for everything else."""

    def __getattr__(self, name: str) -> Tensor | None:
        # Code such as `copy` asks for such names, and would take None for a method.
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


@dataclass(slots=True)
class _Passage:
    """The tensors that pass from the head to the loss function in one forward: logits, or hidden states instead."""

    given: list[Tensor] = field(default_factory=list)
    """What each call of the head gave, as autograd leaves."""
    arrived: list[Tensor] = field(default_factory=list)
    """What each call of the loss function was given."""
    ignored: set[int] = field(default_factory=set)
    """The values of ignore_index in these calls."""

    def head(self, hidden: Tensor, width: int) -> Tensor:
        """Stand in for the head: return numbers of many magnitudes, so that a cap of any height shows."""
        generator = torch.Generator().manual_seed(len(self.given))
        shape = (*hidden.shape[:-1], width)
        numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        sizes = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")

        # From a hundredth to a thousand.
        factors = 10 ** (5 * sizes - 2)
        logits = numbers * factors
        logits.requires_grad_()
        self.given.append(logits)

        # The forward may change its input in place, which a leaf refuses.
        return logits * 1.0

    def loss(self, logits: Tensor, *_: object, ignore_index: int = IGNORE_INDEX, **__: object) -> Tensor:
        """Stand in for the loss function: note the logits, and return a loss that does not depend on them."""
        self.arrived.append(logits.detach().clone())
        self.ignored.add(ignore_index)

        # Not a leaf, since a router's loss may be added to it in place.
        leaf = torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True)
        return leaf * 1.0

    def check(self, name: str, loss: object) -> None:
        """Refuse a passage that a fused loss would not reproduce.

        Raises:
            UnsupportedModelError: the forward does more than call the head once and the loss function once on its
                output.
        """
        num_given = len(self.given)
        num_arrived = len(self.arrived)
        if num_given != 1 or num_arrived != 1:
            counts = f"{num_given} times, and the loss function {num_arrived} times"
            raise UnsupportedModelError(f"the forward of {name} calls the head {counts}; each must be called once.")

        if self.ignored != {IGNORE_INDEX}:
            raise UnsupportedModelError(f"{name} leaves labels other than {IGNORE_INDEX} out of its loss.")

        given = self.given[0]
        arrived = self.arrived[0]
        if arrived.shape[-1] != given.shape[-1]:
            widths = f"the loss function {arrived.shape[-1]} numbers for a token, but the head gave {given.shape[-1]}"
            raise UnsupportedModelError(f"{name} hands {widths}.")

        if arrived.numel() != given.numel():
            raise UnsupportedModelError(f"{name} hands only the logits of some tokens to the loss.")

        # The stand-in's loss depends on no logit, so anything that leads back to one was added by the forward.
        if torch.is_tensor(loss) and loss.requires_grad:
            (grad,) = torch.autograd.grad(loss, self.given, allow_unused=True)
            if grad is not None:
                raise UnsupportedModelError(f"{name} adds a loss of the logits to the loss function's.")


def _ask(model: PreTrainedModel, head: nn.Module, in_features: int, width: int) -> tuple[Tensor, Tensor]:
    """Run one forward. Return what the head gave and what reached the loss function, each fp64 [tokens, width]."""
    name = type(model).__name__
    passage = _Passage()
    ids = torch.zeros(PROBE_ROWS, PROBE_TOKENS, dtype=torch.long, device="cpu")
    hidden = torch.empty(PROBE_ROWS, PROBE_TOKENS, in_features, dtype=torch.float32, device="meta")
    loss = None

    try:
        with (
            calling_for_loss(model, passage.loss),
            reading(f"the forward of {name} cannot be asked without its decoder", UnsupportedModelError),
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            patched(vars(_body(model, head)), forward=lambda *_, **__: _Outputs((hidden,))),
            # Some forwards call it outside the body.
            patched(vars(model.get_input_embeddings()), forward=lambda *_, **__: hidden),
            patched(vars(head), forward=lambda x: passage.head(x, width)),
        ):
            # This bypasses hooks on the model, which see only its inputs and outputs.
            loss = model.forward(input_ids=ids, labels=ids, use_cache=False).loss
    except UnsupportedModelError:
        # After the loss, the forward may need more than the stand-in has. But then the probe is done.
        if not passage.arrived:
            raise

    passage.check(name, loss)
    given = passage.given[0].detach()
    arrived = passage.arrived[0]
    return given.double().flatten(0, -2), arrived.double().reshape(-1, given.shape[-1])


def _body(model: PreTrainedModel, head: nn.Module) -> nn.Module:
    """Return the module that computes the hidden states: the outermost one with the layers and without the head."""
    layers = decoder_layers(model)
    module = cast("nn.Module", model)
    while True:
        module = next(child for child in module.children() if any(inside is layers for inside in child.modules()))
        if not any(inside is head for inside in module.modules()):
            return module


def _agree(computed: Tensor, expected: Tensor) -> bool:
    """Return whether two fp64 tensors are equal up to rounding in fp32."""
    tolerance = _ROUNDING_ULPS * torch.finfo(torch.float32).eps * expected.abs()
    return bool(((computed - expected).abs() <= tolerance).all())


def name_of(function: object) -> str:
    """Return the name of a function, or the type of any other object."""
    return getattr(function, "__name__", type(function).__name__)
