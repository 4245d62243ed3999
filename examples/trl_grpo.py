"""GRPO with TRL's GRPOTrainer over a streamed model: it learns to answer in digits, on a CPU in a minute.

    python examples/trl_grpo.py OUTPUT [--model MODEL] [--steps 30] [--learning-rate 3e-3]

Without MODEL, a folder or an id of the hub, a tiny model with random weights is made in OUTPUT-first. The last line
that is printed has the mean rewards of the first and the last steps.
"""

import argparse

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("output")
PARSER.add_argument("--model")
PARSER.add_argument("--steps", type=int, default=30)
PARSER.add_argument("--learning-rate", type=float, default=3e-3)
PARSER.add_argument("--ram", metavar="SIZE", help="RAM for state (default: what is free)")
PARSER.add_argument("--nvme", metavar="DIR:SIZE", help="a drive for the state that RAM has no room for")
if __name__ == "__main__":
    GIVEN = PARSER.parse_args()  # before the imports that take long

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

import megatier
from megatier.data.tokenizer import byte_tokenizer
from megatier.integrations.trl_trainer import StreamedTrl

SHOWN = 5
"""Steps of which a mean reward is printed."""


class StreamedGRPO(StreamedTrl, GRPOTrainer):
    """TRL's trainer, with the step of megatier."""


def digits(completions: list[str], **_: object) -> list[float]:
    """Return the share of digits in each completion: anybody can check it."""
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]


def make_tiny(folder: str) -> None:
    """Write a tiny model with random weights, and a tokenizer of bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)


def main(
    output: str,
    model: str | None = None,
    steps: int = 30,
    learning_rate: float = 3e-3,
    ram: str | None = None,
    nvme: str | None = None,
) -> tuple[float, float]:
    """Train, write the model to OUTPUT, and return the mean rewards of the first and the last steps."""
    if model is None:
        model = f"{output}-first"
        make_tiny(model)
    args = GRPOConfig(
        output_dir=f"{output}-run",
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_generations=16,
        max_completion_length=8,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=steps,
        logging_steps=1,
        bf16=False,  # the streamed model computes in bf16 by itself, with masters in fp32
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    tiers = megatier.TiersConfig(ram=ram, nvme=nvme or ())
    data = Dataset.from_list([{"prompt": f"{number} and one is "} for number in range(64)])
    trainer = StreamedGRPO(
        model, digits, args=args, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(model), tiers=tiers
    )
    with trainer.streamed:
        trainer.train()
        trainer.save_model(output)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    first, last = (sum(some) / len(some) for some in (rewards[:SHOWN], rewards[-SHOWN:]))
    print(f"mean reward of the first {SHOWN} steps {first:.2f}, of the last {last:.2f}")  # noqa: T201
    return first, last


if __name__ == "__main__":
    main(GIVEN.output, GIVEN.model, GIVEN.steps, GIVEN.learning_rate, ram=GIVEN.ram, nvme=GIVEN.nvme)
