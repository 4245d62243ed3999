"""Freezes parameters of a model by patterns over their names.

A pattern is the name of a parameter, or of a module with everything below it. `*`, `?` and `[...]` work as in fnmatch,
so `*` matches dots too. A pattern after `!` names what is trained all the same. If several patterns match a parameter,
the last one decides. For example, `["model.embed_tokens", "model.layers.[0-7]"]` freezes an embedding and eight layers,
and `["*", "!*.q_proj"]` everything except the query projections.

A frozen parameter is one with `requires_grad=False`, as in any PyTorch model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from megatier.config.values import parse_list
from megatier.errors import ConfigError


def freeze(model: nn.Module, patterns: str | Sequence[str], setting: str = "model.frozen") -> None:
    """Set which parameters of a model require a gradient. Parameters that no pattern matches stay as they are.

    A tied parameter matches by any of its names.

    Args:
        model: a skeleton.
        patterns: what is frozen, or trained all the same; a list, or comma-separated.
        setting: name of the setting, for messages.

    Raises:
        ConfigError: a pattern matches no parameter, or all parameters are frozen.
    """
    # By the parameter's id, since a tied parameter matches by any of its names.
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of[id(parameter)].append(name)

    # In order, since a later pattern may undo an earlier one.
    for pattern in parse_list(patterns, setting):
        wanted = pattern.removeprefix("!")
        is_trained = pattern != wanted
        named = [p for p in model.parameters() if any(is_named(name, wanted) for name in names_of[id(p)])]
        if not named:
            raise ConfigError(f"{setting}: {pattern!r} names no parameter of this model. {_nearest(model, wanted)}")
        for parameter in named:
            parameter.requires_grad_(is_trained)

    # A run that trains nothing would end with the model that it began with.
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{setting}: every parameter of this model is frozen, so there is nothing to train. Name what is trained "
            'after the others, such as "!model.layers.0".'
        )


def is_named(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a parameter, or a module above it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _nearest(model: nn.Module, pattern: str) -> str:
    """Suggest names of parameters and modules that are similar to a pattern."""
    parameters = [name for name, _ in model.named_parameters()]
    owners = list[str]()
    for name, module in model.named_modules():
        # The root has no name, and a module without parameters would match nothing.
        if name and next(module.parameters(), None) is not None:
            owners.append(name)

    near = get_close_matches(pattern, [*owners, *parameters], n=3, cutoff=0.5)
    if not near:
        return f"Its parameters have names such as {parameters[0]}."
    return f"Near it are {', '.join(near)}."
