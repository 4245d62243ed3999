"""A run config that is made from the config of another trainer, with a finding for each key of it."""

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
"""Stands for a value that Hugging Face fills in from its own arguments, which such a file does not hold."""
NUMBER_MAX = 1e18
"""Larger numbers are refused, since nobody means them."""
SECTION_DEPTH_MAX = 20
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
    outcome: KeyOutcome
    """Whether it was carried to settings of ours, left them at their default, or has no counterpart."""
    words: str
    """The settings to which it was carried, the default that stands, or the reason why it was left."""
    differs: bool
    """Whether the new run's numbers may differ from the other trainer's because of it."""

    def __str__(self) -> str:
        """Return the finding as one line."""
        arrow = "->" if self.outcome == "carried" else "-"
        return f"{_written(self.key)}: {self.value} {arrow} {self.words}"


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
        # A key leaves with its finding, so what still waits at the end is what no rule knows.
        self._waiting = dict(_leaves(tree))

    def has(self, key: str) -> bool:
        """Return whether the file gives the key, and nobody has taken it."""
        return key in self._waiting

    def raw(self, key: str) -> Any:  # noqa: ANN401  a file holds anything
        """Return the value of a key as it stands; None if the file has none, or leaves it to Hugging Face."""
        # DeepSpeed's files say `auto` where Hugging Face's Trainer fills a value in.
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
            # A count that is written as 1e3 arrives as a float, and is a whole number all the same.
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
        """Return the value of a key, which must be None or fit.

        Raises:
            ConfigError: it does not; the message says what it is bound to be.
        """
        if value is not None and not fits(value):
            # As the file has it, and not as it was read.
            found = _written(self._waiting.get(key))
            raise ConfigError(f"{self.source}: {key} is {found}; it must be {bound}. Change it there, or remove it.")
        return value

    # ------------------------------------------------------------------ findings

    def carry(self, key: str, settings: Mapping[str, object], remark: str = "", *, differs: bool = False) -> None:
        """Carry the key's value to these settings. Without any, the value is what megatier always does.

        The file need not give the key: then the default of the other trainer is carried.
        """
        # A later carry overrides an earlier one, as keys of the source override each other.
        self.settings |= settings
        assigned = []
        for name, value in settings.items():
            written = _written(value)
            assigned.append(f"{name}: {written}")
        carried = ", ".join(assigned)

        # Either of the two may be empty: what megatier always does has no setting, and most settings need no remark.
        words = "; ".join(filter(None, (carried, remark)))
        self._found(key, "carried", words, differs=differs)

    def default(self, key: str, *settings: str) -> None:
        """Leave the settings at their defaults, because the key says `auto` or null, unless there is no such key."""
        if not self.has(key):
            return
        words = []
        for setting in settings:
            section, _, name = setting.partition(".")
            value = CONFIG_SECTIONS[section].__dataclass_fields__[name].default
            words.append(f"{setting} stays at its default, {_written(value)}")

        # What Hugging Face or the other trainer would have taken may be another value.
        differs = any(name.startswith(NUMERIC) for name in settings)
        self._found(key, "default", "; ".join(words), differs=differs)

    def agree(self, key: str, words: str, *, differs: bool = False) -> None:
        """Note that the key's value is what megatier always does. Does nothing if the file has no such key."""
        if self.has(key):
            self.carry(key, {}, words, differs=differs)

    def leave(self, key: str, why: str, *, differs: bool = False, is_implied: bool = False) -> None:
        """Note that the key has no counterpart. Does nothing if the file has no such key, unless that implies one."""
        if is_implied or self.has(key):
            self._found(key, "left", why, differs=differs)

    def send(
        self, key: str, setting: str, value: object, remark: str = "", *, default: object = None, differs: bool = False
    ) -> None:
        """Carry a value that was read.

        If the file has none, the other trainer's default is carried, if there is one. Without that, ours stands.
        """
        is_open = self.raw(key) is None
        if is_open and default is None:
            self.default(key, setting)
            return
        carried = default if is_open else value
        self.carry(key, {setting: carried}, remark, differs=differs)

    def leave_below(self, section: str, why: str) -> None:
        """Leave all keys of a section that are still waiting, whose counterparts change numbers."""
        # A list, since `leave` takes keys out of what waits.
        for key in [key for key in self._waiting if key.startswith(f"{section}.")]:
            self.leave(key, why, differs=True)

    def convert(self, rules: Mapping[str, Rule], reasons: Mapping[str, str], differing: Mapping[str, str]) -> None:
        """Go by the table of a trainer: carry what has a counterpart, and say of the rest why it has none.

        Args:
            rules: what becomes of keys, in this order.
            reasons: why others have no counterpart, by the key or what it lies in.
            differing: the same, of those without which the run's numbers may differ.

        Raises:
            ConfigError: a value makes no sense, or contradicts another.
        """
        for key, rule in rules.items():
            rule(self, key)

        known = {**reasons, **differing}
        for key in list(self._waiting):
            # The longest name comes first, so that the reason of a key goes before the reason of its section.
            name = key
            while name and name not in known:
                name = name.rpartition(".")[0]
            why = known.get(name, f"no key of {self.trainer} that is known here")
            # Of a key that nobody knows it is safer to say that it may change numbers.
            self.leave(key, why, differs=name not in reasons)

    def _found(self, key: str, outcome: KeyOutcome, words: str, *, differs: bool) -> None:
        # No longer waiting, so that each key has one finding.
        value = "(not given)"
        if key in self._waiting:
            value = _written(self._waiting.pop(key))
        self.findings.append(Finding(key=key, value=value, outcome=outcome, words=words, differs=differs))


