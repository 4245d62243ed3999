"""Finds the way of a model from its head to its loss, by asking the model's own forward.

A fused loss takes the place of the head and the loss function: the forward then has hidden states under the name of
logits. That is right only if all it does to them is to scale them. A soft cap that the config names can be taken out of
the forward; the fused loss applies it then.

So the forward is run twice on a stand-in for its decoder, which takes no weights and no time. Once the head gives
known logits. Once it gives known hidden states, without the cap, as the fused loss would have it. Each time, what comes
to the loss function is compared with what the head gave.
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
"""Label of a token that does not count."""
PROBE_ROWS = 2
"""Rows of the batch with which the forward is asked."""
PROBE_TOKENS = 3
"""Tokens of each of these rows."""
_ROUNDING_ULPS = 64
"""Units in the last place by which two ways of computing a logit may differ."""
_SOFTCAP_KEY = "final_logit_softcapping"
"""The name that configs have for the soft cap of logits that is taken out of the forward."""


def can_fuse(model: PreTrainedModel, units: Sequence[Unit]) -> bool:
    """Return whether head and loss of a skeleton may be one node. If a language model's may not, warn and say why.

    Args:
        model: the skeleton, on whose modules no nodes are installed yet.
        units: all of its units.
    """
    # A classifier has a few numbers for a row, where logits of a vocabulary would be large.
    if is_classifier(model.config):
        return False

    try:
        check_fusable(model, units)
    except UnsupportedModelError as reason:
        warnings.warn(f"the loss is not fused with the head, so a group's logits exist whole: {reason}", stacklevel=2)
        return False
    return True


def check_fusable(model: PreTrainedModel, units: Sequence[Unit]) -> None:
    """Ask the model's forward what it does between head and loss. No random number is drawn that others see.

    Raises:
        UnsupportedModelError: it does something that a fused loss does not. The message says what.
    """
    name = type(model).__name__
    if not _calls_loss_function(model):
        raise UnsupportedModelError(f"{name} of transformers {transformers.__version__} computes its loss by itself.")

    head = model.get_output_embeddings()
    module_names = [module_name for unit in units for module_name in unit.module_names]
    if not any(model.get_submodule(module_name) is head for module_name in module_names):
        raise UnsupportedModelError(f"the output embedding of {name} is not a unit of its own.")

    # A forward on the instance is somebody's own, which the fused loss would pass by.
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

    # The scale that fits best; if the forward does more than that, it does not fit well.
    scale = (hidden * scaled_hidden).sum() / hidden.square().sum()
    scales_hidden = _agree(scaled_hidden, scale * hidden)
    scales_logits = _agree(scaled_logits, capped(scale * logits, cap))
    if not (scales_hidden and scales_logits):
        raise UnsupportedModelError(f"the forward of {name} does more to the logits than to scale or cap them once.")


def product_of(head: nn.Module | None) -> nn.Linear | None:
    """Return the plain product that an output embedding is; None if it is something else.

    If PEFT trains a copy of a head as a whole (`modules_to_save`), the product is that copy.
    """
    if head is not None and is_adapter(head) and hasattr(head, "modules_to_save"):
        (head,) = cast("nn.ModuleDict", head.modules_to_save).values()

    if not isinstance(head, nn.Linear):
        return None
    # A subclass may compute something else, and a parametrised weight is no parameter of the module any more.
    computes_product = type(head).forward is nn.Linear.forward
    return head if computes_product and "weight" in head._parameters else None


def has_hooks(head: nn.Module) -> bool:
    """Return whether anything looks at what an output embedding gives, or at its gradient."""
    # Hooks before it see hidden states in either case.
    return bool(head._forward_hooks or head._backward_hooks or head._backward_pre_hooks)


def check_calls_loss_function(model: PreTrainedModel, remedy: str) -> None:
    """Check that a model takes its loss by way of `loss_function`, as most do.

    Raises:
        UnsupportedModelError: it does not.
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
    """Return whether a loss function is the one that a fused loss computes. What it calls may have been replaced."""
    vocab_size = 5
    numbers = torch.linspace(-1.0, 7.0, PROBE_ROWS * PROBE_TOKENS * vocab_size, dtype=torch.float32, device="cpu")
    logits = 3 * numbers.square().sin().view(PROBE_ROWS, PROBE_TOKENS, vocab_size)
    labels = torch.tensor([[0, 1, 4], [2, 3, IGNORE_INDEX]], dtype=torch.int64, device="cpu")
    mean = function(logits=logits, labels=labels, vocab_size=vocab_size)
    seventh = function(logits=logits, labels=labels, vocab_size=vocab_size, num_items_in_batch=7)

    # The same by hand. A token predicts the next one's label, so three of the six count.
    log_probabilities = logits.double().log_softmax(-1)
    first = log_probabilities[0, 0, 1]
    second = log_probabilities[0, 1, 4]
    third = log_probabilities[1, 0, 3]
    total = -(first + second + third)
    found = torch.stack([mean, seventh]).double()
    expected = torch.stack([total / 3, total / 7])
    return _agree(found, expected)


