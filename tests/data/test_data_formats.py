"""Every suffix, encoding and shape of records that a data file may have: read, or refused by name."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatier.config.data_section import DataConfig
from megatier.data import encoded
from megatier.data.conversation import Conversation
from megatier.data.sources import check_sources, find_sources
from megatier.data.text import guess_shape, read_documents
from megatier.errors import DataError

TEXTS = ["one é\n☃", 'two, "quoted"\n', "three 🙂"]
TURNS = [[{"role": "user", "content": "é?"}, {"role": "assistant", "content": text}] for text in TEXTS]
SHAPES: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": text} for text in TEXTS],
    "messages": [{"messages": turns} for turns in TURNS],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": "é?"}, {"from": "gpt", "value": text}]} for text in TEXTS
    ],
    "alpaca": [{"instruction": "é?", "output": text} for text in TEXTS],
}
ENCODINGS = {
    "utf-8": ("utf-8", b""),
    "utf-8-sig": ("utf-8-sig", b""),
    "utf-16-le": ("utf-16-le", b"\xff\xfe"),
    "utf-16-be": ("utf-16-be", b"\xfe\xff"),
    "utf-32-le": ("utf-32-le", b"\xff\xfe\0\0"),
    "utf-32-be": ("utf-32-be", b"\0\0\xfe\xff"),
}


def zstd(raw: bytes) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    sink = arrow.BufferOutputStream()
    with arrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return bytes(sink.getvalue())


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def separated(records: list[dict[str, Any]], separator: str) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


WRITERS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    ".jsonl": lambda records: "\n".join(json.dumps(record, ensure_ascii=False) for record in records),
    ".ndjson": lambda records: "\r\n".join(json.dumps(record, ensure_ascii=False) for record in records),
    ".json": lambda records: json.dumps(records, ensure_ascii=False, indent=1),
    ".JSON": lambda records: "\n".join(json.dumps(record, ensure_ascii=False) for record in records),
    ".csv": lambda records: separated(records, ","),
    ".tsv": lambda records: separated(records, "\t"),
}


PAIRS = [
    (suffix, shape)
    for suffix, shape in itertools.product(WRITERS, SHAPES)
    if suffix not in (".csv", ".tsv") or shape in ("text", "alpaca")
]


def config(*files: Path | str, **settings: Any) -> DataConfig:
    return DataConfig(files=tuple(map(str, files)), **settings)


def said(document: str | Conversation) -> str:
    return document if isinstance(document, str) else str(document.messages[-1]["content"])


def every_door(found: DataConfig) -> list[str]:
    """What the look before a run, `init` and the run itself make of the data."""
    check_sources(found)
    assert guess_shape(found) == (found.chat, found.text_field)
    return [said(document) for document in read_documents(found)]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("suffix", "shape"),
    PAIRS,
)
def test_documents_of_every_suffix_encoding_and_shape_are_what_was_written(
    tmp_path: Path, suffix: str, encoding: str, shape: str
) -> None:
    name, mark = ENCODINGS[encoding]
    raw = mark + WRITERS[suffix](SHAPES[shape]).encode(name)
    chat: Any = None if shape == "text" else shape
    for packed, pack in PACKERS.items():
        path = tmp_path / f"a{suffix}{packed}"
        path.write_bytes(pack(raw))
        assert every_door(config(path, chat=chat)) == TEXTS
        assert [source.path for source in find_sources(config(tmp_path, chat=chat))] == [path]
        path.unlink()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("suffix", [".txt", ".log", "", ".md"])
def test_documents_of_a_text_are_the_whole_text_in_every_encoding(tmp_path: Path, suffix: str, encoding: str) -> None:
    name, mark = ENCODINGS[encoding]
    for packed, pack in PACKERS.items():
        path = tmp_path / f"a{suffix}{packed}"
        path.write_bytes(pack(mark + "".join(TEXTS).encode(name)))
        assert every_door(config(path)) == ["".join(TEXTS)]


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("a.txt", "Caf\xe9".encode("cp1252"), r"a\.txt: no text in UTF-8: byte 0xe9 at byte 3 of the file.*iconv"),
        ("a.txt", "é".encode("utf-16-le") * 9 + b"a\0", r"a\.txt: no text"),
        ("a.txt", "plain".encode("utf-16-le"), "NUL at byte 1 of the file. If it is UTF-16"),
        ("a.txt", b"\xff\xfea", "no text in UTF-16-LE, as its mark says: byte 2"),
        ("a.txt", b"\xff\xfe\0\xd8a\0", "no text in UTF-16-LE, as its mark says: byte 2"),
        ("a.txt", gzip.compress(b"x"), "a.txt: the file is compressed by gzip: end its name in .gz"),
        ("a.jsonl", zstd(b"{}"), "the file is compressed by zstd: end its name in .zst"),
        ("a.txt", b"PK\x03\x04rest", "is a zip archive: unpack it"),
        ("a.md", b"%PDF-1.7 and so on", "is a PDF"),
        ("a.jsonl", b"PAR1 and so on", "is a Parquet file"),
        ("model.safetensors", b"\x40\0\0\0\0\0\0\0{}", r"model\.safetensors: no text: there is a NUL at byte 1"),
        ("a.tar.gz", gzip.compress(b"x"), "is an archive"),
        ("a.tgz", gzip.compress(b"x"), "is an archive"),
        ("a.parquet.gz", gzip.compress(b"x"), "a parquet file compresses its own columns"),
        ("a.txt.gz", b"plain", "is no whole gzip file: Not a gzipped file"),
        ("a.txt.gz", gzip.compress(bytes(range(1, 128)) * 99)[:-30], "is no whole gzip file"),
        ("a.txt.bz2", bz2.compress(b"words " * 99)[:-8], "is no whole bzip2 file"),
        ("a.txt.xz", lzma.compress(b"words " * 99)[:-8], "is no whole xz file"),
        ("a.txt.zst", zstd(b"words " * 9999)[:-8], "is no whole zstd file"),
        (
            "a.jsonl.gz",
            gzip.compress('{"text": "é"}'.encode("latin-1")),
            "line 1: no text in UTF-8: byte 0xe9 at byte 10",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', "line 2: no text in UTF-8: byte 0xe9 at byte 24 of the file"),
        ("a.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "line 2: no valid JSON: .* too deep"),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "line 1: no valid JSON: Exceeds the limit"),
        ("a.json", b'[{"text": "a"}, {"text": "b"', "line 1: no valid JSON"),
        ("a.json", b'[{"messages": []}]', "Set data.chat to messages"),
        ("a.csv", b"", "the first line of a csv file names its columns"),
        ("a.csv", b"text,text\n1,2\n", "each by another name"),
        ("a.csv", b"text,b\n1,2\n1\n", "line 3: 1 fields, and the first line names 2 columns"),
        ("a.csv", b'text\n"open\n', "no valid csv: unexpected end of data"),
        ("a.csv", b"text\nCaf\xe9\n", "byte 0xe9 at byte 8"),
        ("a.csv", b"body;text\nx;y\n", r"no text under 'text'. Its keys are \['body;text'\]"),
    ],
)
def test_documents_of_what_is_no_text_are_refused_by_name_and_place(
    tmp_path: Path, name: str, raw: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=message) as raised:
        list(read_documents(config(tmp_path / name)))
    assert name in str(raised.value)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet", "a.txt.gz"])
def test_every_door_refuses_what_is_no_regular_file_and_never_waits_for_it(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for door in (check_sources, lambda found: list(read_documents(found)), guess_shape):
        for entry in (tmp_path / name, tmp_path):
            if name != "a.txt.gz" or entry != tmp_path:
                with pytest.raises(DataError, match=rf"cannot read .*{name}: it is no regular file"):
                    door(config(entry))


def test_documents_of_a_link_to_nothing_are_refused_in_a_folder_too(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("fine")
    (tmp_path / "a.txt").symlink_to("../annex/gone")
    for entry in (tmp_path, tmp_path / "a.txt", tmp_path / "*.txt"):
        with pytest.raises(DataError, match=r"a\.txt is a link to \.\./annex/gone, which is not there"):
            list(read_documents(config(entry)))


def test_documents_of_a_folder_named_like_a_file_are_those_in_it(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    (tmp_path / "x.jsonl" / "a.txt").write_text("inside")
    assert list(read_documents(config(tmp_path / "x.jsonl"))) == list(read_documents(config(tmp_path))) == ["inside"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.txt.gz"])
def test_documents_of_an_empty_file_alone_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"no text in .* there is no record, or all of them are empty"):
        list(read_documents(config(tmp_path / name)))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.txt.gz", "a.csv.zst"])
def test_documents_larger_than_ram_may_hold_are_refused_before_they_fill_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoded, "DOCUMENT_BYTES_MAX", 1 << 20)
    raw = b"a" * (3 << 20)
    (tmp_path / name).write_bytes(PACKERS.get(Path(name).suffix, bytes)(raw))
    with pytest.raises(DataError, match=r"holds more than 1\.0 MiB in one document"):
        list(read_documents(config(tmp_path / name)))


def test_documents_of_one_long_line_are_read_in_linear_time(tmp_path: Path) -> None:
    text = "words and more " * (1 << 20)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    assert list(read_documents(config(tmp_path / "a.jsonl"))) == [text]


def test_documents_lines_that_do_not_decode_are_left_out_if_told_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n{"text": "b"}\n')
    assert list(read_documents(config(tmp_path / "a.jsonl", skip_bad=True))) == ["a", "b"]


def test_documents_json_without_records_stays_one_text(tmp_path: Path) -> None:
    for text in ('{"name": "a"}', "[1, 2]", '[{"name": 3}]', '{"messages": {"hello": "text"}}', "{broken"):
        (tmp_path / "a.json").write_text(text)
        assert list(read_documents(config(tmp_path / "a.json"))) == [text]


def test_documents_zstd_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.zst").write_bytes(zstd(b"x"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs pyarrow to unpack zstd: pip install 'megatier\[data\]'"):
        list(read_documents(config(tmp_path / "a.txt.zst")))


@pytest.mark.parametrize("entry", ["a/**b", "\0", "x" * 5000])
def test_documents_of_an_entry_that_is_no_path_are_refused(entry: str) -> None:
    with pytest.raises(DataError, match=r"data\.files"):
        list(read_documents(config(entry)))


def test_check_sources_looks_at_the_beginning_alone(tmp_path: Path) -> None:
    half = ("é" * encoded.HEAD_BYTES).encode()
    for start in (b"", b"a"):
        (tmp_path / "a.txt").write_bytes(start + half)
        check_sources(config(tmp_path / "a.txt"))
