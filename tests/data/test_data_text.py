from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatier.config.data_section import DataConfig
from megatier.data.conversation import Text
from megatier.data.formats import find_format
from megatier.data.holdout import split_documents
from megatier.data.records import BadRecords
from megatier.data.sources import Source, find_sources
from megatier.data.text import read_documents
from megatier.errors import DataError, FileChangedError


def read(*files: Path | str, **settings: Any) -> list[str]:
    return [str(text) for text in read_documents(DataConfig(files=tuple(map(str, files)), **settings))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"b.txt": "bee", "a.md": "ay", "sub/c.py": "sea", "d.bin": "no", "e.TXT": "upper"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_documents_folder_is_read_in_sorted_order(folder: Path) -> None:
    assert read(folder) == ["ay", "bee", "upper", "sea"]


def test_documents_entries_keep_their_order_without_repeats(folder: Path) -> None:
    assert read(folder / "sub", folder / "d.bin", folder) == ["sea", "no", "ay", "bee", "upper"]


def test_documents_glob_takes_any_suffix(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(folder / "*.b*") == ["no"]
    assert read(folder / "**" / "*.py") == ["sea"]
    monkeypatch.chdir(folder)
    assert read("sub/*.py", "[ab].*") == ["sea", "ay", "bee"]


def test_documents_jsonl_gives_one_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\n"}\n\n{"text": "half \\ud83d", "id": 3}\n{"text": ""}\n')
    assert read(path) == ["one\n", "half \ufffd"]
    assert read(path, format="text") == [path.read_text()]


def test_documents_jsonl_field_and_format_are_settings(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(json.dumps({"body": "x"}))
    assert read(path, format="jsonl", text_field="body") == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "line 2: no valid JSON"),
        ('{"body": "x"}', r"line 2: no text under 'text'. Its keys are \['body'\]. Set data.text_field to the key"),
        ('{"messages": []}', r"line 2: no text under 'text'. Its keys are \['messages'\]. Set data.chat to messages"),
        ('{"conversations": []}', "line 2: .* Set data.chat to sharegpt"),
        ('{"instruction": "a", "output": "b"}', "line 2: .* Set data.chat to alpaca"),
        ('{"prompt": "a", "completion": "b"}', "line 2: .* Set data.chat to prompt_completion"),
        ("[1]", "line 2: no text under"),
        ('{"text": 3}', "line 2: no text under"),
    ],
)
def test_documents_bad_json_line_says_path_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(DataError, match=rf"a\.jsonl, {message}"):
        read(path)


def test_documents_max_bytes_cuts_whole_characters(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("éé")
    assert read(tmp_path, max_bytes=7) == ["éé", "é"]
    assert read(tmp_path, max_bytes=4) == ["éé"]


def test_documents_max_samples_ends_the_text_in_the_order_of_the_files(tmp_path: Path) -> None:
    for name in "abc":
        lines = [json.dumps({"text": text}) for text in ("", f"{name}1", f"{name}2")]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "c.jsonl").write_text("no record")
    assert read(tmp_path, max_samples=3) == ["a1", "a2", "b1"]
    assert read(tmp_path, max_samples=4) == ["a1", "a2", "b1", "b2"], "the third file is not even opened"


def test_documents_missing_path_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.txt matches no file or folder"):
        read(tmp_path / "none.txt")


