"""Untrusted input: files of others are read within limits, and errors of parsing libraries become errors of megatier.

A model's folder comes from strangers, and so may a config. A parser accepts a file of any size, a pipe to which nobody
writes, or ten thousand nested lists. So each file is opened here before a library reads it. It has to be a regular file
of a bounded size, and its JSON has to have a bounded depth.

A library then opens the file again by its path. `one_version` checks that all these readings see the same file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from io import BufferedReader
from pathlib import Path
from typing import Any

from megatier.byte_counts import format_bytes
from megatier.errors import FileChangedError, MegatierError
from megatier.files import FileVersion

SETTINGS_BYTES_MAX = 4 << 20
"""The most bytes of a file of settings, such as a config or a chat template. The largest known config of a model has
about 1 MB of labels."""
TABLE_BYTES_MAX = 100_000_000
"""The most bytes of a vocabulary, an index or a header, as in the safetensors library. Gemma's tokenizer.json has 33
MB.
"""
CONTAINERS_MAX = 2_000_000
"""The most lists and objects of a JSON file, which take many times the RAM of their text. Gemma's has 0.5 million."""
VALUES_MAX = 8_000_000
"""The most values of a JSON file. Gemma's has 1.8 million."""
DEPTH_MAX = 50
"""The most lists and objects inside each other. Nobody writes so many, and a library that copies them recurses."""
REASON_CHARACTERS_MAX = 300
"""The most characters of a reason in a message."""

INSTALLED_BY = re.compile(r"`pip install ([^`]+)`")
"""The words of transformers about a missing package."""

MakeError = Callable[[str], MegatierError]
"""Makes the caller's error from a message."""

_seen: ContextVar[dict[Path, FileVersion | None] | None] = ContextVar("seen", default=None)
"""The first versions of the files inside of `one_version`; None outside of it."""


@contextlib.contextmanager
def one_version() -> Iterator[None]:
    """Check that each file that is opened in this context stays the same, even if a library opens it again.

    A missing file has to stay missing. It can be used as a decorator too.

    Raises:
        FileChangedError: a file was replaced, written, removed or created. The error names the first one.
    """
    # An outer context compares for both.
    if _seen.get() is not None:
        yield
        return

    seen: dict[Path, FileVersion | None] = {}
    before = _seen.set(seen)
    try:
        yield
    finally:
        _seen.reset(before)
    for path, version in seen.items():
        if FileVersion.at(path) != version:
            raise FileChangedError(str(path))


def note(path: Path, file: int | None = None) -> None:
    """Note a file for `one_version`, before another library opens it or after it was opened.

    Args:
        path: the path of the file.
        file: the descriptor of the open file; None: look at the path.

    Raises:
        FileChangedError: the file differs from the one before.
    """
    seen = _seen.get()
    if seen is None:
        return

    version = FileVersion.at(path) if file is None else FileVersion.of(file)
    if seen.setdefault(path, version) != version:
        raise FileChangedError(str(path))


def at_one_commit(snapshot: str) -> Path:
    """Return the folder of a snapshot, and note the commit that the hub's cache now has for its repository."""
    note(Path(snapshot).parents[1] / "refs" / "main")
    return Path(snapshot)


@contextlib.contextmanager
def opened(path: Path, kind: MakeError, *, pipes: bool = False) -> Iterator[BufferedReader]:
    """Open a regular file for reading.

    Args:
        path: the file. Links are followed, because the hub's cache is made of them.
        kind: makes the error to raise.
        pipes: whether to take a pipe as well, and to wait for its writer. This is for a path that the user
            named.

    Raises:
        FileNotFoundError: the path does not exist.
        FileChangedError: see `one_version`.
        MegatierError: the error of `kind`: it is not a regular file, or cannot be read.
    """
    try:
        # A blocking open of a pipe without a writer would wait for ever. The open file is checked, because nobody can
        # replace it any more.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipes else os.O_NONBLOCK))
        try:
            mode = os.fstat(file).st_mode
            if not (stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))):
                raise kind(f"{path} is no regular file. Put the file itself there.")
            if stat.S_ISREG(mode):
                note(path, file)
            with os.fdopen(file, "rb", closefd=False) as stream:
                yield stream
        finally:
            os.close(file)
    except FileNotFoundError:
        note(path)
        raise
    except OSError as error:
        raise kind(f"cannot read {path}: {os.strerror(error.errno or 0)}.") from error


def read_input(path: Path, max_bytes: int, kind: MakeError, *, pipes: bool = False) -> bytes:
    """Return the bytes of a whole file of at most `max_bytes`.

    Raises:
        FileNotFoundError, MegatierError: as in `opened`; or the file is larger.
    """
    with opened(path, kind, pipes=pipes) as stream:
        # Read one byte more than allowed, because the size of a pipe is not known, and a file may grow.
        raw = stream.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise kind(f"{path} has more than {format_bytes(max_bytes)}, which no file of its kind has; it was not read.")
    return raw


def read_text(path: Path, kind: MakeError, *, pipes: bool = False) -> str:
    """Return the text of a file of settings.

    Raises:
        FileNotFoundError, MegatierError: as in `read_input`; or the text is not UTF-8.
    """
    raw = read_input(path, SETTINGS_BYTES_MAX, kind, pipes=pipes)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}.") from error


