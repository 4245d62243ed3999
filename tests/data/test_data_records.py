"""Records out of every kind of file, and what is said of damaged ones."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from megatier.config.data_section import DataConfig
from megatier.data import records
from megatier.data.formats import find_format
from megatier.data.records import read_records, saved_files
from megatier.data.text import read_documents
from megatier.errors import DataError, FileChangedError

RECORDS: list[dict[str, Any]] = [
    {"text": "one", "messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "☃"}]},
    {"text": "two", "messages": []},
]


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
        return
    make = arrow.ipc.new_file if path.stem == "file" else arrow.ipc.new_stream
    with arrow.OSFile(str(path), "wb") as target, make(target, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix in (".parquet", ".arrow"):
        write_table(path, rows)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text("\n\n".join(lines) if path.suffix == ".jsonl" else f"[{', '.join(lines)}]")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "stream.arrow", "file.arrow"])
def test_read_records_gives_what_was_written_and_its_place(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, RECORDS)
    found = list(read_records(path, find_format(path)))
    assert [record for _, record in found] == RECORDS
    places = ["line 1", "line 3"] if name == "a.jsonl" else ["record 1", "record 2"]
    assert [place for place, _ in found] == [f"{path}, {place}" for place in places]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"text": "a"},\n{"text": ]', "line 2: no valid JSON"),
        ("a.parquet", b"PAR1 and no more", "no valid parquet file"),
        ("a.arrow", b"ARROW1 and no more", "no valid arrow file"),
        ("a.arrow", b"", "no valid arrow file"),
    ],
)
def test_read_records_damaged_file_says_which(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if not name.endswith("json"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}[,:] ?{message}"):
        list(read_records(path, find_format(path)))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_read_records_line_that_is_no_json_has_its_error_in_its_place(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b'{"text": "a"}\n{"text": \n{"text": "b"}')
    first, bad, last = read_records(path, find_format(path))
    assert (first[1], last[1]) == ({"text": "a"}, {"text": "b"})
    assert isinstance(bad[1], DataError)
    assert f"{name}, line 2: no valid JSON" in str(bad[1])


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_read_records_line_with_a_key_twice_has_its_error_in_its_place(name: str, tmp_path: Path) -> None:
    """Python's parser would keep the last text, and drop the first one in silence."""
    path = tmp_path / name
    path.write_bytes(b'{"text": "a"}\n{"text": "b", "text": "c"}\n{"text": "d"}')
    first, bad, last = read_records(path, find_format(path))
    assert (first[1], last[1]) == ({"text": "a"}, {"text": "d"})
    assert f"{name}, line 2: no valid JSON: a key comes twice: text." in str(bad[1])

    path = tmp_path / "array.json"
    path.write_bytes(b'[{"text": "a"}, {"text": "b", "text": "c"}]')
    with pytest.raises(DataError, match=r"array\.json, a record: no valid JSON: a key comes twice: text\."):
        list(read_records(path, find_format(path)))


def test_read_records_json_by_lines_is_told_from_an_array(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("\n".join(json.dumps(record) for record in RECORDS))
    assert [record for _, record in read_records(path, find_format(path))] == RECORDS


def test_read_records_table_cut_short_says_which(tmp_path: Path) -> None:
    path = write(tmp_path / "stream.arrow", RECORDS * 100)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match=r"stream\.arrow: no valid arrow file"):
        list(read_records(path, find_format(path)))


@pytest.mark.parametrize("change", ["grown", "cut"])
@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
def test_read_records_of_a_table_that_is_written_while_it_is_read_is_refused_by_name(
    name: str, change: str, tmp_path: Path
) -> None:
    """A mapped file that is cut would end the process by a signal."""
    path = write(tmp_path / name, [{"text": f"{number:09}" * 100} for number in range(4000)])
    found = read_records(path, find_format(path))
    next(found)
    if change == "grown":
        path.write_bytes(path.read_bytes() + b"1")
    else:
        os.truncate(path, 4096)
    with pytest.raises(FileChangedError, match=rf"{name} was replaced or written while it was read"):
        Counter(place for place, _ in found)


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
def test_read_records_of_a_table_that_is_replaced_are_those_of_the_first_one(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, RECORDS * 1000)
    found = read_records(path, find_format(path))
    next(found)
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / name, RECORDS).rename(path)
    assert sum(1 for _ in found) == 1000 * len(RECORDS) - 1


def test_read_records_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs pyarrow: pip install 'megatier\[data\]'"):
        list(read_records(tmp_path / "a.parquet", find_format(tmp_path / "a.parquet")))


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
def test_table_that_the_system_stops_giving_is_told_as_unreadable(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / name, RECORDS)

    class Lost(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    batches = records._batches

    def lost(arrow: Any, parquet: Any, file: IO[bytes], file_format: str) -> Iterator[Any]:
        with file:
            yield from batches(arrow, parquet, Lost(file.fileno(), closefd=False), file_format)

    monkeypatch.setattr(records, "_batches", lost)
    with pytest.raises(DataError, match=rf"cannot read .*{name}: Stale file handle\.$"):
        list(read_documents(DataConfig(files=(str(tmp_path / name),))))


def test_table_refused_without_a_reason_is_told_by_the_kind_of_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", RECORDS)

    def refused(_arrow: Any, _parquet: Any, file: IO[bytes], _format: str) -> None:
        file.close()
        raise OSError

    monkeypatch.setattr(records, "_batches", refused)
    with pytest.raises(DataError, match=r"a\.parquet: no valid parquet file: OSError\.$"):
        list(read_records(path, find_format(path)))


def test_read_records_missing_table_is_an_os_error(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(FileNotFoundError):
        list(read_records(tmp_path / "a.parquet", find_format(tmp_path / "a.parquet")))


def test_documents_of_a_saved_dataset_come_in_the_order_of_its_state(tmp_path: Path) -> None:
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    for name, record in zip(names, RECORDS, strict=True):
        write(tmp_path / name, [record])
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (tmp_path / "dataset_info.json").write_text("{}")
    assert list(read_documents(DataConfig(files=(str(tmp_path),)))) == ["one", "two"]


def test_documents_of_tables_in_a_folder_are_read(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", RECORDS)
    write(tmp_path / "a.txt", [])
    assert list(read_documents(DataConfig(files=(str(tmp_path),)))) == ["[]", "one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.json", "{", "is damaged"),
        ("state.json", '{"_data_files": [3]}', "is damaged"),
        ("dataset_dict.json", '{"splits": ["train", "test"]}', "holds the splits train, test. Name one"),
    ],
)
def test_saved_files_of_a_folder_without_them_say_what_to_do(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        saved_files(tmp_path)


def test_saved_files_of_any_other_folder_are_none(tmp_path: Path) -> None:
    assert saved_files(tmp_path) is None