def test_documents_folder_without_text_files_raises(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    with pytest.raises(DataError, match=r"holds no file in \.txt \.md"):
        read(tmp_path)


def test_documents_empty_files_raise(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"no text in .* Check data\.files"):
        read(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_documents_unreadable_file_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: Permission denied"):
        read(path)


def test_documents_vanished_file_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gone.txt"
    gone = Source(path, find_format(path), Text("text"))
    monkeypatch.setattr("megatier.data.text.find_sources", lambda _: [gone])
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt: No such file"):
        read(tmp_path)


def test_find_sources_stdlib_holds_source_alone() -> None:
    config = DataConfig(files=("python-stdlib",))
    files = [source.path for source in find_sources(config)]
    names = {path.name for path in files}
    assert {"argparse.py", "typing.py"} <= names
    assert all(path.suffix == ".py" and not {"site-packages", "test"} & {*path.parts[-3:]} for path in files)
    assert files == sorted(files)


def test_documents_bad_records_are_named_up_to_ten(tmp_path: Path) -> None:
    lines = ['{"text": "fine"}', "{", '{"text": 3}', '{"text": "fine too"}', *["{"] * 20]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(
        DataError, match=r"^10 bad records or more: .*line 2, line 5, .*line 12: no valid JSON.*line 3: no text"
    ) as raised:
        read(tmp_path / "a.jsonl")
    assert "line 13" not in str(raised.value)
    assert str(raised.value).endswith("data.skip_bad leaves such records out.")


def test_documents_bad_records_that_are_bad_alike_share_one_reason(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n' * 3)
    with pytest.raises(DataError) as raised:
        read(tmp_path / "a.jsonl")
    places = f"{tmp_path}/a.jsonl, line 1, line 2, line 3"
    assert str(raised.value).startswith(f"3 bad records or more: {places}: no text under 'text'. ")
    assert str(raised.value).count("Set data.chat to messages.") == 1


def test_documents_bad_records_are_left_out_if_told_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{\n{"text": "two"}\n[]\n')
    bad = BadRecords(skips=True)
    config = DataConfig(files=(str(tmp_path / "a.jsonl"),), skip_bad=True)
    assert list(read_documents(config, bad=bad)) == ["one", "two"]
    assert bad.count == 2
    assert [text.partition(": ")[0].rpartition(", ")[2] for text in bad.first] == ["line 2", "line 4"]


def test_documents_bad_records_far_apart_do_not_keep_the_text_from_being_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatier.data.records.RECORDS_LOOKED_AT", 3)
    (tmp_path / "a.jsonl").write_text("\n".join(["{", *['{"text": "x"}'] * 9, "{"]))
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: no valid JSON.* data\.skip_bad leaves such records out\.$"):
        read(tmp_path / "a.jsonl")


def remarks_of(*files: Path | str, **settings: Any) -> list[str]:
    said = list[str]()
    find_sources(DataConfig(files=tuple(map(str, files)), **settings), said.append)
    return said


def test_documents_of_a_file_named_twice_count_twice_and_what_is_held_out_is_never_trained_on(tmp_path: Path) -> None:
    path, other = tmp_path / "a.jsonl", tmp_path / "b.txt"
    path.write_text("".join(json.dumps({"text": f"<{number}>"}) + "\n" for number in range(20)))
    other.write_text("other")
    config = DataConfig(
        files=(str(path), str(other), str(path)), tokenizer="bytes", sequence_length=2, holdout_fraction=0.2
    )
    found = list(split_documents(config, BadRecords(skips=False)))
    held = [text for is_held, text in found if is_held]
    trained = Counter(text for is_held, text in found if not is_held)
    assert len(held) == len(set(held)) in (4, 5)
    assert not set(held) & set(trained)
    assert {count for text, count in trained.items() if text != "other"} == {2}
    assert remarks_of(path, other, path) == [f"data.files names {path} 2 times, so it is read and counts 2 times"]


def test_documents_of_a_file_of_two_entries_are_read_once_and_said(folder: Path) -> None:
    (folder / "sub" / "link.py").symlink_to("c.py")
    assert read(folder / "*.md", folder) == ["ay", "bee", "upper", "sea"]
    said = remarks_of(folder / "*.md", folder)
    assert any(
        f"1 files belong to several entries of data.files and are read once: {folder}/a.md" in words for words in said
    )
    assert any("link.py is the same file as another one of" in words for words in said)


def test_images_beside_their_conversations_are_not_said_to_be_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": []}')
    (tmp_path / "a.PNG").touch()
    assert remarks_of(tmp_path, chat="messages", images=True) == []
    assert remarks_of(tmp_path, chat="messages") == [
        f"{tmp_path}: 1 files whose suffixes are not in data.suffixes are passed over: .PNG"
    ]


def test_documents_hidden_files_are_passed_over_and_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / ".git").mkdir()
    for name in (".hidden.txt", ".git/c.txt"):
        (folder / name).write_text("hidden")
    assert read(folder) == ["ay", "bee", "upper", "sea"]
    assert read(folder / "*.txt") == ["bee"]
    assert read(folder / ".*.txt") == read(folder / ".hidden.txt") == ["hidden"]
    assert read(folder / ".git") == read(folder / ".git" / "*") == ["hidden"]
    said = remarks_of(folder)
    assert f"{folder}: hidden files and folders are passed over, 2 in all: {folder}/.git, {folder}/.hidden.txt" in said
    assert f"{folder}: 1 files whose suffixes are not in data.suffixes are passed over: .bin" in said
    assert any("*: hidden files are passed over" in words for words in remarks_of(folder / "*"))
    assert any("matches folders, which are passed over" in words for words in remarks_of(folder / "*"))
    monkeypatch.chdir(folder / ".git")
    assert read("*.txt") == ["hidden"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_documents_below_a_folder_that_cannot_be_read_are_refused(folder: Path) -> None:
    (folder / "sub").chmod(0)
    try:
        with pytest.raises(DataError, match=r"cannot read .*/sub: Permission denied"):
            read(folder)
    finally:
        (folder / "sub").chmod(0o755)


def test_documents_of_a_file_that_is_written_while_it_is_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number:09}" * 100}) + "\n" for number in range(3000)))
    found = read_documents(DataConfig(files=(str(path),), sequence_length=8))
    next(iter(found))
    with path.open("r+b") as file:
        file.seek(-50, os.SEEK_END)
        file.write(b"1")
    with pytest.raises(FileChangedError, match=r"a\.jsonl was replaced or written while it was read"):
        Counter(found)
