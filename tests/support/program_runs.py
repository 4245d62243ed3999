"""Runs of other training programs in processes of their own, whose libraries they change for themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tiny_adapters import peft
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

import megatier

ADAPTERS = "TEST_ADAPTERS"
"""Variable with the file of values that adapters begin with."""
RANK, TARGETS, SEED = 4, ["q_proj", "down_proj"], 7


class GivenAdapters(TrainerCallback):
    """Lets the adapters of a plain run begin as those of a streamed one do."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model = given["model"]
        values = load_file(os.environ[ADAPTERS])
        adapters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        assert len(values) == len(adapters)
        for name, value in adapters.items():
            value.data.copy_(values[name.removeprefix("base_model.model.")])


def folder_with_model(folder: Path) -> Path:
    """A tiny Llama and a tokenizer of bytes, with as many tokens as the model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = dict(zip(("bos_token", "eos_token", "pad_token"), ("<s>", "</s>", "<pad>"), strict=True))
    vocabulary = {token: number for number, token in enumerate([*alphabet, *names.values()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    ids: dict[str, Any] = {name.replace("token", "token_id"): vocabulary[token] for name, token in names.items()}
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        **ids,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def records(file: Path) -> Path:
    """Sixteen records with an instruction and an answer."""
    rows = [{"instruction": f"say {n}", "input": "", "output": "word " * (n % 5 + 1) + str(n)} for n in range(16)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def first_adapters(model: Path, file: Path) -> Path:
    """The values that adapters of a streamed run begin with, by name."""
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    with megatier.stream(model, peft_config=config, seed=SEED, compute_dtype="fp32") as streamed:
        names = [name for name, value in streamed.model.named_parameters() if value.requires_grad]
        save_file({name: streamed.read(name).contiguous() for name in names}, file)
    return file


def run(*command: str, adapters: Path | None = None) -> str:
    """Run a command in this Python's folder, offline and on one thread of the CPU; what it wrote."""
    given = {
        "AXOLOTL_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent),
        ADAPTERS: str(adapters),
    }
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-3000:]
    return text


def logged(folder: Path, key: str) -> list[float]:
    """What a run's Trainer logged."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry[key] for entry in history if key in entry]
