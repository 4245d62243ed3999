"""What others wrote: files read within limits before anybody parses them, and one wall round libraries that do.

A model's folder comes from strangers, and so may a config. A parser takes what it is given: a file of any size, a pipe
that nobody writes to, ten thousand lists in one another. So a file is opened here, found to be a plain one of a bounded
size, and its JSON to be of a bounded depth, before a library sees it. Pure.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from megatier.errors import MegatierError, mib

SETTINGS_BYTES_MAX = 4 << 20
"""Of a file of settings: a config, a chat template. The largest config of a model known has about 1 MB, of labels."""
TABLE_BYTES_MAX = 100_000_000
"""Of a vocabulary, an index or a header, as the safetensors library has it; Gemma's tokenizer.json has 33 MB."""
CONTAINERS_MAX = 2_000_000
VALUES_MAX = 8_000_000
"""Lists and objects of a JSON file, and its values, which take RAM many times their text; Gemma's has 0.5 and 1.8
million."""
DEPTH_MAX = 50
"""Lists and objects in one another: nobody writes so many, and a library that copies them recurses."""
REASON_CHARACTERS_MAX = 300

Kind = Callable[[str], MegatierError]
"""The error that a caller promises, made of a message."""


@contextlib.contextmanager
def opened(path: Path, kind: Kind, *, pipes: bool = False) -> Iterator[BufferedReader]:
    """A plain file, open for reading.

    Args:
        path: links are followed: the hub's cache is made of them.
        kind: what to raise.
        pipes: take one as well, and wait for who writes to it: where the user named the path itself.

    Raises:
        FileNotFoundError: there is nothing at this path.
        MegatierError: of this kind; it is something else, or cannot be read. Names it.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipes else os.O_NONBLOCK))
        try:
            mode = os.fstat(file).st_mode
            if not (stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))):
                raise kind(f"{path} is no regular file. Put the file itself there.")
            with os.fdopen(file, "rb", closefd=False) as stream:
                yield stream
        finally:
            os.close(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise kind(f"cannot read {path}: {os.strerror(error.errno or 0)}.") from error


def read_input(path: Path, max_bytes: int, kind: Kind, *, pipes: bool = False) -> bytes:
    """A whole file, which is no larger than that.

    Raises:
        FileNotFoundError, MegatierError: as in `opened`; or it is larger.
    """
    with opened(path, kind, pipes=pipes) as stream:
        raw = stream.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise kind(f"{path} has more than {mib(max_bytes)}, which no file of its kind has; it was not read.")
    return raw


def read_text(path: Path, kind: Kind, *, pipes: bool = False) -> str:
    """The text of a file of settings.

    Raises:
        FileNotFoundError, MegatierError: as in `read_input`; or it is not UTF-8.
    """
    try:
        return read_input(path, SETTINGS_BYTES_MAX, kind, pipes=pipes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}.") from error


def read_json(path: Path, max_bytes: int, kind: Kind) -> Any:  # noqa: ANN401  JSON holds anything
    """What a JSON file says.

    Raises:
        FileNotFoundError, MegatierError: as in `read_input` and `parse_json`.
    """
    return parse_json(read_input(path, max_bytes, kind), str(path), kind)


def read_object(path: Path, max_bytes: int, kind: Kind) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        FileNotFoundError, MegatierError: as in `read_json`; or it holds something else.
    """
    tree = read_json(path, max_bytes, kind)
    if not isinstance(tree, dict):
        raise kind(f"{path} holds no JSON object. Download it again.")
    return tree


def parse_json(raw: bytes, where: str, kind: Kind) -> Any:  # noqa: ANN401
    """What JSON says, in which no key of an object comes twice.

    Args:
        raw: UTF-8.
        where: it stands, for messages.
        kind: what to raise.

    Raises:
        MegatierError: of this kind; it is no JSON, or larger or deeper than anybody writes.
    """
    if raw.count(b"{") + raw.count(b"[") > CONTAINERS_MAX or raw.count(b",") > VALUES_MAX:
        raise kind(f"{where} holds more than {CONTAINERS_MAX:,} lists and objects, or {VALUES_MAX:,} values.")
    try:
        tree = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise kind(f"{where} is no valid JSON: {reason_of(error)}. Download or copy it again.") from error

    if _depth_exceeds(tree):
        raise kind(f"{where} holds lists or objects more than {DEPTH_MAX} deep.")
    return tree


@contextlib.contextmanager
def reading(
    what: str, kind: Kind, reason: Callable[[BaseException], str] | None = None, remedy: str = ""
) -> Iterator[None]:
    """A wall round another library while it reads input: whatever it raises becomes one error of ours.

    Args:
        what: cannot be done, such as "/models/a: transformers does not take config.json"; the reason goes behind it.
        kind: what to raise.
        reason: says what is wrong by what was raised; None: `reason_of`.
        remedy: goes behind that.

    Raises:
        MegatierError: of this kind.
    """
    try:
        yield
    except MegatierError:
        raise
    # The one place where any exception is right: these libraries check little of what they read, so a wrong type in a
    # file shows as whatever the line that meets it first raises, and no list of kinds is ever whole.
    except Exception as error:
        raise kind(" ".join(filter(None, (f"{what}: {(reason or reason_of)(error)}.", remedy)))) from error
    # A panic of the tokenizers' Rust code is no Exception, and its class cannot be imported.
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(" ".join(filter(None, (f"{what}: {(reason or reason_of)(error)}.", remedy)))) from error


def reason_of(error: BaseException) -> str:
    """What an exception of another library says, in one short line."""
    lines = str(error).strip().splitlines()
    return shown(lines[0] if lines else type(error).__name__).rstrip(".")


def shown(text: str, max_characters: int = REASON_CHARACTERS_MAX) -> str:
    """Text of others as part of a message: cut where it is long, with what is not printable spelt out."""
    cut = text if len(text) <= max_characters else f"{text[:max_characters]}..."
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in cut)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key comes twice")
    return entries


def _depth_exceeds(tree: object) -> bool:
    """Whether there are more than DEPTH_MAX in one another; level by level, since what is deep must not recurse."""
    level: list[Any] = [tree] if isinstance(tree, dict | list) else []
    depth = 0
    while level and depth <= DEPTH_MAX:
        inner = (item for node in level for item in (node.values() if isinstance(node, dict) else node))
        level = [item for item in inner if isinstance(item, dict | list)]
        depth = depth + 1
    return bool(level)
