"""Reads values of a config from text: sizes, mounts, lists, YAML. Says what is wrong with them. Pure."""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
import re
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from megatier.errors import ConfigError
from megatier.foreign import printable, quoted, read_input

ByteCount = Annotated[int, "bytes"]
"""Bytes: a plain int, or text such as "96GiB" or "500 MB" in YAML and on the command line. There, budgets below a
mebibyte have a unit (`require_unit`)."""

YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""The errors that yaml raises: for text that is no YAML, values such as 2026-13-45, and tags that do not fit theirs."""
YAML_BYTES_MAX = 1 << 20
"""Most bytes of a file. YAML is read at one megabyte a second or less."""
YAML_VALUES_MAX = 100_000
"""Most values of a document, with aliases unfolded. The next two count so as well."""
YAML_DEPTH_MAX = 50
YAML_CHARACTERS_MAX = 4 << 20
YAML_EVENTS_MAX = 2 * YAML_VALUES_MAX
"""Most events of a document: a list is two, because it begins and ends."""
TOO_MUCH = (
    f"it has more than {YAML_VALUES_MAX} values, {YAML_CHARACTERS_MAX} characters, or {YAML_DEPTH_MAX} nested levels"
)
LEAST = 2.0**-126
"""The least number above 0 that the kernels of optimizers do not take for 0."""
LARGEST = (2 - 2.0**-23) * 2.0**127
"""The largest number of fp32."""
WHOLE_MAX = (1 << 63) - 1
"""The largest whole number that C and torch take."""

# Not 1: moments are corrected by 1 - beta**step, which would be 0.
_SHARE = (0.0, math.nextafter(1, 0), "from 0 to below 1")
RANGES = {
    "eps": (LEAST, LARGEST, "above 0 in fp32"),
    "clip": (math.nextafter(0, 1), LARGEST, "above 0, or null (None) for no clipping"),
    "beta1": _SHARE,
    "beta2": _SHARE,
    "momentum": _SHARE,
}
"""The least and the largest value of settings of an optimizer, and both in words. The others are at least 0."""
BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    BYTE_UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


@dataclass(frozen=True, slots=True)
class MountBudget:
    """The share of the NVMe tier that lies on one mount."""

    directory: Path
    """A directory on the mount's drive."""
    num_bytes: int | None
    """Bytes that megatier may fill; None: all that is free."""


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as "96GiB", "500 MB", "1.5g", "4096" or "1e9".

    K, M, G, T, P alone are powers of 1024.

    Raises:
        ConfigError: not a size.
    """
    # No unit has an E, which is an exponent's.
    size = text.strip().lower()
    match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?(?:e\d{1,2})?)\s*([a-df-z]*)", size)
    # The pattern bounds the digits, of which Python takes no more than some thousands.
    if match is None or match[2] not in BYTE_UNITS:
        raise ConfigError(f"{text!r} is no byte size; write 96GiB, 500MB or a plain number of bytes")

    number, name = match.groups()
    unit = BYTE_UNITS[name]

    # A float would round large whole numbers.
    if number.isdigit():
        return int(number) * unit
    return int(float(number) * unit)


def require_unit(name: str, written: object) -> None:
    """Refuse a size of less than a mebibyte that is written as a plain number: 64 is meant as 64GiB.

    Args:
        name: what it is, for the message.
        written: the size as somebody wrote it; None: there is none.

    Raises:
        ConfigError: names the spellings.
    """
    text = quoted(written, str).strip().lower()
    is_plain = re.fullmatch(r"[0-9]{1,20}(\.[0-9]{1,20})?(e[0-9]{1,2})?", text)
    # 0 needs no unit.
    if is_plain and 0 < float(text) < 1 << 20:
        raise ConfigError(
            f"{name} is {text}, and a number without a unit is bytes. Write {text}GiB, or {text}B if you mean bytes."
        )


class _Values(Composer, SafeConstructor, Resolver):
    """Makes nodes and values of events, and reads numbers as people and JSON write them.

    By YAML 1.1 alone 2e-5 is text, 12:30:00 is 45000 in base 60, 010 is 8, and 2026-01-01 is a date.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  as in its base
        first: [rule for rule in rules if rule[0].rpartition(":")[2] not in ("int", "float", "timestamp")]
        for first, rules in Resolver.yaml_implicit_resolvers.items()
    }

    def __init__(self, events: Iterable[yaml.Event]) -> None:
        """Take the events of a whole document."""
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self._events = deque(events)

    # The next three are what `Composer` asks a parser for. The parser is by far the slowest part of PyYAML, so a text
    # is parsed once, although its events are looked at before nodes are made of them.

    def check_event(self, *choices: type[yaml.Event]) -> bool:
        """Return whether the next event is one of these."""
        return isinstance(self._events[0], choices)

    def peek_event(self) -> yaml.Event:
        """Return the next event."""
        return self._events[0]

    def get_event(self) -> yaml.Event:
        """Return the next event, and go on to the one after it."""
        return self._events.popleft()


