"""Words of the command line that are laid over the sections of a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatier.config.lora import LORA_NAMES
from megatier.config.names import suggest_names
from megatier.config.schema import CONFIG_SECTIONS
from megatier.config.section import hints
from megatier.config.values import parse_yaml
from megatier.errors import ConfigError
from megatier.foreign import printable

NESTED = ("model.config", "model.lora")
"""Settings that hold settings of their own."""
AS_WRITTEN = tuple(f"model.lora.{key}" for key in LORA_NAMES)
"""Nested settings that are no YAML."""


def parse_overrides(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the setting and the text of each override.

    Raises:
        ConfigError: a word is no override, or has no value.
    """
    # One iterator for the loop and for values, so that a value is not taken for the next setting.
    waiting = iter(words)
    for word in waiting:
        if not word.startswith("--"):
            raise ConfigError(
                f"{printable(word)} is no setting: settings are written --section.key VALUE, after the config file."
            )

        # The text is behind an equals sign, or the next word, which may begin with a minus.
        name, equals, text = word[2:].partition("=")
        # A nested setting is of a class of transformers, or of adapters, which checks its own names.
        if not is_nested(name):
            check_known([name])
        if not equals:
            # Where no word is left, two dashes are refused below like a further setting.
            text = next(waiting, "--")
        if not equals and text.startswith("--"):
            raise ConfigError(f"{printable(name)} has no value. Write it as --{printable(name)} VALUE.")
        yield name, text


def merge_settings(tree: Mapping[str, Mapping[str, Any]], overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return sections with overrides in them: the last one of a setting wins, and each wins over the sections.

    Raises:
        ConfigError: as `parse_overrides`, or a nested setting is no YAML.
    """
    laid: dict[str, Any] = {name: dict(keys) for name, keys in tree.items()}
    for name, text in parse_overrides(overrides):
        value: Any = text

        # Settings of ours are parsed by the section, which knows their types. What is inside of a nested one nobody
        # here knows, so it is YAML.
        if is_nested(name) and name not in AS_WRITTEN:
            try:
                value = parse_yaml(text)
            except ConfigError as error:
                raise ConfigError(f"{name} is {error}") from error

        *parents, leaf = name.split(".")
        target = laid
        for parent in parents:
            # Copied on the way, since the sections may be another's.
            inner = target.get(parent)
            copied = dict(inner) if isinstance(inner, dict) else {}
            target[parent] = copied
            target = copied
        target[leaf] = value
    return laid


def is_nested(name: str) -> bool:
    """Return whether a setting holds others, or is held by another."""
    return f"{name}.".startswith(NESTED)


def check_known(keys: Iterable[str], where: str | None = None) -> None:
    """Refuse unknown keys, and name the nearest known one, and the file if they stand in one.

    Raises:
        ConfigError: names the first one.
    """
    # The section of a misspelt key is known in most cases, so the hint names its neighbours and not all settings.
    by_section = {name: [f"{name}.{key}" for key in hints(section)] for name, section in CONFIG_SECTIONS.items()}
    known = list(itertools.chain.from_iterable(by_section.values()))
    for key in keys:
        if key in known:
            continue
        if key in CONFIG_SECTIONS:
            raise ConfigError(f"{key} is a section; set one of its keys, such as --{by_section[key][0]}.")

        near = suggest_names(key, [*known, *CONFIG_SECTIONS], cutoff=0.5)
        section, _, _ = key.partition(".")
        siblings = by_section.get(section, list(CONFIG_SECTIONS))
        hint = f"did you mean {near}?" if near else f"known are {', '.join(siblings)}."
        place = f"{where}: " if where else ""
        raise ConfigError(f"{place}unknown setting {printable(key)}; {hint}")
