"""Sequences out of streams: which, in which order, and from where a run goes on."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import crossed

from megatier.config.data_section import DataConfig
from megatier.data import packer
from megatier.data.columns import count_real_tokens
from megatier.data.shards import find_shard_changes, list_shards
from megatier.data.text_stream import TextStream
from megatier.data.tokenizer import byte_tokenizer
from megatier.errors import CheckpointError, DataError
from megatier.workers import Task

pytest.importorskip("datasets")

LENGTH = 8
COUNT = 60
"""Rows of the stream."""


def batched(items: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def write_rows(folder: Path, *, parquet: bool = False, count: int = COUNT) -> str:
    """Texts and conversations in three shards."""
    folder.mkdir(exist_ok=True)
    found = [
        {
            "text": f"<{number:02}>" + "." * (number * 7 % 23),
            "messages": [
                {"role": "user", "content": ""},
                {"role": "assistant", "content": f"{number:02}" * (number % 5 + 1)},
            ],
        }
        for number in range(count)
    ]
    for shard, part in enumerate(batched(found, max(1, -(-count // 3)))):
        path = folder / f"{shard}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
        if parquet:
            arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            tables.write_table(arrow.Table.from_pylist(part), path.with_suffix(".parquet"), row_group_size=4)
            path.unlink()
    return str(folder)


@contextmanager
def opened(
    tmp_path: Path,
    state: dict[str, Any] | None = None,
    *,
    accepts_changes: bool = False,
    template: str | None = None,
    **settings: Any,
) -> Iterator[TextStream]:
    defaults: dict[str, Any] = {
        "dataset": str(tmp_path / "rows"),
        "streaming": True,
        "tokenizer": "bytes",
        "sequence_length": LENGTH,
        "holdout_rows": 4,
        "window_rows": 7,
    }
    if not (tmp_path / "rows").exists():
        write_rows(tmp_path / "rows")
    config = DataConfig(**(defaults | settings))
    tokenizer = byte_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    with TextStream(config, tokenizer, tmp_path / "run", state, accepts_changes=accepts_changes) as stream:
        yield stream


def ids(batch: dict[str, torch.Tensor]) -> list[int]:
    return [int(token) for token in batch["input_ids"].flatten()]


def documents_in(tokens: list[int]) -> list[str]:
    """Whole documents among tokens that begin with one."""
    text = "".join(chr(token) if token < 256 else "\n" for token in tokens)
    return text.split("\n")[:-1]


def state_of(stream: TextStream) -> dict[str, Any]:
    """As a checkpoint gives it back."""
    state: dict[str, Any] = json.loads(json.dumps(stream.state))
    return state


def test_interrupt_while_a_batch_is_made_loses_no_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with opened(tmp_path) as stream:
        whole = [ids(stream.batch(step, 2)) for step in range(3)]
    with opened(tmp_path) as stream:
        found = [ids(stream.batch(0, 2))]
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Task, "result", interrupted)
            stream.batch(1, 2)
        found += [ids(stream.batch(step, 2)) for step in (1, 2)]
    assert found == whole


def test_batch_holds_each_row_once_an_epoch_but_those_held_out(tmp_path: Path) -> None:
    with opened(tmp_path) as stream:
        tokens = [token for step in range(140) for token in ids(stream.batch(step, 2))]
        held = documents_in([token for batch in stream.holdout(3) for token in ids(batch)])
    found = documents_in(tokens)
    first = found[: COUNT - 4]
    assert Counter(text[:4] for text in first) == Counter(f"<{n:02}>" for n in range(4, COUNT))
    assert [text[:4] for text in held] == ["<00>", "<01>", "<02>", "<03>"][: len(held)]
    assert held
    numbers = [int(text[1:3]) for text in first]
    assert numbers != sorted(numbers), "rows of a window are shuffled"
    assert [sorted(window) for window in batched(numbers, 7)] == batched(range(4, COUNT), 7)
    second = found[COUNT - 4 : 2 * (COUNT - 4)]
    assert sorted(second) == sorted(first)
    assert second != first, "in another order in each epoch"


def test_batch_windows_of_one_row_keep_the_order(tmp_path: Path) -> None:
    with opened(tmp_path, window_rows=1, holdout_rows=0) as stream:
        found = documents_in([token for step in range(20) for token in ids(stream.batch(step, 4))])
    assert [int(text[1:3]) for text in found[:30]] == list(range(30))


def test_batch_same_settings_same_tokens_other_seed_others(tmp_path: Path) -> None:
    found = []
    for seed in (0, 0, 1):
        with opened(tmp_path, seed=seed) as stream:
            found.append([ids(stream.batch(step, 2)) for step in range(9)])
    assert found[0] == found[1] != found[2]


CASES: dict[str, dict[str, Any]] = {
    "texts": {},
    "one_by_one": {"window_rows": 1},
    "texts_apart": {"cross_documents": False},
    "conversations": {"chat": "messages", "sequence_length": 32},
    "long_conversations": {"chat": "messages", "sequence_length": 16},
    "nothing_held_out": {"holdout_rows": 0},
    "windows_longer_than_the_stream": {"window_rows": 1000},
}


@pytest.mark.parametrize(("case", "parquet"), crossed(CASES, [False, True], by=2))
def test_batch_behind_a_checkpoint_is_that_of_an_unbroken_run(
    tmp_path: Path, case: str, parquet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the end of an epoch too; each third step a new run goes on."""
    monkeypatch.setattr(packer, "WINDOW_ROWS", 1)
    write_rows(tmp_path / "rows", parquet=parquet, count=23)
    settings = CASES[case]
    with opened(tmp_path, **settings) as stream:
        whole = [stream.batch(step, 4) for step in range(18)]
        assert stream.state["position"]["epoch"] >= 1
    state = None
    for step in range(0, 18, 3):
        with opened(tmp_path, state, **settings) as stream:
            for number in range(step, step + 3):
                batch = stream.batch(number, 4)
                assert batch.keys() == whole[number].keys()
                assert all(torch.equal(batch[name], whole[number][name]) for name in batch), number
            state = state_of(stream)