POINT = r"(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?"
NUMBER_PATTERNS = {
    "int": r"[-+]?(0|[1-9][\d_]*|0b[01_]+|0x[\da-fA-F_]+)$",
    "float": rf"[-+]?({POINT}|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$",
}
"""How numbers look."""
for _kind, _looks in NUMBER_PATTERNS.items():
    # PyYAML tries a rule only on values that begin with one of these characters.
    _Values.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_looks), list("-+.0123456789"))


def parse_yaml(text: str) -> Any:  # noqa: ANN401  YAML holds anything
    """Parse YAML text.

    Raises:
        ConfigError: it is no valid YAML, or has more values or deeper ones, with its aliases unfolded, than anybody
            writes.
    """
    try:
        # Each pass refuses what would cost the next one time or memory without bounds.
        values = _Values(_events(text))
        root = values.get_single_node()
        if root is None:
            return None
        _check_unfolded(root)
        return values.construct_document(root)
    except YAML_ERRORS as error:
        raise ConfigError(f"no valid YAML: {printable(' '.join(str(error).split()))}") from error


def read_yaml(path: Path) -> Any:  # noqa: ANN401
    """Parse a YAML file.

    Raises:
        ConfigError: it cannot be read, or as in `parse_yaml`; names the file.
    """
    text = read_text_of(path)
    try:
        return parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path} is {error}") from error


def read_text_of(path: Path) -> str:
    """Return the text of a config that the user named, which may be a pipe: `megatier train <(envsubst < run.yaml)`.

    Raises:
        ConfigError: it cannot be read, or is larger than any config.
    """
    try:
        raw = read_input(path, YAML_BYTES_MAX, ConfigError, pipes=True)
        return raw.decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Check its name.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no valid YAML: {error.reason} at byte {error.start}.") from error


def _events(text: str) -> list[yaml.Event]:
    """Return the parser's events, and refuse too many or too deep values, before nodes are made of them.

    Making nodes takes longer, and recurses. The parser itself is slow if lists are deep.
    """
    events = []
    depth = 0
    for count, event in enumerate(yaml.parse(text, yaml.SafeLoader)):
        events.append(event)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if count > YAML_EVENTS_MAX or depth > YAML_DEPTH_MAX:
            raise ConfigError(TOO_MUCH)
    return events


def _check_unfolded(root: yaml.Node) -> None:
    """Refuse too much with aliases unfolded, before values are made of the nodes.

    Ten lines of aliases and merges can stand for more than RAM holds.
    """
    waiting: list[tuple[yaml.Node, int]] = [(root, 0)]
    count = 0
    num_characters = 0

    # A node is visited once for each alias of it, so the count is that of the unfolded document.
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
        if isinstance(node, yaml.CollectionNode):
            # A mapping has pairs of nodes, its keys and values.
            inner = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
            waiting.extend((item, depth + 1) for item in inner)

        count += 1
        if isinstance(node, yaml.ScalarNode):
            num_characters += len(node.value)
        is_large = count > YAML_VALUES_MAX or num_characters > YAML_CHARACTERS_MAX
        if is_large or depth > YAML_DEPTH_MAX:
            raise ConfigError(TOO_MUCH)


def _check_keys(node: yaml.MappingNode) -> None:
    """Refuse a key that comes twice. YAML's parser would keep the last one and say nothing."""
    seen = set()
    for key, _ in node.value:
        # A merge key, `<<`, may come as often as there are mappings to merge.
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        # PyYAML counts lines from 0.
        if key.value in seen:
            line = key.start_mark.line + 1
            raise ConfigError(f"{printable(key.value)} is given twice, again in line {line}. Remove one of them.")
        seen.add(key.value)


def parse_mount(text: str, setting: str = "tiers.nvme") -> MountBudget:
    """Return a mount written as DIR or DIR:SIZE.

    Raises:
        ConfigError: there is no directory, or no size after the colon; the message begins with the setting.
    """
    # The last colon counts, because a directory may have one in its name.
    directory, colon, size = text.rpartition(":")
    if not colon:
        directory = text

    directory = directory.strip()
    require(directory != "", setting, text, "DIR or DIR:SIZE, such as /mnt/a:500GiB")
    try:
        num_bytes = parse_bytes(size) if colon else None
        return MountBudget(Path(directory), num_bytes)
    except ConfigError as error:
        raise ConfigError(f"{setting} is {text!r}: {error}") from error


