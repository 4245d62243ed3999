"""Rows of conversations with images: their order, their files, what they are compared with, and bad records."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_processors import chats, picture, processor

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig
from megatier.data.image_chats import ImageChats
from megatier.data.processor import Processor, load_processor
from megatier.data.token_note import TOKENS_NOTE_FILE
from megatier.errors import DataError

pytest.importorskip("PIL")

Groups = list[dict[str, torch.Tensor]]
LENGTH = 64


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = tmp_path_factory.mktemp("processor")
    processor("gemma3").save_pretrained(folder)
    return load_processor(config_of(folder, "a"))


def config_of(folder: Path, *files: str, **settings: Any) -> RunConfig:
    data = {"chat": "messages", "images": True, "sequence_length": LENGTH, "holdout_fraction": 0.0, **settings}
    return RunConfig(model=ModelConfig(path=str(folder)), data=DataConfig(files=files, **data))


def opened(made: Processor, folder: Path, path: Path, **settings: Any) -> ImageChats:
    return ImageChats(config_of(folder, str(path), **settings).data, made, folder / "run")


def same(one: Groups, other: Groups) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def num_images(groups: Groups) -> list[int]:
    return [len(group.get("pixel_values", ())) for group in groups]


def record(*images: Any, answer: str = "yes") -> dict[str, Any]:
    turns = [{"role": "user", "content": "<image>" * len(images) + "?"}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": list(images)}


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_batch_follows_from_the_step_alone(made: Processor, tmp_path: Path) -> None:
    path = chats(tmp_path / "data", (1, 0, 2, 1, 0))
    with opened(made, tmp_path, path) as whole:
        in_order = [whole.groups(step, 2, 1) for step in range(5)]
        again = whole.groups(1, 2, 1)
    with opened(made, tmp_path, path) as resumed:
        assert same(resumed.groups(3, 2, 1), in_order[3])
        assert same(resumed.groups(4, 2, 1), in_order[4])
        assert resumed.state == whole.state
    assert same(again, in_order[1])
    # Two epochs and each conversation twice.
    assert sum(num_images(groups)[0] for groups in in_order) == 8


def test_groups_have_their_own_rows_and_images(made: Processor, tmp_path: Path) -> None:
    with opened(made, tmp_path, chats(tmp_path / "data", (1, 0, 2))) as found:
        [whole] = found.groups(0, 3, 1)
        cut = found.groups(0, 3, 3)
    assert torch.equal(torch.cat([group["input_ids"] for group in cut]), whole["input_ids"])
    assert torch.equal(torch.cat([group["labels"] for group in cut]), whole["labels"])
    assert sorted(num_images(cut)) == [0, 1, 2]
    pixels = [group["pixel_values"] for group in cut if "pixel_values" in group]
    assert torch.equal(torch.cat(pixels), whole["pixel_values"])


def test_answer_alone_is_learnt_behind_images(made: Processor, tmp_path: Path) -> None:
    with opened(made, tmp_path, chats(tmp_path / "data", (2,))) as found:
        [group] = found.groups(0, 1, 1)
    learnt = group["labels"][0] >= 0
    assert made.tokenizer.decode(group["input_ids"][0][learnt]) == "yes 0<|end|>"
    assert found.train.num_learnt == int(learnt.sum())


def test_rehearsal_gives_each_group_an_image_if_the_step_does_not(made: Processor, tmp_path: Path) -> None:
    with opened(made, tmp_path, chats(tmp_path / "data", (0, 0, 1, 0))) as found:
        assert num_images(found.rehearsal(0, 4, 2)) == [1, 1]
        assert found.rehearsal(0, 4, 1) == []
    (tmp_path / "text").mkdir()
    with opened(made, tmp_path / "text", chats(tmp_path / "text" / "data", (0, 0))) as found:
        assert found.rehearsal(0, 2, 1) == []


def test_held_out_conversations_are_not_trained_on(made: Processor, tmp_path: Path) -> None:
    with opened(made, tmp_path, chats(tmp_path / "data", (1,) * 8), holdout_fraction=0.25) as found:
        assert (found.num_sequences, len(found.held_out)) == (6, 2)
        [[held]] = found.holdout(4, 1)
        trained = torch.cat([found.groups(step, 2, 1)[0]["input_ids"] for step in range(3)])
    assert held["pixel_values"].shape[0] == 2
    rows = {tuple(row.tolist()) for row in trained}
    assert len(rows) == 6
    assert not rows & {tuple(row.tolist()) for row in held["input_ids"]}


def test_processor_is_called_by_one_thread_once_the_rows_are_made(
    made: Processor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fast tokenizer keeps the length to pad to: a conversation got that of one which another thread had begun.
    real = made.columns
    threads = []

    def columns(*arguments: Any) -> dict[str, torch.Tensor]:
        threads.append(threading.current_thread())
        return real(*arguments)

    monkeypatch.setattr(made, "columns", columns)
    with opened(made, tmp_path, chats(tmp_path / "data", (0, 1, 0, 1, 0, 1)), holdout_fraction=0.34) as found:
        found.groups(0, 1, 1)
        step = next(step for step in range(found.num_sequences) if found.rehearsal(step, 1, 1))
        assert num_images(found.rehearsal(step, 1, 1)) == [1]
        assert len(list(found.holdout(1, 1))) == len(found.held_out) > 0
    assert len(set(threads)) == 1
    assert threading.current_thread() not in threads


def test_row_that_is_longer_than_asked_for_is_refused(
    made: Processor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = made.columns
    monkeypatch.setattr(made, "columns", lambda texts, images, length, place: real(texts, images, length + 1, place))
    with (
        opened(made, tmp_path, chats(tmp_path / "data", (1,))) as found,
        pytest.raises(DataError, match="the processor makes other tokens of it now"),
    ):
        found.groups(0, 1, 1)


# ---- where images lie


def images_as_bytes(path: Path) -> Iterator[Any]:
    raw = base64.b64encode(path.read_bytes()).decode()
    yield f"data:image/png;base64,{raw}"
    yield {"url": f"data:;base64,{raw}"}


def test_images_that_come_as_bytes_are_kept_once_and_equal_those_of_files(made: Processor, tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png")
    with opened(made, tmp_path, write(tmp_path / "a.jsonl", record("a.png"))) as of_file:
        expected = of_file.groups(0, 1, 1)
    for number, image in enumerate(images_as_bytes(path)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with opened(made, folder, write(folder / "a.jsonl", record(image), record(image, answer="no"))) as found:
            groups = found.groups(0, 2, 2)
        assert all(torch.equal(group["pixel_values"], expected[0]["pixel_values"]) for group in groups)
        assert (folder / "run" / "images.bytes").read_bytes() == path.read_bytes()
    assert (tmp_path / "run" / "images.bytes").read_bytes() == b""


def test_images_in_parquet_are_read_as_datasets_stores_them(made: Processor, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    raw = picture(tmp_path / "a.png").read_bytes()
    rows = [{**record("x"), "images": [{"bytes": raw, "path": "gone.png"}]}, {**record(), "images": []}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with opened(made, tmp_path, tmp_path / "a.parquet") as found:
        assert num_images(found.groups(0, 2, 1)) == [1]


def test_images_of_a_dataset_are_read_without_decoding_them(made: Processor, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = picture(tmp_path / "a.png")
    with opened(made, tmp_path, write(tmp_path / "a.jsonl", record("a.png"))) as of_file:
        expected = of_file.groups(0, 1, 1)
    folder = tmp_path / "dataset"
    folder.mkdir()
    image = {"bytes": path.read_bytes(), "path": "a.png"}
    rows = datasets.Dataset.from_list([{**record("x"), "images": [image]}])
    features = datasets.Features({**rows.features, "images": datasets.List(datasets.Image())})
    rows.cast(features).to_parquet(folder / "train.parquet")
    config = config_of(tmp_path, dataset=str(folder)).data
    with ImageChats(config, made, tmp_path / "other") as found:
        assert same(found.groups(0, 1, 1), expected)


def test_directory_of_a_run_may_be_moved(made: Processor, tmp_path: Path) -> None:
    [image, _] = images_as_bytes(picture(tmp_path / "a.png"))
    path = write(tmp_path / "a.jsonl", record(image))
    with opened(made, tmp_path, path) as found:
        expected = found.groups(0, 1, 1)
    (tmp_path / "run").rename(tmp_path / "moved")
    config = config_of(tmp_path, str(path)).data
    with ImageChats(config, made, tmp_path / "moved") as found:
        assert same(found.groups(0, 1, 1), expected)


# ---- what is compared, and what is bad


def test_rows_that_are_there_are_taken_and_damaged_ones_made_again(made: Processor, tmp_path: Path) -> None:
    path = chats(tmp_path / "data", (1, 1))
    with opened(made, tmp_path, path) as found:
        state = found.state
    path.unlink()
    with opened(made, tmp_path, path) as found:
        assert (found.state, found.damaged) == (state, None)
    chats(tmp_path / "data", (1, 1))
    rows = tmp_path / "run" / "train.rows"
    rows.write_bytes(rows.read_bytes().replace(b"user", b"User"))
    with opened(made, tmp_path, path) as found:
        assert (found.state, found.damaged) == (state, str(rows))
    with opened(made, tmp_path, path, seed=3) as found:
        assert found.damaged is None


def test_image_that_changes_is_refused_when_its_turn_comes_and_not_before(made: Processor, tmp_path: Path) -> None:
    path = chats(tmp_path / "data", (1,) * 6)
    with opened(made, tmp_path, path) as found:
        ((row,),) = found._rows(4, 1)
    name = Path(row.images[0].path)
    name.write_bytes(name.read_bytes()[:-9])
    with opened(made, tmp_path, path) as found:
        for step in range(4):
            found.groups(step, 1, 1)
        with pytest.raises(DataError, match=rf"chats\.jsonl, line \d: the image {name} is not the one"):
            found.groups(4, 1, 1)


def test_bad_records_are_named_or_left_out_and_counted(made: Processor, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:99])
    bad = (record("b.png"), record("none.png"), record("a.png", answer="so " * 30), record("a.png", answer=""))
    said = ("cannot be decoded", "cannot read the image", "93 tokens|has 1?[0-9]+ tokens", "")
    for number, (each, words) in enumerate(zip(bad, said, strict=True)):
        folder = tmp_path / str(number)
        path = write(tmp_path / f"{number}.jsonl", record("a.png"), each)
        if words:
            with pytest.raises(DataError, match=rf"{number}\.jsonl, line 2: .*({words})"):
                opened(made, folder, path)
            assert not (folder / "run" / TOKENS_NOTE_FILE).exists()
    path = write(tmp_path / "all.jsonl", *bad[:3], record("a.png"))
    with opened(made, tmp_path, path, skip_bad=True) as found:
        assert (found.num_sequences, found.bad.count) == (1, 3)
        assert "line 1: an image cannot be decoded" in found.bad.said


def test_texts_beside_conversations_are_refused(made: Processor, tmp_path: Path) -> None:
    info = {"a": {"file_name": "a.jsonl", "columns": {"prompt": "text"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "a.jsonl").write_text('{"text": "all work"}')
    config = config_of(tmp_path, f"{tmp_path}/dataset_info.json#a", chat=None).data
    with pytest.raises(DataError, match=r"data\.images reads conversations alone"):
        ImageChats(config, made, tmp_path / "run")


def test_conversations_without_any_to_train_on_are_refused(made: Processor, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", record("none.png"))
    with pytest.raises(DataError, match="there is no conversation to train on"):
        opened(made, tmp_path, path, skip_bad=True)