Rule = Callable[[Conversion, str], None]
"""What becomes of a key, and of those that go with it."""
Table = tuple[Mapping[str, Rule], Mapping[str, str], Mapping[str, str]]
"""Rules, and reasons why other keys are left; see `Conversion.convert`."""


def becomes(
    setting: str,
    read: Callable[[Conversion, str], object],
    default: object = None,
    remark: str = "",
    *,
    differs: bool = False,
) -> Rule:
    """Return the rule of a key that is a setting of ours by itself; see `Conversion.send`."""
    return lambda made, key: made.send(key, setting, read(made, key), remark, default=default, differs=differs)


def turns_on(settings: Mapping[str, object], remark: str = "") -> Rule:
    """Return the rule of a key that stands for some settings if it is true."""
    return lambda made, key: made.carry(key, settings, remark) if made.flag(key) else None


def below(section: str, table: Mapping[str, str]) -> dict[str, str]:
    """Return a table of keys that lie in a section."""
    return {f"{section}.{name}": why for name, why in table.items()}


COUNT_FROM_0 = partial(Conversion.count, least=0)
COUNT_FROM_2 = partial(Conversion.count, least=2)


def _leaves(tree: Mapping[str, Any], before: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and values of all settings. An empty section counts as a value, and gets a finding too."""
    if depth > SECTION_DEPTH_MAX:
        # The error that Python raises itself where lists are too deep, so that a caller needs to know one alone.
        raise RecursionError
    for name, value in tree.items():
        key = f"{before}{name}"
        is_section = isinstance(value, Mapping) and bool(value)
        if is_section:
            yield from _leaves(value, f"{key}.", depth + 1)
        else:
            yield key, value


def is_number(value: object) -> bool:
    """Return whether a value is a finite number, of a size that somebody may mean. True and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -NUMBER_MAX < value < NUMBER_MAX


def _written(value: object) -> str:
    """Return a value on one line, as a file has it."""
    # YAML also has dates, and keys that are no text, which JSON would refuse. A message must not fail on them.
    return str(value) if _is_plain(value) else json.dumps(value, default=str, skipkeys=True)


def _is_plain(value: object) -> bool:
    """Return whether a value is text that a terminal and YAML show as it is."""
    return isinstance(value, str) and value != "" and value.isprintable()
