"""A loop with Hugging Face's accelerate over a streamed model.

    python examples/accelerate_loop.py MODEL TEXT.txt OUTPUT [--learning-rate 1e-4] [--nvme /mnt/a:200GiB]

MODEL is a folder with a tokenizer, or an id of the hub. The trained model is written to OUTPUT.
"""

import argparse
import itertools
from pathlib import Path

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("model")
PARSER.add_argument("text")
PARSER.add_argument("output")
PARSER.add_argument("--learning-rate", type=float, default=1e-4)
PARSER.add_argument("--ram", metavar="SIZE", help="RAM for state (default: what is free)")
PARSER.add_argument("--nvme", metavar="DIR:SIZE", help="a drive for the state that RAM has no room for")
if __name__ == "__main__":
    GIVEN = PARSER.parse_args()  # before the imports that take long

import torch
from accelerate import Accelerator
from transformers import AutoTokenizer

import megatier

ACCUMULATION = 2
LENGTH = 64


def main(
    model: str,
    text: str,
    output: str,
    learning_rate: float = 1e-4,
    steps: int = 10,
    ram: str | None = None,
    nvme: str | None = None,
) -> list[float]:
    """Train for some steps, and return the loss of each."""
    tiers = megatier.TiersConfig(ram=ram, nvme=nvme or ())
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    tokens = AutoTokenizer.from_pretrained(model)(Path(text).read_text(), return_tensors="pt")["input_ids"][0]
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    if len(rows) < 4:
        raise SystemExit(f"{text} makes {len(rows)} rows of {LENGTH} tokens, and a batch takes 4: give more text.")
    loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in rows], 4, drop_last=True)

    losses: list[float] = []
    with megatier.stream(model, tiers=tiers, accumulation_steps=ACCUMULATION, lr=learning_rate, clip=1.0) as streamed:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(streamed.optimizer, T_max=steps)
        net, optimizer, loader, schedule = accelerator.prepare(streamed.model, streamed.optimizer, loader, schedule)

        # One count over all epochs: a step may take its batches from two of them.
        batches = (batch for _ in itertools.count() for batch in loader)
        for number, batch in enumerate(itertools.islice(batches, ACCUMULATION * steps), 1):
            accelerator.backward(net(**batch).loss / ACCUMULATION)
            if number % ACCUMULATION:
                continue

            optimizer.step()  # clips by the exact norm; accelerator.clip_grad_norm_ would find no gradients
            schedule.step()
            optimizer.zero_grad()
            losses.append(streamed.last.loss)
            accelerator.print(f"step {len(losses)}  loss {losses[-1]:.4f}  norm {streamed.last.grad_norm:.3f}")
        streamed.export(output)
    return losses


if __name__ == "__main__":
    main(GIVEN.model, GIVEN.text, GIVEN.output, GIVEN.learning_rate, ram=GIVEN.ram, nvme=GIVEN.nvme)
