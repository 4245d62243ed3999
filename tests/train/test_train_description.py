"""What a run says before its first step."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from small_commands import command, write_chats

from megatier.cli import main
from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig, TrainConfig
from megatier.data.packed_text import PackedText
from megatier.data.tokenizer import byte_tokenizer
from megatier.train.description import describe_text
from megatier.train.shared_text import SharedText

LLAMA = ModelConfig(config={"model_type": "llama"})


def said(config: RunConfig, text: PackedText) -> list[str]:
    target = io.StringIO()
    describe_text(Console(file=target, width=200), config, text)
    return target.getvalue().splitlines()


def described(folder: Path, data: DataConfig, train: TrainConfig) -> tuple[list[str], PackedText]:
    """What is said of a dataset, which is the same when the files of tokens are taken again."""
    config = RunConfig(model=LLAMA, data=data, train=train)
    progress: list[int] = []
    text = PackedText.build(data, byte_tokenizer(), folder / "data", progress.append)
    assert sum(progress) <= text.num_tokens + text.held_out.num_tokens
    again = PackedText.build(data, byte_tokenizer(), folder / "data", progress.append)
    assert said(config, again) == said(config, text)
    return said(config, text), text


def test_run_on_documents_says_how_many_they_are_and_what_an_epoch_is(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "x" * 31}) for _ in range(10)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = DataConfig(
        files=(str(tmp_path / "a.jsonl"),), tokenizer="bytes", sequence_length=8, holdout_fraction=0, format="jsonl"
    )
    words, _ = described(tmp_path, data, TrainConfig(steps=15, batch=4))
    assert words == ["10 documents, 320 tokens to train on; an epoch is 10 steps, and 15 steps are 1.5 epochs"]


def test_moments_and_settings_without_effect_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"train.kept_layers": 1, "train.moments": "bf16", "train.steps": 1, "output.export": False}
    assert main(command(tmp_path, settings)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "with bf16 moments" in said
    assert "train.kept_layers is 1 and has no effect, because" in said


def test_run_on_conversations_says_how_many_tokens_are_learnt_and_warns_of_hundreds_of_epochs(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because"}]
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 20))
    data = DataConfig(files=(str(tmp_path / "a.jsonl"),), tokenizer="bytes", sequence_length=64, chat="messages")
    words, text = described(tmp_path, replace(data, holdout_fraction=0), TrainConfig(steps=1000, batch=4))
    learnt = sum(int((batch["labels"] != -100).sum()) for batch in text.train.batches(1, 64))
    assert f"20 conversations, {text.num_tokens:.2f}"[:17] in words[0]
    assert f"of which {learnt} are learnt; an epoch is" in words[0]
    assert words[1].startswith("Note that this trains on the same text")


def test_run_on_described_conversations_calls_them_so(tmp_path: Path) -> None:
    data = DataConfig(files=(write_chats(tmp_path),), tokenizer="bytes", sequence_length=64, holdout_fraction=0)
    words, _ = described(tmp_path, data, TrainConfig(steps=1, batch=4))
    assert words[0].startswith("30 conversations, ")


def test_text_of_one_document_that_is_cut_for_evaluation_is_told_without_a_count(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 319)
    data = DataConfig(files=(str(tmp_path / "a.txt"),), tokenizer="bytes", sequence_length=8, holdout_fraction=0.2)
    words, text = described(tmp_path, data, TrainConfig(steps=8, batch=4))
    assert text.held_out.num_tokens == 64
    assert [part.num_documents for part in (text.train, text.held_out)] == [None, None]
    assert words == ["256 tokens to train on; an epoch is 8 steps, and 8 steps are 1 epochs"]


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 10), (0.01, 1), (2.55, 26)])
def test_epochs_are_turned_into_whole_steps(epochs: float, steps: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 319)
    data = DataConfig(files=(str(tmp_path / "a.txt"),), tokenizer="bytes", sequence_length=8, holdout_fraction=0)
    text = SharedText(None, PackedText.build(data, byte_tokenizer(), tmp_path / "data"))
    console = Console(record=True, width=200)
    made = text.with_steps(TrainConfig(epochs=epochs, batch=4).bounded(steps_given=False), console)
    assert (made.steps, made.epochs) == (steps, None)
    assert text.with_steps(made, console) is made
    assert not console.export_text()


@pytest.mark.parametrize(("given", "steps"), [(7, 7), (10, 10), (1000, 10)])
def test_epochs_and_steps_that_are_both_given_end_the_run_at_the_smaller_one(
    given: int, steps: int, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("x" * 319)
    data = DataConfig(files=(str(tmp_path / "a.txt"),), tokenizer="bytes", sequence_length=8, holdout_fraction=0)
    text = SharedText(None, PackedText.build(data, byte_tokenizer(), tmp_path / "data"))
    console = Console(record=True, width=200)
    made = text.with_steps(TrainConfig(epochs=1.0, batch=4, steps=given).bounded(steps_given=True), console)
    assert (made.steps, made.epochs) == (steps, None)
    assert (
        f"train.epochs 1 takes 10 steps, and train.steps is {given:,}: the smaller one ends the run, after {steps}"
    ) in console.export_text()