def test_batch_of_conversations_is_apart_and_learns_answers(tmp_path: Path) -> None:
    with opened(tmp_path, **CASES["conversations"]) as stream:
        batch = stream.batch(0, 4)
    assert batch.keys() == {"input_ids", "labels", "position_ids"}
    assert 0 < int((batch["labels"] >= 0).sum()) < count_real_tokens(batch) < batch["input_ids"].numel()


def test_batch_windows_of_conversations_fill_enough_rows_to_pack_well(tmp_path: Path) -> None:
    with opened(tmp_path, window_rows=1, **CASES["conversations"]) as stream:
        stream.batch(0, 4)
        assert stream.state["position"]["window"] == 0
        stream.batch(1, 8)
        assert stream.state["position"]["epoch"] == 0, "one window is the whole stream"


def test_state_is_small_and_knows_nothing_of_what_was_read_ahead(tmp_path: Path) -> None:
    with opened(tmp_path) as stream:
        before = state_of(stream)["position"]
        assert before == {"epoch": 0, "window": 0, "dataset": None, "used": 0, "crc32": 0}
        stream.batch(0, 1)
        after = state_of(stream)
    assert after["position"]["used"] == LENGTH
    assert len(json.dumps(after)) < 2000


def test_open_other_rows_than_before_are_refused_unless_accepted(tmp_path: Path) -> None:
    with opened(tmp_path) as stream:
        stream.batch(0, 3)
        state = state_of(stream)
    path = tmp_path / "rows" / "0.jsonl"
    path.write_text(path.read_text().replace(">", "]"))
    with pytest.raises(DataError, match=r"0\.jsonl holds something else.*--accept-changes"), opened(tmp_path, state):
        pass
    del state["shards"]  # as of an older version
    with opened(tmp_path, state) as stream, pytest.raises(DataError, match="its rows are others"):
        stream.batch(1, 3)
    with opened(tmp_path, state, accepts_changes=True) as stream:
        stream.batch(1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("edited", r"2\.jsonl holds something else"),
        ("longer", r"2\.jsonl had [\d,]+ bytes and has [\d,]+"),
        ("removed", r"2\.jsonl is gone"),
        ("added", r"3\.jsonl is new"),
        ("swapped", r"1\.jsonl .*; 2\.jsonl "),
    ],
)
def test_open_files_that_no_step_has_come_to_are_refused_if_they_are_others(
    tmp_path: Path, change: str, message: str
) -> None:
    with opened(tmp_path) as stream:
        stream.batch(0, 1)
        state = state_of(stream)
    one, two, three = (tmp_path / "rows" / f"{number}.jsonl" for number in (1, 2, 3))
    with opened(tmp_path, state):
        pass

    text = two.read_text()
    os.utime(two)
    match change:
        case "edited":
            two.write_text(text.replace(">", "]"))
        case "longer":
            two.write_text(text + text)
        case "removed":
            two.unlink()
        case "added":
            three.write_text(text)
        case "swapped":
            two.write_text(one.read_text())
            one.write_text(text)
    with pytest.raises(DataError, match=f"not those that the run began with: .*{message}.*--accept-changes"):
        opened(tmp_path, state).__enter__()
    with opened(tmp_path, state, accepts_changes=True) as stream:
        state = state_of(stream)
    with opened(tmp_path, state):
        pass


