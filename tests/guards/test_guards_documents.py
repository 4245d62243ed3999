"""A model that lets a document see the one before it is refused by a trial, however little it sees."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_config
from tiny_runs import plain_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatier.compute.fp8 import set_fp8
from megatier.errors import UnsupportedModelError
from megatier.guards.documents import check_documents

IDS = torch.randint(3, 160, (32,), generator=torch.Generator().manual_seed(0))


def check(model: PreTrainedModel, leak: float, dtype: torch.dtype) -> None:
    """Try a model to whose result the mean of its whole row is added."""
    nn.Module.to(model, dtype)

    def run(batch: dict[str, Tensor]) -> Tensor:
        number = (batch["position_ids"] == 0).cumsum(1)
        sees = (number[:, None, :, None] == number[:, None, None, :]).tril()
        found: Tensor = model(**batch, attention_mask=sees).logits
        return found + leak * found.mean(dim=1, keepdim=True) if leak else found

    with torch.no_grad():
        check_documents(run, IDS, 160, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_model_that_sees_a_little_of_the_document_before_is_refused(dtype: torch.dtype) -> None:
    model = plain_model(tiny_config("llama")).eval()
    check(model, 0.0, dtype)
    with pytest.raises(UnsupportedModelError, match="lets a document of a row see the one before it"):
        check(model, 1e-5 if dtype is torch.float32 else 1e-2, dtype)


def test_dense_model_with_products_in_fp8_keeps_its_documents_apart() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    model = plain_model(tiny_config("llama", **sizes)).eval()
    layers = [module for name, module in model.named_modules() if type(module) is nn.Linear and name != "lm_head"]
    for layer in layers:
        set_fp8(layer)
    assert len(layers) % 7 == 0
    check(model, 0.0, torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="lets a document of a row see the one before it"):
        check(model, 1e-2, torch.bfloat16)


def test_model_with_experts_may_round_otherwise() -> None:
    model = plain_model(tiny_config("qwen3_moe", output_router_logits=False)).eval()
    assert any("experts" in name for name, _ in model.named_modules())
    check(model, 1e-7, torch.float32)
