"""Reads records from JSON lines, JSON, CSV, Parquet and Arrow files, each with its place for error messages.

A dataset from Hugging Face's `save_to_disk` is a folder of Arrow files, which its `state.json` lists. pyarrow reads
them.
"""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megatier.data.encoded import BOM, decode, read_lines, read_text
from megatier.data.formats import Format
from megatier.errors import DataError, FileChangedError
from megatier.files import FileVersion, open_regular
from megatier.foreign import first_sentence, unique_keys

ROWS_AT_ONCE = 1024
"""Most rows of a table that are Python objects at a time."""

SEPARATORS = {"csv": ",", "tsv": "\t"}
"""Separators of fields, by format."""

BAD_SHOWN = 10
"""Most bad records that a message names."""
RECORDS_LOOKED_AT = 100_000
"""Records that are read after a bad one, to name more bad ones, before the text is refused."""


class BadRecords:
    """Counts records that cannot be read, and keeps the errors of the first ones."""

    def __init__(self, *, skips: bool) -> None:
        """Begin with none. If `skips`, bad records are left out. Otherwise the text is refused."""
        self.skips = skips
        self.count = 0
        self.first: list[str] = []
        self._left = RECORDS_LOOKED_AT

    def add(self, error: DataError) -> None:
        """Take note of a bad record.

        Raises:
            DataError: the text is refused, and enough bad records are known.
        """
        # All are counted, although only the first ones are named.
        self.count += 1
        if len(self.first) < BAD_SHOWN:
            self.first.append(str(error))
        if self.count == BAD_SHOWN:
            self.end()

    def leave_out(self, error: DataError) -> None:
        """Take note of a bad record, or refuse the text at once.

        Raises:
            DataError: bad records may not be left out.
        """
        if not self.skips:
            raise error
        self.add(error)

    @property
    def said(self) -> str:
        """A sentence with the number of records that were left out, and the errors of the first ones."""
        records = "bad record is" if self.count == 1 else "bad records are"
        return f"{self.count:,} {records} left out (data.skip_bad). The first: {self._named}"

    @property
    def _named(self) -> str:
        """The errors of the first bad records. Records of a file with the same error are named together."""
        # Each list begins with the file, and its lines follow.
        places_by_reason: dict[tuple[str, str], list[str]] = {}
        for said in self.first:
            place, _, reason = said.partition(": ")
            file, _, line = place.rpartition(", ")
            places = places_by_reason.setdefault((file, reason), [file])
            places.append(line)

        named = []
        for (_, reason), places in places_by_reason.items():
            named.append(f"{', '.join(places)}: {reason}")
        return " ".join(named)

    @property
    def refuses(self) -> bool:
        """Whether the text is refused, so that records are read only to find more bad ones."""
        return self.count > 0 and not self.skips

    def pass_over(self) -> None:
        """Skip a good record of a text that is refused.

        Raises:
            DataError: enough records were read.
        """
        self._left -= 1
        if not self._left:
            self.end()

    def end(self) -> None:
        """Refuse the text if it has bad records that may not be left out.

        Raises:
            DataError: names the first ones.
        """
        if not self.refuses:
            return
        count = ""
        if self.count > 1:
            # More of them may follow, because the text is read only far enough to name a few.
            count = f"{self.count} bad records or more: "
        raise DataError(f"{count}{self._named} data.skip_bad leaves such records out.")


def read_records(path: Path, file_format: Format) -> Iterator[tuple[str, Any]]:
    """Yield each record of a file with its place, such as "a.jsonl, line 3". A line that is no JSON is a `DataError`.

    Raises:
        DataError: the file is damaged, with the place; or pyarrow is missing.
        OSError: it cannot be read, or is no regular file.
    """
    if file_format.name == "jsonl":
        yield from _read_lines(path, file_format)
    elif file_format.name == "json":
        yield from read_json(path, read_text(path, file_format))
    elif file_format.name in SEPARATORS:
        yield from _read_fields(path, file_format)
    else:
        for number, record in enumerate(_read_table(path, file_format.name), start=1):
            yield f"{path}, record {number}", record


def saved_files(folder: Path) -> list[Path] | None:
    """Return the Arrow files of a dataset that `save_to_disk` wrote, in order; None if the folder is none.

    Raises:
        DataError: its list of files is damaged, or it holds several splits.
    """
    state = folder / "state.json"
    splits = folder / "dataset_dict.json"
    try:
        if splits.is_file():
            names = ", ".join(json.loads(splits.read_text("utf-8"))["splits"])
            raise DataError(f"data.files: {folder} holds the splits {names}. Name one: {folder}/<split>.")
        if not state.is_file():
            return None
        # In the order of this list, which is that of the rows.
        files = json.loads(state.read_text("utf-8"))["_data_files"]
        return [folder / file["filename"] for file in files]
    except (LookupError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"data.files: {folder} is damaged: no list of files in its JSON. Save it again.") from error


