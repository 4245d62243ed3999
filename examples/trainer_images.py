"""Fine-tunes a model on conversations with images, with the Hugging Face Trainer over a streamed model.

    python examples/trainer_images.py MODEL CHATS.jsonl OUTPUT [--learning-rate 1e-5] [--nvme /mnt/a:200GiB]

MODEL is a folder with its processor, or an id of the hub. Each line of CHATS.jsonl has `messages`, whose images are
paths beside the file: {"type": "image", "image": "cat.png"}. Each of the first batches needs an image.
"""

import argparse

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("model")
PARSER.add_argument("chats")
PARSER.add_argument("output")
PARSER.add_argument("--learning-rate", type=float, default=1e-5)
PARSER.add_argument("--ram", metavar="SIZE", help="RAM for state (default: what is free)")
PARSER.add_argument("--nvme", metavar="DIR:SIZE", help="a drive for the state that RAM has no room for")
if __name__ == "__main__":
    GIVEN = PARSER.parse_args()  # before the imports that take long

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, ProcessorMixin, TrainingArguments

import megatier
from megatier.integrations.transformers_trainer import MegatierTrainer


def read_chats(path: Path) -> list[dict[str, Any]]:
    """Return the conversations, whose contents are lists of parts and whose images have whole paths."""
    chats = [json.loads(line) for line in path.read_text().splitlines() if line]
    for chat in chats:
        for message in chat["messages"]:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
            for part in message["content"]:
                if part["type"] == "image":
                    part["image"] = str(path.parent / part["image"])
    return chats


class Collator:
    """Makes batches as the processor does: tokens, pixels, and labels of all but images and padding."""

    def __init__(self, processor: ProcessorMixin) -> None:
        """Take a model's processor."""
        self.processor = processor
        names = ("image_token", "boi_token", "eoi_token")
        tokens = [getattr(processor, name) for name in names if getattr(processor, name, None)]
        self.unlearnt = processor.tokenizer.convert_tokens_to_ids(tokens)

    def __call__(self, chats: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return a batch of conversations."""
        texts = [self.processor.apply_chat_template(chat["messages"]) for chat in chats]
        images = [
            [
                Image.open(part["image"]).convert("RGB")
                for message in chat["messages"]
                for part in message["content"]
                if part["type"] == "image"
            ]
            for chat in chats
        ]
        options = {"padding": True, "padding_side": "right", "return_tensors": "pt", "add_special_tokens": False}
        batch = dict(self.processor(text=texts, images=images if any(images) else None, **options))
        labels = batch["input_ids"].clone()
        labels[batch["attention_mask"] == 0] = -100
        labels[torch.isin(labels, torch.tensor(self.unlearnt))] = -100
        return {**batch, "labels": labels}


def main(
    model: str,
    chats: str,
    output: str,
    learning_rate: float = 1e-5,
    max_steps: int = -1,
    ram: str | None = None,
    nvme: str | None = None,
) -> list[float]:
    """Train, write model and processor to OUTPUT, and return the losses of the steps."""
    args = TrainingArguments(
        output_dir=f"{output}-run",
        per_device_train_batch_size=4,
        learning_rate=learning_rate,
        max_grad_norm=1.0,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        max_steps=max_steps,
        remove_unused_columns=False,  # the collator takes whole conversations
        dataloader_drop_last=True,  # rows that make no whole step are left out of each epoch
    )
    processor = AutoProcessor.from_pretrained(model)
    trainer = MegatierTrainer(
        model,
        args,
        train_dataset=read_chats(Path(chats)),
        data_collator=Collator(processor),
        processing_class=processor,
        tiers=megatier.TiersConfig(ram=ram, nvme=nvme or ()),
    )
    with trainer.streamed:
        trainer.train()
        trainer.save_model(output)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main(GIVEN.model, GIVEN.chats, GIVEN.output, GIVEN.learning_rate, ram=GIVEN.ram, nvme=GIVEN.nvme)