def test_shards_of_a_large_file_are_told_by_samples_and_the_time_of_its_change(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(1 << 20))
    before = list_shards(str(tmp_path), [str(path)])
    assert not find_shard_changes(before, list_shards(str(tmp_path), [str(path)]))
    with path.open("r+b") as file:
        file.seek(100_000)
        file.write(b"x")
    assert find_shard_changes(before, list_shards(str(tmp_path), [str(path)])) == ["large was written since"]
    with path.open("r+b") as file:
        file.write(b"x")
    assert find_shard_changes(before, list_shards(str(tmp_path), [str(path)])) == ["large holds something else"]


@pytest.mark.parametrize("shards", [3, {"0.jsonl": 3}], ids=str)
def test_open_damaged_note_of_files_is_refused(tmp_path: Path, shards: object) -> None:
    with opened(tmp_path) as stream:
        state = state_of(stream) | {"shards": shards}
    with pytest.raises(CheckpointError, match="the stream's files are"), opened(tmp_path, state):
        pass


def test_open_other_settings_are_refused_or_begin_the_stream(tmp_path: Path) -> None:
    with opened(tmp_path) as stream:
        first = ids(stream.batch(0, 1))
        state = state_of(stream)
    with (
        pytest.raises(DataError, match="the stream is not that of the checkpoint"),
        opened(tmp_path, state, text_field="text2"),
    ):
        pass
    with opened(tmp_path, {"num_tokens": 3, "crc32": 4}, accepts_changes=True) as stream:
        assert ids(stream.batch(0, 1)) == first


@pytest.mark.parametrize(
    "position", [None, 3, {}, {"epoch": 0, "window": 0, "dataset": None, "used": -1, "crc32": 0}], ids=str
)
def test_open_damaged_position_is_refused(tmp_path: Path, position: object) -> None:
    with opened(tmp_path) as stream:
        state = state_of(stream) | {"position": position}
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"), opened(tmp_path, state):
        pass


def test_open_damaged_commit_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as stream:
        state = state_of(stream) | {"commit": 3}
    with pytest.raises(CheckpointError, match="the stream's commit is 3"), opened(tmp_path, state):
        pass


def test_batch_everything_held_out_raises(tmp_path: Path) -> None:
    with opened(tmp_path, holdout_rows=COUNT) as stream, pytest.raises(DataError, match=r"lower data\.holdout_rows"):
        stream.batch(0, 1)


def test_batch_bad_rows_are_left_out_if_told_so_and_a_resumed_stream_goes_on(tmp_path: Path) -> None:
    folder = Path(write_rows(tmp_path / "rows", count=30))
    lines = (folder / "1.jsonl").read_text().splitlines()
    lines[2] = json.dumps({"text": None, "messages": []})
    (folder / "1.jsonl").write_text("\n".join(lines))

    with opened(tmp_path, skip_bad=True) as stream:
        whole = [ids(stream.batch(step, 2)) for step in range(30)]
        assert stream.bad.count >= 1
        assert "row 9 from where reading began: no text" in stream.bad.said
    numbers = {int(text[1:3]) for text in documents_in([token for batch in whole for token in batch])}
    assert numbers == set(range(4, 30)) - {12}

    with opened(tmp_path, skip_bad=True) as stream:
        found = [ids(stream.batch(step, 2)) for step in range(9)]
        state = state_of(stream)
    with opened(tmp_path, state, skip_bad=True) as stream:
        found += [ids(stream.batch(step, 2)) for step in range(9, 30)]
    assert found == whole


