"""Conversations with images in `megatier train`: every number is that of transformers with its own processor."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from image_runs import COUNTS, LATE, LENGTH, RATE, STEPS, order, run_command
from plain_adamw import PlainAdamW
from safetensors.torch import load_file
from small_commands import after_step, metrics, outcome
from tiny_processors import WITHOUT_TORCHVISION, families
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from megatier.cli import main
from megatier.config.file import load_saved
from megatier.data.image_chats import ImageChats
from megatier.data.image_packs import positions_of
from megatier.data.processor import load_processor
from megatier.data.shuffle import permute
from megatier.engine.mask_answers import KINDS, answering
from megatier.models.masks import BlockMasks
from megatier.report.report_page import build

pytest.importorskip("PIL")

MORE = ("--train.steps=4", "--accept-changes", "--output.export=true")
PACKED: dict[str, Any] = {"data.max_patches": 256, "data.sequence_length": 128}
PLACES: dict[str, dict[str, Any]] = {
    "gpu": {"tiers.state": "gpu", "tiers.gpu": "16MiB"},
    "ram": {"tiers.state": "ram"},
    "nvme": {"tiers.state": "nvme"},
    "streamed": {"tiers.state": "ram", "tiers.streamed_share": 0.7},
    "nvme_twice": {"tiers.state": "nvme", "tiers.generations": 2},
}


def plain_batches(folder: Path, batch: int = 2) -> Iterator[dict[str, Tensor]]:
    """Batches as transformers makes them, by its processor's chat template; the answers are learnt."""
    from PIL import Image

    own = AutoProcessor.from_pretrained(folder / "model")
    records = [json.loads(line)["messages"] for line in (folder / "data" / "chats.jsonl").read_text().splitlines()]
    for messages in records:
        for message in messages:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
            for part in message["content"]:
                if part["type"] == "image":
                    part["image"] = Image.open(folder / "data" / part["image"])
    for step in range(STEPS):
        places = [divmod(position, len(records)) for position in range(step * batch, (step + 1) * batch)]
        chosen = [records[permute(place, len(records), (0, epoch))] for epoch, place in places]
        made = own.apply_chat_template(
            chosen,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": "max_length", "max_length": LENGTH, "padding_side": "right"},
        )
        labels = torch.full_like(made["input_ids"], -100)
        for row, messages in enumerate(chosen):
            # The mask of transformers 5.17 does not know that images move characters.
            answer = own.tokenizer(f"{messages[-1]['content'][0]['text']}<|end|>", return_tensors="pt")["input_ids"][0]
            stop = int(made["attention_mask"][row].sum())
            assert torch.equal(made["input_ids"][row, stop - len(answer) : stop], answer)
            labels[row, stop - len(answer) : stop] = answer
        yield {**made, "labels": labels}