def read_json(path: Path, max_bytes: int, kind: MakeError) -> Any:  # noqa: ANN401  JSON holds anything
    """Return the contents of a JSON file.

    Raises:
        FileNotFoundError, MegatierError: as in `read_input` and `parse_json`.
    """
    raw = read_input(path, max_bytes, kind)
    return parse_json(raw, str(path), kind)


def read_object(path: Path, max_bytes: int, kind: MakeError) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        FileNotFoundError, MegatierError: as in `read_json`; or the content is not an object.
    """
    tree = read_json(path, max_bytes, kind)
    if not isinstance(tree, dict):
        raise kind(f"{path} holds no JSON object. Download it again.")
    return tree


def parse_json(raw: bytes, where: str, kind: MakeError) -> Any:  # noqa: ANN401
    """Parse JSON in which no object has a key twice.

    Args:
        raw: the JSON, in UTF-8.
        where: the place that it comes from, for messages.
        kind: makes the error to raise.

    Raises:
        MegatierError: the error of `kind`: it is not valid JSON, or too large or too deep.
    """
    # Counted in the text, because the parser would allocate first. Characters in strings count too, which only makes
    # the limit stricter.
    num_containers = raw.count(b"{") + raw.count(b"[")
    num_values = raw.count(b",")
    if num_containers > CONTAINERS_MAX or num_values > VALUES_MAX:
        raise kind(f"{where} holds more than {CONTAINERS_MAX:,} lists and objects, or {VALUES_MAX:,} values.")
    try:
        # Python's parser would keep the last value of a repeated key, and other parsers the first.
        text = raw.decode("utf-8")
        tree = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        reason = reason_of(error)
        raise kind(f"{where} is no valid JSON: {reason}. Download or copy it again.") from error

    if _depth_exceeds(tree):
        raise kind(f"{where} holds lists or objects more than {DEPTH_MAX} deep.")
    return tree


@contextlib.contextmanager
def reading(
    what: str, kind: MakeError, reason: Callable[[BaseException], str] | None = None, remedy: str = ""
) -> Iterator[None]:
    """Turn any exception of a library that reads input in this context into one error of megatier.

    Args:
        what: the failure, such as "/models/a: transformers does not take config.json". The reason is added to it.
        kind: makes the error to raise.
        reason: says what is wrong, given the error of the library; None: `reason_of`.
        remedy: the last sentence of the message.

    Raises:
        MegatierError: the error of `kind`.
    """
    try:
        yield
    except MegatierError:
        raise
    # Only here any exception is caught. These libraries check little, so a wrong type in a file may raise anything,
    # anywhere, and no list of exceptions would be complete.
    except BaseException as error:
        # A panic in the Rust code of tokenizers is not an Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {(reason or reason_of)(error)}. {remedy}".rstrip()) from error


UNFINISHED_ENDS = (":", ",", " or", " and")
"""Ends of a line whose sentence goes on in the next line."""


def reason_of(error: BaseException) -> str:
    """Return the message of an exception of another library, in one short line.

    That is its first line, and what this announces or leaves open. Of packages that are missing it is all that are to
    be installed.
    """
    text = str(error)
    missing = INSTALLED_BY.findall(text) if isinstance(error, ImportError) else []
    if missing:
        packages = " ".join(dict.fromkeys(missing))
        needed_by = text.split()[0]
        return printable(f"{needed_by} needs packages that are not installed: pip install {packages}")

    sentence = []
    for line in text.strip().splitlines():
        stripped = line.strip()
        if stripped:
            sentence.append(stripped)
        if not stripped.endswith(UNFINISHED_ENDS):
            break

    reason = " ".join(sentence) or type(error).__name__
    return printable(reason).rstrip(".")


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of that message. What follows in one about attention asks for help elsewhere."""
    return reason_of(error).partition(". ")[0].rstrip(".")


def printable(text: str, max_characters: int = REASON_CHARACTERS_MAX) -> str:
    """Return untrusted text for a message: cut if it is long, and with unprintable characters escaped."""
    # Escape sequences would control the terminal.
    cut = text if len(text) <= max_characters else f"{text[:max_characters]}..."
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in cut)


def quoted(value: object, write: Callable[[object], str] = repr) -> str:
    """Return a value for a message, however long it is. Python writes no number of thousands of digits."""
    try:
        return printable(write(value))
    except ValueError:
        return "a number of thousands of digits"


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these keys and values, and refuse a key that comes twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"a key comes twice: {printable(twice)}")
    return entries


def _depth_exceeds(tree: object) -> bool:
    """Return whether lists and objects are nested deeper than DEPTH_MAX."""
    # Level by level, because recursion would fail at such a depth.
    level: list[Any] = [tree] if isinstance(tree, dict | list) else []
    depth = 0
    while level and depth <= DEPTH_MAX:
        inner: list[Any] = []
        for node in level:
            items = node.values() if isinstance(node, dict) else node
            inner += [item for item in items if isinstance(item, dict | list)]
        level = inner
        depth += 1
    return bool(level)