def test_batch_malformed_row_names_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows")
    with (
        opened(tmp_path, text_field="body", holdout_rows=0) as stream,
        pytest.raises(DataError, match=r"rows \(train\), row 1 from where reading began: no text under 'body'"),
    ):
        stream.batch(0, 1)


def test_batch_shard_damaged_on_the_way_raises(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows")
    (tmp_path / "rows" / "2.jsonl").write_text('{"text": "<40>"}\n{"text": ')
    with opened(tmp_path) as stream, pytest.raises(DataError, match="rows cannot be read any further"):
        for step in range(99):
            stream.batch(step, 2)


def test_holdout_of_a_split_leaves_the_stream_whole(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows")
    for path in (tmp_path / "rows").iterdir():
        path.rename(path.with_name(f"train-{path.name}"))
    (tmp_path / "rows" / "validation.jsonl").write_text('{"text": "held out", "messages": []}\n' * 9)
    with opened(tmp_path, holdout_split="validation", window_rows=1) as stream:
        assert documents_in([token for batch in stream.holdout(9) for token in ids(batch)])[:3] == ["held out"] * 3
        assert documents_in(ids(stream.batch(0, 8)))[0].startswith("<00>")


def test_close_ends_the_thread_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as stream:
        stream.batch(0, 1)
        assert "megatier-stream_0" in {thread.name for thread in threading.enumerate()}
    assert "megatier-stream_0" not in {thread.name for thread in threading.enumerate()}


def write_letters(folder: Path, *letters: str) -> None:
    """Texts and conversations of one letter each."""
    folder.mkdir()
    lines = []
    for letter in letters:
        turn = {"role": "assistant", "content": letter * 12}
        lines.append(json.dumps({"text": letter * 12, "messages": [{"role": "user", "content": ""}, turn]}) + "\n")
    (folder / "0.jsonl").write_text("".join(lines))


@pytest.fixture
def x_is_unknown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of windows of two rows, for a tokenizer that does not know an x."""
    monkeypatch.setattr(packer, "find_special_tokens", lambda _: [256, ord("x")])
    monkeypatch.setattr(packer, "WINDOW_ROWS", 0)
    template = (
        "{% for turn in messages %}{% if turn.role == 'assistant' %}"
        "{% generation %}{{ turn.content }}x{% endgeneration %}{% endif %}{% endfor %}"
    )
    return {"holdout_rows": 0, "window_rows": 2, "template": template}


@pytest.mark.filterwarnings("ignore:the chat template learns nothing")
@pytest.mark.parametrize("chat", [None, "messages"])
def test_stream_whose_last_window_the_tokenizer_does_not_know_goes_on_also_from_there(
    chat: str | None, x_is_unknown: dict[str, Any], tmp_path: Path
) -> None:
    write_letters(tmp_path / "rows", "a", "b", "x")
    states = []
    with opened(tmp_path, chat=chat, **x_is_unknown) as stream:
        found = []
        for step in range(14):
            found.append(ids(stream.batch(step, 1)))
            states.append(state_of(stream))
    assert {ord("a"), ord("x")} <= {token for row in found for token in row}

    place = next(number for number, state in enumerate(states) if state["position"]["window"] == 1)
    with opened(tmp_path, states[place], chat=chat, **x_is_unknown) as stream:
        assert [ids(stream.batch(step, 1)) for step in range(place + 1, 14)] == found[place + 1 :]


@pytest.mark.filterwarnings("ignore:the chat template learns nothing")
@pytest.mark.parametrize("chat", [None, "messages"])
def test_stream_of_which_the_tokenizer_knows_nothing_is_refused(
    chat: str | None, x_is_unknown: dict[str, Any], tmp_path: Path
) -> None:
    write_letters(tmp_path / "rows", "x", "x", "x")
    with (
        opened(tmp_path, chat=chat, **x_is_unknown) as stream,
        pytest.raises(DataError, match="makes nothing but special and unknown tokens of the 2 texts"),
    ):
        for step in range(9):
            stream.batch(step, 1)
