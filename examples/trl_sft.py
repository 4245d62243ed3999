"""Supervised fine-tuning with TRL's SFTTrainer over a streamed model.

    python examples/trl_sft.py MODEL CHATS.jsonl OUTPUT [--learning-rate 1e-5] [--nvme /mnt/a:200GiB]

MODEL is a folder with a tokenizer, or an id of the hub. Each line of CHATS.jsonl has `prompt` and `completion`,
or `messages`.
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

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import megatier
from megatier.integrations.trl_trainer import StreamedTrl


class StreamedSFT(StreamedTrl, SFTTrainer):
    """TRL's trainer, with the step of megatier."""


def main(
    model: str,
    chats: str,
    output: str,
    learning_rate: float = 1e-5,
    max_steps: int = -1,
    ram: str | None = None,
    nvme: str | None = None,
) -> float:
    """Train, write the model to OUTPUT, and return the mean loss."""
    args = SFTConfig(
        output_dir=f"{output}-run",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=learning_rate,
        max_grad_norm=1.0,
        bf16=False,  # the streamed model computes in bf16 by itself, with masters in fp32
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        max_steps=max_steps,
        dataloader_drop_last=True,  # rows that make no whole step are left out of each epoch
    )
    tiers = megatier.TiersConfig(ram=ram, nvme=nvme or ())
    data = load_dataset("json", data_files=chats, split="train")
    trainer = StreamedSFT(
        model, args, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(model), tiers=tiers
    )
    with trainer.streamed:
        loss: float = trainer.train().training_loss
        trainer.save_model(output)
    return loss


if __name__ == "__main__":
    main(GIVEN.model, GIVEN.chats, GIVEN.output, GIVEN.learning_rate, ram=GIVEN.ram, nvme=GIVEN.nvme)