@contextmanager
def calling_for_loss(model: PreTrainedModel, function: Callable[..., Tensor]) -> Iterator[None]:
    """Replace the model's loss function for a while. Then it is what it was, if nobody has changed it meanwhile."""
    # transformers has a property, which looks for the attribute with an underscore.
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
    """Take the soft cap of logits out of the config for a while; yields the one that it names."""
    text = model.config.get_text_config()
    cap = getattr(text, _SOFTCAP_KEY, None)

    # Written past the config, since some configs are strict dataclasses that refuse None.
    without = {_SOFTCAP_KEY: None} if cap else {}
    with patched(vars(text), **without), patched(vars(model.config), **without):
        yield cap or None


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return logits with a soft cap, of the same shape and dtype."""
    return torch.tanh(logits / cap) * cap if cap else logits


class _Outputs(tuple[Tensor]):
    """The outputs of a stand-in for a decoder: hidden states alone, and None for all else that it is asked for."""

    def __getattr__(self, name: str) -> Tensor | None:
        # Code that asks for such a name, like `copy`, would take None for a method.
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


@dataclass(slots=True)
class _Passage:
    """The tensors that went from the head to the loss function in one forward: logits, or hidden states instead."""

    given: list[Tensor] = field(default_factory=list)
    """What each call of the head gave, as leaves that autograd finds."""
    arrived: list[Tensor] = field(default_factory=list)
    """What came to each call of the loss function."""
    ignored: set[int] = field(default_factory=set)
    """The labels that these calls said not to count."""

    def head(self, hidden: Tensor, width: int) -> Tensor:
        """Stand in for the head: give numbers of many sizes, so that a cap of any height shows."""
        generator = torch.Generator().manual_seed(len(self.given))
        shape = (*hidden.shape[:-1], width)
        numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        sizes = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")

        # From a hundredth to a thousand.
        factors = 10 ** (5 * sizes - 2)
        logits = numbers * factors
        logits.requires_grad_()
        self.given.append(logits)

        # The forward may change what it is given in place, which a leaf refuses.
        return logits * 1.0

    def loss(self, logits: Tensor, *_: object, ignore_index: int = IGNORE_INDEX, **__: object) -> Tensor:
        """Stand in for the loss function: note what came. The loss does not depend on it; what the forward adds may."""
        self.arrived.append(logits.detach().clone())
        self.ignored.add(ignore_index)

        # No leaf: a router's loss may be added to it in place.
        leaf = torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True)
        return leaf * 1.0

    def check(self, name: str, loss: object) -> None:
        """Refuse a passage that a fused loss would not see.

        Raises:
            UnsupportedModelError: the forward does more than to call the head, and the loss function on all it gave.
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

        # The stand-in's loss depends on no logit, so whatever leads back to one was added.
        if torch.is_tensor(loss) and loss.requires_grad:
            (grad,) = torch.autograd.grad(loss, self.given, allow_unused=True)
            if grad is not None:
                raise UnsupportedModelError(f"{name} adds a loss of the logits to the loss function's.")


def _ask(model: PreTrainedModel, head: nn.Module, in_features: int, width: int) -> tuple[Tensor, Tensor]:
    """Run one forward; returns what the head gave and what reached the loss function, each fp64 [tokens, width]."""
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
            # Some forwards call it outside of the body.
            patched(vars(model.get_input_embeddings()), forward=lambda *_, **__: hidden),
            patched(vars(head), forward=lambda x: passage.head(x, width)),
        ):
            # Past the model's own hooks, which note what they see, and run after the loss or change no logits.
            loss = model.forward(input_ids=ids, labels=ids, use_cache=False).loss
    except UnsupportedModelError:
        # After the loss a forward may need more than a stand-in has. But then it has been asked.
        if not passage.arrived:
            raise

    passage.check(name, loss)
    given = passage.given[0].detach()
    arrived = passage.arrived[0]
    return given.double().flatten(0, -2), arrived.double().reshape(-1, given.shape[-1])


def _body(model: PreTrainedModel, head: nn.Module) -> nn.Module:
    """Return the module that makes the hidden states: the outermost one with the layers and without the head."""
    layers = decoder_layers(model)
    module = cast("nn.Module", model)
    while True:
        module = next(child for child in module.children() if any(inside is layers for inside in child.modules()))
        if not any(inside is head for inside in module.modules()):
            return module


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Return whether fp64 numbers are equal in pairs, but for rounding in fp32."""
    tolerance = _ROUNDING_ULPS * torch.finfo(torch.float32).eps * expected.abs()
    return bool(((found - expected).abs() <= tolerance).all())


def name_of(function: object) -> str:
    """Return the name of a function, or the kind of what is none."""
    return getattr(function, "__name__", type(function).__name__)
