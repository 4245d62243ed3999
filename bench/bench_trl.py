"""Times TRL's trainers over a streamed model beside the same trainers alone: `SFTTrainer` and `DPOTrainer`.

A model of Qwen2.5-1.5B's shape with random weights learns chats of mixed length, which fits the GPU: fp32 weights in
both, bf16 products, the same micro-batches in the same order. Plain TRL takes fused AdamW, once with `torch_compile`
and once without. No system computes activations again. Every system runs in a process of its own.

python bench/bench_trl.py [--kind sft dpo] [--steps 60]     writes bench/results/<machine>/trl.json
python bench/bench_trl.py --tiny                            a model for a few steps on a CPU

Results: seconds of the timed steps, and tokens/s, padding not counted. The trainers' own work is part of a step.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers.shapes import peak_gpu_bytes
from record import facts, folder_of

from megatier.compute.compile_clock import CLOCK

SYSTEMS = ("megatier", "plain", "compiled")
KINDS = ("sft", "dpo")
ROWS = {"sft": 8, "dpo": 4}
"""Rows of a micro-batch; of DPO each is a pair."""
WORDS = 20_000
"""Words of the chats, each of which is a token."""
LONGEST = 1024
"""Tokens of the longest chat."""
WARMUP = 20
"""Steps that compile."""


def make_model(folder: Path, *, is_tiny: bool) -> None:
    """Write a model with random weights, and a tokenizer of words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    sizes: dict[str, Any] = {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    }
    if is_tiny:
        sizes |= {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": WORDS + 4}
    config = Qwen2Config(**sizes, tie_word_embeddings=True, max_position_embeddings=2048)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *map(word_of, range(WORDS))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder / "tokenizer")  # beside a config.json it would be opened as Qwen2's own


def word_of(number: int) -> str:
    """Return a word."""
    return f"w{number}"


def chats(kind: str, count: int, longest: int) -> list[dict[str, str]]:
    """Return chats with lengths as real ones have them: many short ones, and a few long ones."""
    draw = random.Random(0)

    def text(tokens: int) -> str:
        return " ".join(word_of(draw.randrange(WORDS)) for _ in range(tokens))

    def chat() -> dict[str, str]:
        length = min(int(draw.lognormvariate(5.5, 0.8)) + 16, longest - 2)
        prompt, answer = text(length // 4), length - length // 4
        if kind == "sft":
            return {"prompt": prompt, "completion": text(answer)}
        return {"prompt": prompt, "chosen": text(answer), "rejected": text(draw.randint(8, answer))}

    return [chat() for _ in range(count)]


def timed(steps: int, tokens: list[int]) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """Return a callback that times steps, and what says what it found.

    Args:
        steps: all steps.
        tokens: of each step, as the collator counts them.
    """
    from transformers import TrainerCallback

    ends: list[float] = []
    compiling: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):
        """Notes the end of each step, once the GPU has done it."""

        def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - the trainer's
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            compiling.append(CLOCK.seconds)

        def on_log(self, *_: Any, **given: Any) -> None:  # noqa: ANN401
            losses.extend([given["logs"]["loss"]] if "loss" in given["logs"] else [])

    def found() -> dict[str, Any]:
        seconds = [later - earlier for earlier, later in pairwise(ends)]
        used = seconds[WARMUP - 1 :]
        return {
            "seconds": seconds,
            "median_seconds": median(used),
            "tokens_per_s": sum(tokens[WARMUP:steps]) / sum(used),
            "warmup_seconds": ends[WARMUP - 1] - ends[0],
            "compile_seconds": [later - earlier for earlier, later in pairwise(compiling)],
            "losses": losses,
            "peak_gpu_bytes": peak_gpu_bytes(),
        }

    return Clock(), found


def measure(kind: str, system: str, folder: Path, steps: int, longest: int) -> dict[str, Any]:
    """Train for some steps with one system."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megatier.integrations.trl_trainer import StreamedTrl

    has_gpu = torch.cuda.is_available()
    is_ours = system == "megatier"
    common: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": ROWS[kind],
        "max_steps": steps,
        "max_length": longest,
        "learning_rate": 1e-5,
        "bf16": not is_ours and has_gpu,  # ours computes in bf16 by itself
        "torch_compile": system == "compiled",
        "gradient_checkpointing": False,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": not has_gpu,
        "dataloader_pin_memory": has_gpu,
        "disable_tqdm": True,
    }
    base, config = (trl.SFTTrainer, trl.SFTConfig) if kind == "sft" else (trl.DPOTrainer, trl.DPOConfig)
    trainer_class = type("Streamed", (StreamedTrl, base), {}) if is_ours else base
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    given: dict[str, Any] = {"args": config(**common), "processing_class": tokenizer}
    if kind == "dpo":
        given["ref_model"] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    rows = Dataset.from_list(chats(kind, steps * ROWS[kind], longest))
    model = str(folder) if is_ours else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens: list[int] = []
    clock, found = timed(steps, tokens)
    trainer = trainer_class(model, train_dataset=rows, callbacks=[clock], **given)
    collate = trainer.data_collator

    def counting(features: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = collate(features)
        tokens.append(int(batch["attention_mask"].sum()))
        return batch

    trainer.data_collator = counting
    began = time.perf_counter()
    trainer.train()
    result = found() | {"seconds_of_all": time.perf_counter() - began}
    if is_ours:
        trainer.streamed.close()
    return {"kind": kind, "system": system, **result}


def run_alone(kind: str, system: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own, so that no system finds another's memory or code."""
    output = folder / f"{kind}_{system}.json"
    command = [sys.executable, __file__, "--one", kind, system, str(folder), "--steps", str(options.steps)]
    subprocess.run([*command, "--output", str(output), *(["--tiny"] if options.tiny else [])], check=True)
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Measure every system for every kind of trainer."""
    parser = argparse.ArgumentParser(description="TRL over a streamed model beside TRL alone.")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="trainers (both)")
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="systems (all)")
    parser.add_argument("--steps", type=int, default=60, help=f"steps, of which {WARMUP} are not timed (60)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--output", type=Path, help="the file of results")
    parser.add_argument("--one", nargs=3, metavar=("KIND", "SYSTEM", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, system, folder = options.one
        found = measure(kind, system, Path(folder), options.steps, 64 if options.tiny else LONGEST)
        options.output.write_text(json.dumps(found), encoding="utf-8")
        return

    found = facts() | {"rows": []}
    output = options.output or folder_of(found["machine"]) / "trl.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        make_model(folder, is_tiny=options.tiny)
        for kind in options.kind:
            for system in options.system:
                row = run_alone(kind, system, folder, options)
                print({key: value for key, value in row.items() if not isinstance(value, list)}, flush=True)
                found["rows"].append(row)
                output.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