def packed_batches(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The batches of a run whose conversations share sequences, of one group each."""
    config = load_saved(folder / "run" / "config.yaml")
    positions = positions_of(AutoModelForImageTextToText.from_pretrained(folder / "model"))
    with ImageChats(config.data, load_processor(config), folder / "run" / "data", positions=positions) as text:
        assert text.num_sequences < len(COUNTS)
        for step in range(STEPS):
            (batch,) = text.groups(step, config.train.batch, 1)
            yield batch


def check_equals_a_plain_loop(folder: Path, frozen: str = "", batches: Any = plain_batches) -> None:
    """Compare losses and weights of the run in a folder with those of a plain loop."""
    plain: Any = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    plain.train()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad = not frozen or frozen not in name
    adamw, losses = PlainAdamW(plain, clip=1.0), []
    for step, batch in enumerate(batches(folder), start=1):
        # Packed images are the model's own only if masks are asked by place, which transformers 5.24 does not.
        with answering(batch, BlockMasks()) if {"position_ids", KINDS} <= batch.keys() else nullcontext():
            loss = plain(**batch, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        # What is without a gradient is left as it is, by both.
        adamw.trained = {name: p for name, p in plain.named_parameters() if p.grad is not None}
        adamw.step(step, RATE)
    assert [record["loss"] for record in metrics(folder) if "loss" in record] == losses
    plain.save_pretrained(folder / "plain")
    expected, found = (load_file(folder / name / "model.safetensors") for name in ("plain", "run/model"))
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("family", [*families(), *WITHOUT_TORCHVISION])
def test_run_with_images_equals_a_plain_loop_with_transformers_own_processor(family: str, tmp_path: Path) -> None:
    assert main(run_command(tmp_path, family)) == 0
    check_equals_a_plain_loop(tmp_path)


def test_first_step_without_images_equals_that_of_a_plain_loop(tmp_path: Path) -> None:
    assert main(run_command(tmp_path, "gemma3", counts=LATE)) == 0
    check_equals_a_plain_loop(tmp_path)


def test_run_without_any_image_equals_a_plain_loop(tmp_path: Path) -> None:
    assert main(run_command(tmp_path, "llava", counts=(0,) * 6)) == 0
    check_equals_a_plain_loop(tmp_path)


def test_frozen_tower_stays_as_it_is(tmp_path: Path) -> None:
    frozen = {"model.frozen": "*vision_tower*"}
    assert main(run_command(tmp_path, "gemma3", frozen)) == 0
    check_equals_a_plain_loop(tmp_path, frozen="vision_tower")


@pytest.mark.parametrize("groups", [1, 2])
def test_run_with_images_has_the_same_bits_wherever_its_state_lies(groups: int, tmp_path: Path) -> None:
    found = []
    for name, place in PLACES.items():
        settings = {**place, "train.groups": groups, "output.directory": str(tmp_path / name)}
        assert main(run_command(tmp_path, "gemma3", settings, LATE)) == 0
        found.append(outcome(tmp_path / name))
    assert found.count(found[0]) == len(PLACES)


@pytest.mark.parametrize("family", families("qwen3_5"))
def test_conversations_that_share_sequences_equal_a_plain_loop(family: Any, tmp_path: Path) -> None:
    assert main(run_command(tmp_path, family, {**PACKED, "train.batch": 1})) == 0
    check_equals_a_plain_loop(tmp_path, batches=packed_batches)


def test_run_of_packed_conversations_resumes_with_the_same_bits(tmp_path: Path) -> None:
    settings = {**PACKED, "train.steps": 4, "output.checkpoint_every": 2, "tiers.state": "ram"}
    words = run_command(tmp_path, "llava", settings)
    assert main([*words, f"--output.directory={tmp_path / 'whole'}"]) == 0
    assert main([*words, "--train.steps=2", "--output.export=false"]) == 0
    assert main(["resume", str(tmp_path / "run"), "--tiers.state=nvme", *MORE]) == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_conversation_that_is_larger_than_a_sequence_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run_command(tmp_path, "llava", {"data.max_patches": 2})) == 2
    said = "the conversation has 3 images, and data.max_patches is 2, which bounds their number"
    assert said in capsys.readouterr().err


def test_image_that_is_damaged_later_ends_the_run_at_its_step_which_goes_on_when_it_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train.steps": 6, "train.batch": 1, "output.checkpoint_every": 2, "tiers.state": "ram"}
    words = run_command(tmp_path, "gemma3", settings, (1,) * 6)
    assert main([*words, f"--output.directory={tmp_path / 'whole'}"]) == 0

    # Pixels are made two steps ahead, so this one is read after the first step.
    image = tmp_path / "data" / f"{order(6)[4]}.png"
    raw = image.read_bytes()

    def damage() -> None:
        image.write_bytes(raw[:-20])

    with after_step(1, damage):
        assert main(words) == 2
    assert f"the image {image} is not the one that the run began with" in capsys.readouterr().err
    losses = [record["loss"] for record in metrics(tmp_path) if "loss" in record]
    assert losses == outcome(tmp_path / "whole")["losses"][:4]

    image.write_bytes(raw)
    with pytest.MonkeyPatch.context() as patch:
        real = importlib.metadata.version
        patch.setattr(importlib.metadata, "version", lambda name: "0.1" if name == "pillow" else real(name))
        assert main(["resume", str(tmp_path / "run")]) == 2
    assert "library of images pillow was" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "run"), "--tiers.state=nvme"]) == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_metrics_and_page_tell_how_many_images_were_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"train.steps": 1, "output.checkpoint_every": 1, "output.export": False}
    assert main(run_command(tmp_path, "gemma3", settings)) == 0
    assert "images/s" in capsys.readouterr().out
    assert main(["resume", str(tmp_path / "run"), "--train.steps=3", "--accept-changes"]) == 0
    steps = [record for record in metrics(tmp_path) if "loss" in record]

    # Three steps of two see all six conversations.
    assert [step["images_seen"] for step in steps][-1] == sum(step["images"] for step in steps) == sum(COUNTS)
    assert steps[0]["images_per_s"] == pytest.approx(steps[0]["images"] / steps[0]["seconds"])
    page = build(tmp_path / "run")
    assert "images seen" in page


def test_exports_of_run_and_checkpoint_have_the_files_of_the_processor(tmp_path: Path) -> None:
    settings = {"train.steps": 2, "output.checkpoint_every": 1, "data.holdout_fraction": 0.34}
    assert main(run_command(tmp_path, "llava", settings)) == 0
    assert any("heldout_loss" in record for record in metrics(tmp_path))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    own = AutoProcessor.from_pretrained(tmp_path / "model")
    for folder in (tmp_path / "run" / "model", tmp_path / "exported"):
        found = AutoProcessor.from_pretrained(folder)
        assert found.image_processor.to_dict() == own.image_processor.to_dict()
        assert (found.chat_template, found.image_token) == (own.chat_template, own.image_token)


def test_bad_image_is_refused_before_the_first_step_or_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = run_command(tmp_path, "llava", {"train.steps": 1})
    (tmp_path / "data" / "1.png").write_bytes(b"a cat")
    assert main(words) == 2
    assert re.search(r"chats\.jsonl, line 3: an image cannot be decoded", capsys.readouterr().err)
    assert main([*words, "--data.skip_bad=true", f"--output.directory={tmp_path / 'other'}"]) == 0
    assert "1 bad record is left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train.slices": 2}, "train.slices"),
        ({"train.clip": "null", "numerics.guard": False}, "updates have to wait"),
        ({"data.sequence_length": 16}, "data.sequence_length is 16"),
    ],
)
def test_settings_that_images_do_not_go_with_end_in_one_error(
    settings: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run_command(tmp_path, "llava", settings)) == 2
    assert said in capsys.readouterr().err
