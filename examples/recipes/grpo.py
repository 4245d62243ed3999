"""GRPO by a recipe: TRL's GRPOTrainer over a streamed model, which lends its GPU memory to completions.

    python examples/recipes/grpo.py RECIPE REWARD [--section.key value ...]

RECIPE is a file such as qwen2.5-7b-grpo-48gb.yaml, whose data.files are JSON Lines with a `prompt` each, as text or as
messages. REWARD is a Python file with a function `reward(completions, **columns)`, which returns a number for each
completion. A step has train.batch completions, in train.groups micro-batches; 8 are of one prompt. The learning rate
falls as TRL's own default says. Settings that are not handed on (`TAKEN`) are refused.
"""

import argparse
import runpy
from dataclasses import fields
from pathlib import Path

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("recipe", type=Path)
PARSER.add_argument("reward")
if __name__ == "__main__":
    GIVEN, OVERRIDES = PARSER.parse_known_args()  # before the imports that take long

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import megatier
from megatier.config import file as config_file
from megatier.config.schema import RunConfig
from megatier.integrations.trl_trainer import StreamedTrl

GENERATIONS = 8
"""Completions of one prompt."""
TAKEN = {
    "model": {"path", "attention", "fused_loss"},
    "data": {"files", "sequence_length"},
    "train": {"steps", "batch", "groups", "learning_rate", "clip", "activations", "moments"},
    "numerics": set[str](),
    "output": {"directory"},
}
"""The settings that are handed on, of all sections but `tiers`, which is handed on whole."""


class StreamedGRPO(StreamedTrl, GRPOTrainer):
    """TRL's trainer, with the step of megatier."""


def check(run: RunConfig) -> None:
    """Refuse what would be dropped."""
    for section, taken in TAKEN.items():
        given = getattr(run, section)
        for field in fields(given):
            if field.name not in taken and getattr(given, field.name) != field.default:
                raise SystemExit(f"GRPO does not take {section}.{field.name}. Remove it, or write your own script.")


def main(recipe: Path, reward: str, overrides: list[str]) -> list[float]:
    """Train, write the model, and return the mean rewards of the steps."""
    run = config_file.load(recipe, overrides)
    train, folder = run.train, run.model.path
    check(run)
    args = GRPOConfig(
        output_dir=f"{run.output.directory}/trl",
        per_device_train_batch_size=train.batch // train.groups,
        gradient_accumulation_steps=train.groups,
        num_generations=GENERATIONS,
        max_completion_length=run.data.sequence_length // 2,
        learning_rate=train.learning_rate,
        max_grad_norm=train.clip or 0.0,
        max_steps=train.steps,
        logging_steps=1,
        save_strategy="no",
        bf16=False,  # the streamed model computes in bf16 by itself, with masters in fp32
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    prompts = load_dataset("json", data_files=list(run.data.files), split="train")
    with megatier.stream(
        folder,
        tiers=run.tiers,
        fused_loss=run.model.fused_loss,
        attention=run.model.attention,
        accumulation_steps=train.groups,
        activations=train.activations,
        moments=train.moments,
        lr=train.learning_rate,
    ) as streamed:
        streamed.lends_memory = True
        print(streamed.lent_room())  # noqa: T201 - it refuses weights that would not fit beside the texts
        rewarding = runpy.run_path(reward)["reward"]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        trainer = StreamedGRPO(streamed, rewarding, args=args, train_dataset=prompts, processing_class=tokenizer)
        trainer.train()
        trainer.save_model(f"{run.output.directory}/export")
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    main(GIVEN.recipe, GIVEN.reward, OVERRIDES)
