"""Words of the command line that are laid over a file: of settings that hold others, and with a minus in front."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jsonargparse import get_loader

from megatier.config.lora import NAMES
from megatier.config.values import parse_yaml
from megatier.errors import ConfigError

NESTED = ("config", "lora")
"""Settings of the model that hold settings of their own."""
BELOW = tuple(f"model.{key}." for key in NESTED)
AS_WRITTEN = tuple(f"model.lora.{key}" for key in NAMES)
"""Nested settings that are no YAML."""


def take_nested(overrides: Sequence[str], tree: dict[str, dict[str, Any]]) -> list[str]:
    """Set overrides of nested settings, and of keys inside them, in the tree; returns the other words."""
    words = list(overrides)
    rest = []

    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not (word.startswith("--") and f"{name}.".startswith(BELOW)):
            rest.append(word)
            continue

        # The value stands after an equals sign, or is the next word.
        if not equals and (not words or words[0].startswith("--")):
            raise ConfigError(f"{name} has no value. Write it as {name} VALUE.")

        *parents, leaf = name.split(".")
        target: dict[str, Any] = tree
        for parent in parents:
            if not isinstance(target.get(parent), dict):
                target[parent] = {}
            target = target[parent]

        value = text if equals else words.pop(0)
        if name in AS_WRITTEN:
            target[leaf] = value
            continue
        try:
            target[leaf] = parse_yaml(value, get_loader("yaml"))
        except ConfigError as error:
            raise ConfigError(f"{name} is {error}") from error

    return rest


def joined(words: Sequence[str]) -> list[str]:
    """Words in which a value that begins with a minus is joined to its key, since the parser takes it for a key."""
    found: list[str] = []
    for word in words:
        is_value = word.startswith("-") and not word.startswith("--")
        if is_value and found and found[-1].startswith("--") and "=" not in found[-1]:
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def settings_of(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the setting and the text of each override."""
    # The text is behind an equals sign, or the next word; the last word has none behind it.
    for word, following in itertools.pairwise([*joined(words), ""]):
        if word.startswith("--"):
            name, equals, text = word.removeprefix("--").partition("=")
            yield name, text if equals else following
