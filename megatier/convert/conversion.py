"""Builds a run config from another trainer's config, with a finding for each of its keys."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from megatier.config.schema import CONFIG_SECTIONS
from megatier.errors import ConfigError

KeyOutcome = Literal["carried", "default", "left"]

AUTO = "auto"
"""A value that Hugging Face fills in from its own arguments, which such a file does not hold."""
NUMBER_MAX = 1e18
"""The largest number that is accepted, since larger ones are mistakes."""
SECTION_DEPTH_MAX = 20
"""The most levels of nested sections."""
NUMERIC = ("train.", "data.", "model.")
"""Our sections that affect a run's results. Tiers and output never do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What became of one key."""

    key: str
    """Its dotted name in the source."""
    value: str
    """Its value in the file."""
    outcome: KeyOutcome
    """Whether it was carried over to our settings, left them at their default, or has no counterpart."""
    explanation: str
    """The resulting settings, the default that applies, or why there is no counterpart."""
    differs: bool
    """Whether the new run's results may differ from the other trainer's because of this key."""

    def __str__(self) -> str:
        """Return the finding as one line."""
        arrow = "->" if self.outcome == "carried" else "-"
        return f"{_written(self.key)}: {self.value} {arrow} {self.explanation}"


class Conversion:
    """The settings and findings so far, and the keys of the source that are still pending."""

    def __init__(self, trainer: str, source: str, tree: Mapping[str, Any]) -> None:
        """Begin with all keys of a file pending.

        Args:
            trainer: the name of the trainer.
            source: the name of the file, for messages.
            tree: the contents of the file.
        """
        self.trainer = trainer
        self.source = source
        self.settings: dict[str, object] = {}
        self.findings: list[Finding] = []
        # A key is removed with its finding, so keys that are left at the end have no rule.
        self._waiting = dict(_leaves(tree))

    def has(self, key: str) -> bool:
        """Return whether the file has the key and it is still pending."""
        return key in self._waiting

    def raw(self, key: str) -> Any:  # noqa: ANN401  a file holds anything
        """Return a key's value as it is; None if it is missing, or left to Hugging Face."""
        # DeepSpeed's files have `auto` where Hugging Face's Trainer fills in a value.
        value = self._waiting.get(key)
        return None if value == AUTO else value

    # ------------------------------------------------------------------ values, checked

    def number(self, key: str) -> float | None:
        """Return the key's value as a finite number; None as with `raw`.

        Raises:
            ConfigError: the value is no finite number.
        """
        value = self.raw(key)
        if isinstance(value, str):  # YAML reads 1e-5 as text
            with contextlib.suppress(ValueError):
                value = float(value)
        number: float | None = self.checked(key, value, "a number", is_number)
        return number

    def count(self, key: str, least: int = 1) -> int | None:
        """Return the key's value as a whole number of at least `least`; None as with `raw`.

        Raises:
            ConfigError: the value is no such number.
        """

        def fits(number: float) -> bool:
            # A count that is written as 1e3 is read as a float, but is a whole number.
            return number == int(number) and number >= least

        number = self.number(key)
        self.checked(key, number, f"a whole number of at least {least}", fits)
        return None if number is None else int(number)

    def flag(self, key: str) -> bool | None:
        """Return the key's value, true or false; None as with `raw`.

        Raises:
            ConfigError: the value is neither.
        """
        flag: bool | None = self.checked(key, self.raw(key), "true or false", lambda value: isinstance(value, bool))
        return flag

    def text(self, key: str, *among: str) -> str | None:
        """Return the key's value as text, which must be one of `among` if any are given; None as with `raw`.

        Raises:
            ConfigError: the value is no such text.
        """
        value = self.raw(key)
        bound = "text"
        fits: Callable[[Any], bool] = _is_plain
        if among:
            bound = f"one of {', '.join(among)}"
            fits = among.__contains__
        text: str | None = self.checked(key, value, bound, fits)
        return text

    def checked(self, key: str, value: Any, bound: str, fits: Callable[[Any], bool]) -> Any:  # noqa: ANN401
        """Return a key's value, after checking that it is None or valid.

        Raises:
            ConfigError: it is not valid. The message says what it must be.
        """
        if value is not None and not fits(value):
            # As in the file, before it was parsed.
            written = _written(self._waiting.get(key))
            raise ConfigError(f"{self.source}: {key} is {written}; it must be {bound}. Change it there, or remove it.")
        return value

    # ------------------------------------------------------------------ findings

    def set(self, key: str, settings: Mapping[str, object], remark: str = "", *, differs: bool = False) -> None:
        """Carry the key's value over to settings. Without settings, the value is what megatier always does.

        If the file lacks the key, the other trainer's default is carried.
        """
        # Later settings override earlier ones, as keys of the source do.
        self.settings |= settings
        assigned = []
        for name, value in settings.items():
            written = _written(value)
            assigned.append(f"{name}: {written}")
        carried = ", ".join(assigned)

        # Either may be empty: what megatier always does has no setting, and most settings need no remark.
        explanation = "; ".join(filter(None, (carried, remark)))
        self._found(key, "carried", explanation, differs=differs)

    def default(self, key: str, *settings: str) -> None:
        """Leave the settings at their defaults if the key says `auto` or null. Do nothing if there is no such key."""
        if not self.has(key):
            return
        explanation = []
        for setting in settings:
            section, _, name = setting.partition(".")
            value = CONFIG_SECTIONS[section].__dataclass_fields__[name].default
            explanation.append(f"{setting} stays at its default, {_written(value)}")

        # Hugging Face or the other trainer might use another value.
        differs = any(name.startswith(NUMERIC) for name in settings)
        self._found(key, "default", "; ".join(explanation), differs=differs)

    def agree(self, key: str, remark: str, *, differs: bool = False) -> None:
        """Record that the key's value is what megatier always does. Do nothing if there is no such key."""
        if self.has(key):
            self.set(key, {}, remark, differs=differs)

    def leave(self, key: str, why: str, *, differs: bool = False, is_implied: bool = False) -> None:
        """Record that the key has no counterpart. Do nothing if there is no such key, unless it is implied."""
        if is_implied or self.has(key):
            self._found(key, "left", why, differs=differs)

    def send(
        self, key: str, setting: str, value: object, remark: str = "", *, default: object = None, differs: bool = False
    ) -> None:
        """Carry a parsed value over to a setting.

        If the file has none, the other trainer's default is carried. Without one, our default applies.
        """
        is_open = self.raw(key) is None
        if is_open and default is None:
            self.default(key, setting)
            return
        carried = default if is_open else value
        self.set(key, {setting: carried}, remark, differs=differs)

    def leave_below(self, section: str, why: str) -> None:
        """Record for all pending keys of a section that they have no counterpart, and that results may differ."""
        # A list, since `leave` removes pending keys.
        for key in [key for key in self._waiting if key.startswith(f"{section}.")]:
            self.leave(key, why, differs=True)

    def convert(self, rules: Mapping[str, Rule], reasons: Mapping[str, str], differing: Mapping[str, str]) -> None:
        """Convert all keys by a trainer's table: carry those with a counterpart, and say why the others have none.

        Args:
            rules: the conversion of keys, in this order.
            reasons: why other keys have no counterpart, by key or section.
            differing: the same for keys without which the results may differ.

        Raises:
            ConfigError: a value makes no sense, or contradicts another.
        """
        for key, rule in rules.items():
            rule(self, key)

        known = {**reasons, **differing}
        for key in list(self._waiting):
            # The longest name first, so that a key's own reason takes precedence over its section's.
            name = key
            while name and name not in known:
                name = name.rpartition(".")[0]
            why = known.get(name, f"no key of {self.trainer} that is known here")
            # An unknown key is assumed to affect results.
            self.leave(key, why, differs=name not in reasons)

    def _found(self, key: str, outcome: KeyOutcome, explanation: str, *, differs: bool) -> None:
        # Removed from the pending keys, so that each key has one finding.
        value = "(not given)"
        if key in self._waiting:
            value = _written(self._waiting.pop(key))
        self.findings.append(Finding(key=key, value=value, outcome=outcome, explanation=explanation, differs=differs))


