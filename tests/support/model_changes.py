"""Changes that somebody makes on a model: a list of them, and the modules that they change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatier.models.decoder import decoder_layers


@dataclass(frozen=True)
class Change:
    """A change that somebody makes on a model."""

    apply: Callable[[Any], None]
    """Makes it."""
    named: tuple[str, ...] = ()
    """What a refusal has to name, at least one of them. Without any, the change may not be refused."""

    @property
    def name(self) -> str:
        return self.apply.__name__


class Changes(list[Change]):
    """Changes of one subject, in the order in which they are written."""

    def add(self, *named: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
        """Add a function as a change; see `Change.named`."""

        def add(apply: Callable[[Any], None]) -> Callable[[Any], None]:
            self.append(Change(apply, named))
            return apply

        return add


def layer_of(model: Any, index: int = 0) -> Any:
    return decoder_layers(model)[-index]


def norm_of(model: Any) -> Any:
    """The last norm."""
    return next(reversed([m for m in model.modules() if type(m).__name__.endswith(("Norm", "LayerNorm"))]))


def mlp_of(model: Any, index: int = 0) -> Any:
    return layer_of(model, index).mlp


def linear_of(model: Any) -> tuple[Any, str]:
    """A module of the first layer's attention, and a name of a linear map in it."""
    layer = layer_of(model)
    return (layer.attn, "c_attn") if hasattr(layer, "attn") else (layer.self_attn, "q_proj")
