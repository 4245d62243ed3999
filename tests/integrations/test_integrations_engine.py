"""A real engine on a CPU that takes the weights of a streamed model: `tools/engine.sh` makes an environment for it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from streamed_loops import TIERS
from tiny_models import tiny_config
from tiny_runs import plain_model
from transformers import AutoModelForCausalLM

import megatier

# Read where vLLM is imported: the engine is in this process, and takes no cores for itself.
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
vllm: Any = pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("default")  # of vLLM
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
PROMPT = [5, 6, 7, 8]
TOKENS = 8


def text_of(engine: Any) -> list[int]:
    greedy = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    (made,) = engine.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)
    return list(made.outputs[0].token_ids)


def test_an_engine_that_is_fed_in_lent_memory_gives_the_texts_of_the_exported_model_after_each_step(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model"
    plain_model(tiny_config("llama", **SIZES)).save_pretrained(path)
    # In bf16 vLLM's attention may use instructions that not every system grants, and the process ends.
    engine = vllm.LLM(str(path), dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True)
    runner = engine.llm_engine.model_executor.driver_worker.model_runner

    texts = [text_of(engine)]
    options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "compile": False, "lr": 1e-2}
    with megatier.stream(str(path), tiers=replace(TIERS, gpu=2 << 20), **options) as streamed:
        for number in (1, 2):
            tokens = torch.randint(128, (4, 16), generator=torch.Generator().manual_seed(number))
            streamed.model(input_ids=tokens, labels=tokens).loss.backward()
            streamed.optimizer.step()
            with streamed.lent_memory():
                runner.reload_weights(weights_iterator=iter(streamed.weights()))
                engine.reset_prefix_cache()
                texts.append(text_of(engine))

            streamed.export(tmp_path / f"after {number}")
            exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / f"after {number}")
            assert exported.dtype == torch.float32
            whole = exported.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1)
            assert texts[-1] == whole[0, len(PROMPT) :].tolist()
    assert len({tuple(text) for text in texts}) == 3, "the steps change the texts"
