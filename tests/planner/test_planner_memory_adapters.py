"""The estimate of the GPU memory that adapters take, against what plain layers with PEFT's adapters save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_setups import elsewhere
from tiny_adapters import STACKS, peft_model
from tiny_models import tiny_config
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig

from megatier.adapters.lora import add_adapters
from megatier.config.data_section import DataConfig
from megatier.config.lora import LoraConfig
from megatier.config.schema import ModelConfig, RunConfig, TrainConfig
from megatier.models.decoder import build_skeleton
from megatier.planner.memory import ActivationBytes, activation_bytes

ADAPTED = tiny_config("llama")
TOKENS = 16


def saved_by_layers(lora: LoraConfig) -> int:
    """The bytes that the layers of a plain model with PEFT's adapters save for their backward, but for parameters."""
    model = peft_model(ADAPTED, lora)
    kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(2, TOKENS, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(input_ids=ids, use_cache=False)
    return sum(found.values())


def planned(lora: LoraConfig) -> float:
    """What a plan says of the same."""
    return estimated(lora, "keep").saved


def estimated(lora: LoraConfig, activations: Any, base: PretrainedConfig = ADAPTED) -> ActivationBytes:
    """What a plan says of the memory of a step."""
    config = RunConfig(
        model=ModelConfig(config={"model_type": base.model_type}, compute_dtype="fp32"),
        data=DataConfig(files=("random",), tokenizer="bytes", sequence_length=TOKENS),
        train=TrainConfig(batch=2, activations=activations),
    )
    skeleton = build_skeleton(base, "sdpa")
    add_adapters(skeleton, lora, "base")
    return activation_bytes(elsewhere(config, compiles=False, model=skeleton))


@pytest.mark.parametrize(("targets", "inputs"), [(("all-linear",), 6 * 64 + 96), (("q_proj", "v_proj"), 2 * 64)])
def test_activation_bytes_grow_by_the_dropped_inputs_of_adapters(
    targets: tuple[str, ...], inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each adapter saves an input of its own in fp32, and a byte of its mask for each element."""
    without, dropping = (LoraConfig(rank=4, dropout=dropout, targets=targets) for dropout in (0.0, 0.1))
    grown = planned(dropping) - planned(without)
    assert grown == pytest.approx(2 * TOKENS * ADAPTED.num_hidden_layers * inputs * 5)

    # As on a GPU. What the adapters shared before is not saved any more, which a plan does not know.
    monkeypatch.setattr(functional, "dropout", lambda x, p, *_: torch.native_dropout(x, p, True)[0])
    assert 0 < saved_by_layers(dropping) - saved_by_layers(without) <= grown


def test_activation_bytes_count_results_of_adapters_by_their_rank() -> None:
    """What an adapter adds to an output is not saved, so a higher rank costs its own results alone."""
    small, large = (LoraConfig(rank=rank) for rank in (2, 34))
    per_token = 32 * 7 * 4 * ADAPTED.num_hidden_layers
    assert saved_by_layers(large) - saved_by_layers(small) == 2 * TOKENS * per_token
    assert planned(large) - planned(small) == pytest.approx(2 * TOKENS * per_token, rel=0.5)

    # With DoRA it is saved, since the lengths of rows have gradients.
    assert planned(LoraConfig(rank=2, dora=True)) > planned(small) * 1.3


def test_activation_bytes_count_the_adapted_stacks_of_one_layer_twice_and_save_none_of_them() -> None:
    base = tiny_config("qwen3_moe")
    without = LoraConfig(rank=4, targets=("q_proj",))
    lora = LoraConfig(rank=4, targets=("q_proj",), target_parameters=STACKS)
    keeping, again, plain = (
        estimated(*given, base) for given in ((lora, "keep"), (lora, "recompute"), (without, "recompute"))
    )
    stacks = 3 * base.num_experts * base.hidden_size * base.moe_intermediate_size
    assert again.in_backward - plain.in_backward == pytest.approx(2 * 4 * stacks)
    assert again.saved == plain.saved
    assert keeping == again
