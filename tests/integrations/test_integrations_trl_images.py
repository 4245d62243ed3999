"""TRL's SFT on conversations with images, by its own collator: a streamed model has the losses of TRL alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_processors import chats, model_folder
from transformers import AutoModelForImageTextToText, AutoProcessor

from megatier.config.schema import TiersConfig

pytest.importorskip("PIL")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("default")  # of the other libraries

MIB = 1 << 20
TIERS = TiersConfig(device="cpu", gpu=8 * MIB, ram=64 * MIB, state=("ram",), io_threads=2, update_threads=2)


def rows(path: Path) -> Any:
    """The conversations of a file, as TRL takes them: places of images in the messages, and the images beside."""
    from PIL import Image

    found = []
    for line in path.read_text().splitlines():
        images = []
        messages = []
        for message in json.loads(line)["messages"]:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            for part in parts:
                if part["type"] == "image":
                    images.append(Image.open(path.parent / part["image"]).convert("RGB"))
            shown = [{"type": part["type"], "text": part.get("text")} for part in parts]
            messages.append({"role": message["role"], "content": shown})
        found.append({"messages": messages, "images": images})
    return datasets.Dataset.from_list(found)


def losses(make: Any, model: Any, path: Path, data: Any, folder: Path, **others: Any) -> list[float]:
    args = trl.SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        max_steps=3,
        max_length=None,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        save_strategy="no",
    )
    processor = AutoProcessor.from_pretrained(path)
    trainer = make(model, args=args, train_dataset=data, processing_class=processor, **others)
    trainer.train()
    if others.get("tiers"):
        with trainer.streamed:
            trainer.save_model(str(folder / "model"))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trl_with_images_has_the_losses_of_trl_alone_and_writes_the_processor(tmp_path: Path) -> None:
    from megatier.integrations.trl_trainer import StreamedTrl

    model = model_folder("llava", tmp_path / "model")
    data = rows(chats(tmp_path / "data", (1, 2, 1, 1, 1, 1, 2, 1)))
    plain = AutoModelForImageTextToText.from_pretrained(model)
    expected = losses(trl.SFTTrainer, plain, model, data, tmp_path / "plain")
    streamed = type("StreamedSFT", (StreamedTrl, trl.SFTTrainer), {})
    exact = {"compute_dtype": "fp32"}
    folder = tmp_path / "streamed"
    found = losses(streamed, str(model), model, data, folder, tiers=TIERS, stream_kwargs=exact)
    assert found[0] == expected[0]

    # Torch's AdamW rounds otherwise.
    assert found == pytest.approx(expected, rel=1e-6)
    AutoProcessor.from_pretrained(folder / "model")