def read_json(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the records of JSON: the items of an array, one object, or one on each line.

    Raises:
        DataError: it is an array or an object over several lines, and no valid JSON.
    """
    try:
        document = json.loads(text, object_pairs_hook=unique_keys) if text.strip() else []
    except (ValueError, RecursionError) as error:
        # A record on each line is no JSON as a whole. It may be told from a damaged array, or from one damaged record.
        if text.lstrip().startswith("[") or "\n" not in text.strip():
            raise DataError(f"{path}, {_no_json(error)}") from error

        # Not by `splitlines`, which also cuts at characters that a text in JSON may have.
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, _parse_line(line, place)
        return

    records = document if isinstance(document, list) else [document]
    for number, record in enumerate(records, start=1):
        yield f"{path}, record {number}", record


def _read_lines(path: Path, file_format: Format) -> Iterator[tuple[str, Any]]:
    """Yield the JSON of each line, or the error of one that is none; blank lines are skipped."""
    for number, (line, offset) in enumerate(read_lines(path, file_format), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                text = decode(line, place, offset)
            except DataError as error:
                # Given and not raised: a generator that raises is over, and the lines that follow may be good.
                yield place, error
                continue

            # Elsewhere than at the beginning it is a character of a text.
            if number == 1:
                text = text.removeprefix(BOM)
            yield place, _parse_line(text, place)


def _parse_line(line: str, place: str) -> Any:  # noqa: ANN401 - JSON holds anything
    """Return the JSON of a line, or the error of one that is none."""
    try:
        return json.loads(line, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        return DataError(f"{place}: {_no_json(error).partition(': ')[2]}")


def _no_json(error: Exception) -> str:
    """Return where something is no JSON, and why."""
    if isinstance(error, json.JSONDecodeError):
        reason = error.msg.removesuffix(" at")
        return f"line {error.lineno}: no valid JSON: {reason} at column {error.colno}."
    why = str(error).rstrip(".")
    if isinstance(error, RecursionError):
        # Python's own words are of a recursion in itself.
        why = "lists or objects lie too deep in each other"
    return f"a record: no valid JSON: {why}."


def _read_fields(path: Path, file_format: Format) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table in text, whose first line names the columns, or the error of one that is none.

    Raises:
        DataError: the file is damaged, or has no names of columns.
    """
    # A field is as long as it is. The library's limit is one for the whole process, so it is only ever raised.
    csv.field_size_limit(sys.maxsize)
    lines = (decode(line, str(path), offset) for line, offset in read_lines(path, file_format))
    head = next(lines, "").removeprefix(BOM)
    rows = csv.reader(itertools.chain([head], lines), delimiter=SEPARATORS[file_format.name], strict=True)
    try:
        names = next(rows, [])
        if not names or "" in names or len(set(names)) < len(names):
            raise DataError(
                f"{path}: the first line of a {file_format.name} file names its columns, each by another name; here it "
                f"is {','.join(names)[:80]!r}. Add one, or set data.format to text."
            )
        for row in rows:
            place = f"{path}, line {rows.line_num}"
            if not row:
                continue
            if len(row) != len(names):
                yield place, DataError(f"{place}: {len(row)} fields, and the first line names {len(names)} columns.")
                continue
            yield place, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}: no valid {file_format.name}: {error}.") from error


def _read_table(path: Path, file_format: str) -> Iterator[Any]:
    """Yield the rows of a Parquet file, or of an Arrow stream or file."""
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow: pip install 'megatier[data]'.") from error

    # By a descriptor: pyarrow would open a pipe as well, and wait for ever. It is not mapped: a page that somebody
    # cuts off then ends the process, where a read that comes too short is an error.
    with os.fdopen(open_regular(path), "rb") as file:
        version = FileVersion.of(file.fileno())
        try:
            # A second descriptor, since pyarrow closes what it has read.
            read = os.fdopen(os.dup(file.fileno()), "rb")
            for batch in _batches(arrow, parquet, read, file_format):
                yield from batch.to_pylist()
        except (arrow.ArrowException, OSError) as error:
            _refuse_written(path, file, version)
            # An error of the system has a number, one of pyarrow about the file's content has none.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(f"{path}: no valid {file_format} file: {first_sentence(error)}.") from error
        _refuse_written(path, file, version)


def _batches(arrow: Any, parquet: Any, file: IO[bytes], file_format: str) -> Iterator[Any]:  # noqa: ANN401 - no types
    """Yield the rows of an open table, some at a time, and close it."""
    if file_format == "parquet":
        with file, parquet.ParquetFile(file) as table:
            yield from table.iter_batches(batch_size=ROWS_AT_ONCE)
        return
    with file, arrow.PythonFile(file) as source, _open_arrow(arrow, source) as batches:
        for batch in batches:
            # A batch is as large as its writer made it, and may be the whole table.
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield batch.slice(start, ROWS_AT_ONCE)


def _refuse_written(path: Path, file: IO[bytes], version: FileVersion) -> None:
    """Refuse a table that is another one than it was at first.

    Raises:
        FileChangedError: it is.
    """
    # Whoever replaces the file leaves this one as it is. Who writes to it would give rows of two versions.
    if FileVersion.of(file.fileno()) != version:
        raise FileChangedError(str(path))


def _open_arrow(arrow: Any, source: Any) -> Any:  # noqa: ANN401  pyarrow has no types
    """Open a stream, as `datasets` writes it, or a file of other tools, which begins with a magic word."""
    magic = source.read(6)
    source.seek(0)
    if magic != b"ARROW1":
        return arrow.ipc.open_stream(source)
    file = arrow.ipc.open_file(source)
    numbers = range(file.num_record_batches)
    batches = map(file.get_batch, numbers)
    return arrow.RecordBatchReader.from_batches(file.schema, batches)