Rule = Callable[[Conversion, str], None]
"""Converts a key, and those that belong to it."""
Table = tuple[Mapping[str, Rule], Mapping[str, str], Mapping[str, str]]
"""The rules, and the reasons for other keys; see `Conversion.convert`."""


def becomes(
    setting: str,
    read: Callable[[Conversion, str], object],
    default: object = None,
    remark: str = "",
    *,
    differs: bool = False,
) -> Rule:
    """Return the rule of a key that corresponds to one setting; see `Conversion.send`."""
    return lambda conversion, key: conversion.send(
        key, setting, read(conversion, key), remark, default=default, differs=differs
    )


def turns_on(settings: Mapping[str, object], remark: str = "") -> Rule:
    """Return the rule of a key that sets these settings if it is true."""
    return lambda conversion, key: conversion.set(key, settings, remark) if conversion.flag(key) else None


def below(section: str, table: Mapping[str, str]) -> dict[str, str]:
    """Return a table with the names prefixed by a section."""
    return {f"{section}.{name}": why for name, why in table.items()}


COUNT_FROM_0 = partial(Conversion.count, least=0)
COUNT_FROM_2 = partial(Conversion.count, least=2)


def _leaves(tree: Mapping[str, Any], before: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and values of all settings. An empty section counts as a value, so it gets a finding."""
    if depth > SECTION_DEPTH_MAX:
        # Python's own error for lists that are too deep, so that callers handle one error.
        raise RecursionError
    for name, value in tree.items():
        key = f"{before}{name}"
        is_section = isinstance(value, Mapping) and bool(value)
        if is_section:
            yield from _leaves(value, f"{key}.", depth + 1)
        else:
            yield key, value


def is_number(value: object) -> bool:
    """Return whether a value is a finite number of plausible size. Booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -NUMBER_MAX < value < NUMBER_MAX


def _written(value: object) -> str:
    """Format a value on one line, as in a file."""
    # YAML also has dates and keys that are not text, which JSON refuses. A message must not fail on them.
    return str(value) if _is_plain(value) else json.dumps(value, default=str, skipkeys=True)


def _is_plain(value: object) -> bool:
    """Return whether a value is text that needs no quotes."""
    return isinstance(value, str) and value != "" and value.isprintable()
