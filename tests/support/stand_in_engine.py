"""A stand-in for vLLM at the interface that TRL calls, in which a plain model of transformers makes the completions.

As vLLM's senders do, the server keeps all tensors that it is given until the last one has come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

SEED = 11


class StandInEngine:
    """An engine with the weights of a folder, which takes others by the names of that folder."""

    made: list[StandInEngine] = []  # noqa: RUF012 - the engines of a test, which TRL makes
    """The engines so far."""

    def __init__(self, model: str, **_: object) -> None:
        self.awake: set[str] = set()
        """What has memory again since the engine last slept."""
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.parameters = dict(self.model.named_parameters())
        self.num_taken = 0
        """The tensors that were taken so far."""
        runner = SimpleNamespace(model=self)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=SimpleNamespace(max_model_len=64))
        StandInEngine.made.append(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take weights by name, as `model.load_weights` of vLLM's models does."""
        with torch.no_grad():
            for name, tensor in weights:
                assert self.parameters[name].shape == tensor.shape
                self.parameters[name].copy_(tensor)
                self.num_taken += 1

    def reset_prefix_cache(self) -> None:
        """Forget nothing: there is no cache."""

    def sleep(self, level: int) -> None:
        """Give the memory back, with the weights in it."""
        assert level == 2
        self.awake.clear()
        for parameter in self.parameters.values():
            parameter.data.fill_(float("nan"))

    def wake_up(self, tags: list[str]) -> None:
        """Take memory again, for weights that come then or for the cache."""
        self.awake.update(tags)

    def generate(self, prompts: Sequence[Any], sampling_params: Any, use_tqdm: bool = False) -> list[Any]:
        """Completions of the prompts, equal ones together, and the log-probability of each token."""
        generator = torch.Generator().manual_seed(SEED)
        rows = [prompt["prompt_token_ids"] for prompt in prompts]
        return [
            output for _, equal in groupby(rows) for output in self._complete(list(equal), sampling_params, generator)
        ]

    @torch.no_grad()
    def _complete(self, prompts: list[list[int]], params: Any, generator: torch.Generator) -> Iterator[Any]:
        ids = torch.tensor(prompts)
        logprobs = list[Tensor]()
        for _ in range(params.max_tokens):
            scores = self.model(ids).logits[:, -1].log_softmax(-1)
            tokens = torch.multinomial(scores.exp(), 1, generator=generator)
            ids = torch.cat([ids, tokens], 1)
            logprobs.append(scores.gather(1, tokens)[:, 0])
        for row, prompt in enumerate(prompts):
            made = ids[row, len(prompt) :].tolist()
            found = [SimpleNamespace(rank=1, logprob=float(scores[row])) for scores in logprobs]
            one = [{token: each} for token, each in zip(made, found, strict=True)]
            yield SimpleNamespace(prompt_token_ids=prompt, outputs=[SimpleNamespace(token_ids=made, logprobs=one)])


class StandInClient:
    """TRL's client of a vLLM server, with a stand-in engine behind it."""

    folder = ""
    """The folder that the server has loaded."""

    def __init__(self, **_: object) -> None:
        self.engine = StandInEngine(self.folder)

    def init_communicator(self, device: torch.device) -> None:
        """Nothing is to be opened."""

    def get_server_info(self) -> dict[str, Any]:
        """What the trainer asks before it begins."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(
        self, metadata: Sequence[tuple[str, str, list[int]]], named: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Take all weights, which are as they were announced."""
        kept = list(named)
        found = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in kept]
        assert found == list(metadata)
        self.engine.load_weights(kept)

    def reset_prefix_cache(self) -> None:
        """Forget nothing: there is no cache."""

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **_: object) -> dict[str, Any]:
        """n completions of each prompt."""
        many = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(n)]
        outputs = self.engine.generate(many, SimpleNamespace(max_tokens=max_tokens))
        completions = [output.outputs[0] for output in outputs]
        return {
            "prompt_ids": prompts,
            "completion_ids": [completion.token_ids for completion in completions],
            "logprobs": [[[next(iter(of.values())).logprob] for of in each.logprobs] for each in completions],
        }


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: str) -> list[StandInEngine]:
    """Let TRL find the stand-ins where it would find vLLM; returns the engines that it makes from now on."""
    module = "trl.generation.vllm_generation"
    monkeypatch.setattr(StandInEngine, "made", [])
    monkeypatch.setattr(StandInClient, "folder", folder)
    monkeypatch.setattr(f"{module}.is_vllm_available", lambda: True)
    monkeypatch.setattr(f"{module}.LLM", StandInEngine, raising=False)
    monkeypatch.setattr(f"{module}.VLLMClient", StandInClient)
    monkeypatch.setattr(f"{module}.SamplingParams", SimpleNamespace, raising=False)
    return StandInEngine.made