def parse_list(given: object, name: str) -> tuple[str, ...]:
    """Return the entries of a list of text, or those between the commas of one string.

    Args:
        given: the list, or the string.
        name: the setting.

    Raises:
        ConfigError: it is neither.
    """
    parts = given.split(",") if isinstance(given, str) else given
    entries = list(parts) if isinstance(parts, Iterable) else [parts]
    texts = [entry.strip() for entry in entries if isinstance(entry, str)]
    require(len(texts) == len(entries), name, given, "a list of texts, or one text with commas between")
    return tuple(text for text in texts if text)


def number(
    name: str,
    value: Any,  # noqa: ANN401 - whatever somebody gave
    bound: str = "",
    *,
    least: float = -math.inf,
    most: float = math.inf,
    whole: bool = False,
) -> Any:  # noqa: ANN401 - int or float
    """Return a number as Python's own. Whatever way a number comes in by, it is asked about here.

    Truth values, text, tensors and decimals are refused: arithmetic with them is another one, or fails later.

    Args:
        name: what it is, for the message.
        value: its value.
        bound: what it has to be, for the message.
        least: the least that it may be.
        most: the most that it may be; a whole number has 64 bits at most.
        whole: whether it has to be a whole number, which comes back as an int; any other comes back as a float.

    Raises:
        ConfigError: it is none, is not finite, or lies outside; names it.
    """
    kept: int | float | None = None
    wanted: Any = numbers.Integral if whole else numbers.Real

    # A truth value is an int to Python.
    if isinstance(value, wanted) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # of a number larger than any float
            kept = int(value) if whole else float(value)

    # NaN is in no range.
    limit = WHOLE_MAX if whole else sys.float_info.max
    is_number = kept is not None and -limit <= kept <= limit
    kind = "a whole number below 2**63" if whole else "a finite number"
    require(is_number, name, value, f"{kind}, {bound}" if bound else kind)
    assert kept is not None
    require(least <= kept <= most, name, value, bound)
    return kept


def byte_count(name: str, value: Any) -> int:  # noqa: ANN401 - whatever somebody gave
    """Return a size, which may be text such as "8MiB", or a float such as 1e9.

    Raises:
        ConfigError: it is no size, or less than 0; names it.
    """
    if isinstance(value, str):
        try:
            value = parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    # A whole float is a size: 1e9 is one in YAML.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    num_bytes: int = number(name, value, "bytes, at least 0", least=0, whole=True)
    return num_bytes


def check_setting(name: str, value: object, label: str = "") -> None:
    """Refuse a numeric setting of an optimizer that is no number, or that the kernels cannot take in fp32.

    Whatever way a setting comes in by, it is asked about here.

    Args:
        name: lr, weight_decay, eps, betas or one of them (beta1, beta2), momentum, or clip, which may be None.
        value: its value.
        label: how the message names it; empty: by its name.

    Raises:
        ConfigError: names setting, value and bound.
    """
    label = label or name
    if name == "betas":
        # Text is a sequence as well, of letters.
        pair = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
        require(len(pair) == 2, label, value, "two numbers")
        for beta in pair:
            check_setting("beta1", beta, f"one of {label} {quoted(value)}")
        return

    if name == "clip" and value is None:
        return
    least, most, bound = RANGES.get(name, (0.0, LARGEST, "at least 0 and finite in fp32"))
    number(label, value, bound, least=least, most=most)


def clip_of(norm: Any) -> float | None:  # noqa: ANN401 - whatever another program was given
    """Return the norm to clip to, of what Hugging Face's Trainer or Lightning is given: at 0 or below it is off.

    Raises:
        ConfigError: it is no number.
    """
    if norm is None or number("the norm to clip to", norm) <= 0:
        return None
    check_setting("clip", norm, "the norm to clip to")
    return float(norm)


def require(holds: bool, name: str, value: object, bound: str) -> None:
    """Refuse a value of a setting unless it holds.

    Args:
        holds: whether it does.
        name: the setting.
        value: its value.
        bound: what it must be.

    Raises:
        ConfigError: names setting, value and bound.
    """
    if not holds:
        raise ConfigError(f"{name} is {quoted(value)}; it must be {bound}.")
