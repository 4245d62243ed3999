"""Supervised fine-tuning with TRL's SFTTrainer over a streamed model.

    python examples/trl_sft.py MODEL CHATS.jsonl OUTPUT

MODEL is a folder with a tokenizer, or an id of the hub. Each line of CHATS.jsonl has `prompt` and `completion`.
"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import megatier
from megatier.integrations.trl_trainer import StreamedTrl


class StreamedSFT(StreamedTrl, SFTTrainer):
    """TRL's trainer, with the step of megatier."""


def main(model: str, chats: str, output: str, max_steps: int = -1) -> float:
    """Train, write the model to OUTPUT, and return the mean loss."""
    args = SFTConfig(
        output_dir=f"{output}-run",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-5,
        max_grad_norm=1.0,
        bf16=False,  # the streamed model computes in bf16 by itself, with masters in fp32
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        max_steps=max_steps,
    )
    tiers = megatier.TiersConfig(ram="4GiB")  # for state on drives: nvme=["/mnt/a:500GiB"]
    steps = args.gradient_accumulation_steps
    with megatier.stream(model, tiers=tiers, accumulation_steps=steps, fused_loss=False) as streamed:
        data = load_dataset("json", data_files=chats, split="train")
        trainer = StreamedSFT(streamed, args, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(model))
        loss: float = trainer.train().training_loss
        trainer.save_model(output)
    return loss


if __name__ == "__main__":
    main(*sys.argv[1:4])
