"""A run config that is made from the config of another trainer, with a finding for each key of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatier.config.schema import SECTIONS
from megatier.errors import ConfigError

Outcome = Literal["carried", "default", "left"]

AUTO = "auto"
"""Stands for a value that Hugging Face fills in from its own arguments, which such a file does not hold."""
FIGURE_MAX = 1e18
"""Larger numbers are refused, since nobody means them."""
DEPTH_MAX = 20
"""Levels of sections within sections."""
NUMERIC = ("train.", "data.", "model.")
"""Sections of ours that change a run's numbers. Tiers and output never do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The outcome of one key."""

    key: str
    """Its dotted name in the source."""
    value: str
    """The value as the file has it."""
    outcome: Outcome
    """Whether it was carried to settings of ours, left them at their default, or has no counterpart."""
    words: str
    """The settings to which it was carried, the default that stands, or the reason why it was left."""
    differs: bool
    """Whether the new run's numbers may differ from the other trainer's because of it."""

    def __str__(self) -> str:
        """Return the finding as one line."""
        return f"{_written(self.key)}: {self.value} {'->' if self.outcome == 'carried' else '-'} {self.words}"


class Conversion:
    """Settings by dotted name, findings, and the keys of the source that nobody has taken yet."""

    def __init__(self, trainer: str, source: str, tree: Mapping[str, Any]) -> None:
        """Begin with all keys of a file waiting.

        Args:
            trainer: whose file it is.
            source: its name, for messages.
            tree: what it holds.
        """
        self.trainer = trainer
        self.source = source
        self.settings: dict[str, object] = {}
        self.findings: list[Finding] = []
        self._waiting = dict(_leaves(tree))

    def has(self, key: str) -> bool:
        """Return whether the file gives the key, and nobody has taken it."""
        return key in self._waiting

    def raw(self, key: str) -> Any:  # noqa: ANN401  a file holds anything
        """Return the value of a key as it stands; None if the file has none, or leaves it to Hugging Face."""
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
        if value is not None and not _is_number(value):
            raise self.refused(key, "a number")
        return value  # type: ignore[no-any-return]

    def count(self, key: str, least: int = 1) -> int | None:
        """Return the key's value as a whole number of at least `least`; None as with `raw`.

        Raises:
            ConfigError: the value is no such number.
        """
        value = self.number(key)
        if value is None:
            return None
        if value != int(value) or value < least:
            raise self.refused(key, f"a whole number of at least {least}")
        return int(value)

    def flag(self, key: str) -> bool | None:
        """Return the key's value, true or false; None as with `raw`.

        Raises:
            ConfigError: the value is neither.
        """
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise self.refused(key, "true or false")
        return value

    def text(self, key: str, *among: str) -> str | None:
        """Return the key's value as text, which must be one of `among` if any are given; None as with `raw`.

        Raises:
            ConfigError: the value is no such text.
        """
        value = self.raw(key)
        if value is None:
            return None
        if among and value not in among:
            raise self.refused(key, f"one of {', '.join(among)}")
        if not isinstance(value, str) or not (among or _is_plain(value)):
            raise self.refused(key, "text")
        return value

    def numbers(self, key: str, length: int) -> Sequence[float] | None:
        """Return the key's value as a list of finite numbers; None as with `raw`.

        Raises:
            ConfigError: the value is no list of so many numbers.
        """
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(_is_number(item) for item in value):
            raise self.refused(key, f"a list of {length} numbers")
        return value

    def refused(self, key: str, bound: str) -> ConfigError:
        """Return the error that says of a key's value that it makes no sense."""
        found = _written(self._waiting.get(key))
        return ConfigError(f"{self.source}: {key} is {found}; it must be {bound}. Change it there, or remove it.")

    # ------------------------------------------------------------------ findings

    def carry(self, key: str, settings: Mapping[str, object], remark: str = "", *, differs: bool = False) -> None:
        """Carry the key's value to these settings. Without any, the value is what megatier always does.

        The file need not give the key: then the default of the other trainer is carried.
        """
        # A later carry overrides an earlier one, as keys of the source override each other.
        self.settings |= settings
        words = ", ".join(f"{name}: {_written(value)}" for name, value in settings.items())
        if words and remark:
            words += "; "
        self._found(key, "carried", words + remark, differs=differs)

    def default(self, key: str, *settings: str) -> None:
        """Leave the settings at their defaults, because the key says `auto` or null."""
        words = []
        for setting in settings:
            section, _, name = setting.partition(".")
            value = SECTIONS[section].__dataclass_fields__[name].default
            words.append(f"{setting} stays at its default, {_written(value)}")

        # What Hugging Face or the other trainer would have taken may be another value.
        differs = any(name.startswith(NUMERIC) for name in settings)
        self._found(key, "default", "; ".join(words), differs=differs)

    def leave(self, key: str, why: str, *, differs: bool = False) -> None:
        """Note that the key has no counterpart."""
        self._found(key, "left", why, differs=differs)

    def send(self, key: str, setting: str, value: object, remark: str = "", *, differs: bool = False) -> None:
        """Carry a value that was read, or note that the default stands. Does nothing if the file has no such key."""
        if not self.has(key):
            return
        if self.raw(key) is None:
            self.default(key, setting)
        else:
            self.carry(key, {setting: value}, remark, differs=differs)

    def leave_below(self, section: str, why: str) -> None:
        """Leave all keys of a section that are still waiting, whose counterparts change numbers."""
        for key in [key for key in self._waiting if key.startswith(f"{section}.")]:
            self.leave(key, why, differs=True)

    def leave_rest(self, reasons: Mapping[str, str], differing: Collection[str]) -> None:
        """Give a reason for all keys still waiting, by the key or what it lies in.

        Args:
            reasons: by name.
            differing: those of the names without whose keys the run's numbers may differ.
        """
        for key in list(self._waiting):
            # The longest name comes first, so that the reason of a key goes before the reason of its section.
            name = key
            while name and name not in reasons:
                name = name.rpartition(".")[0]
            if name:
                self.leave(key, reasons[name], differs=name in differing)
            else:
                self.leave(key, f"no key of {self.trainer} that is known here", differs=True)

    def _found(self, key: str, outcome: Outcome, words: str, *, differs: bool) -> None:
        value = _written(self._waiting.pop(key)) if key in self._waiting else "(not given)"
        self.findings.append(Finding(key=key, value=value, outcome=outcome, words=words, differs=differs))


def _leaves(tree: Mapping[str, Any], before: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and values of all settings. An empty section counts as a value, and gets a finding too."""
    if depth > DEPTH_MAX:
        raise RecursionError
    for name, value in tree.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.", depth + 1)
        else:
            yield key, value


def _is_number(value: object) -> bool:
    """Return whether a value is a finite number, of a size that somebody may mean. True and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -FIGURE_MAX < value < FIGURE_MAX


def _written(value: object) -> str:
    """Return a value on one line, as a file has it."""
    return str(value) if _is_plain(value) else json.dumps(value, default=str, skipkeys=True)


def _is_plain(value: object) -> bool:
    """Return whether a value is text that a terminal and YAML show as it is."""
    return isinstance(value, str) and value != "" and value.isprintable()
