"""The estimate of GPU memory beside the arena, against what runs on a GPU took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, NumericsConfig, RunConfig, TiersConfig, TrainConfig
from megatier.models.decoder import find_units
from megatier.planner.memory import ActivationBytes, activation_bytes
from megatier.session.skeleton import skeleton_of
from megatier.session.workload import Workload

RESULTS = Path(__file__).parent.parent / "bench" / "results"
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
SHAPES = {"8b": (4096, 14336, 32, 8, 32, 128256), "3b": (2048, 11008, 16, 2, 36, 151936)}


def estimate(
    shape: str, batch: int, sequence: int, model: dict[str, Any], train: dict[str, Any], **data: Any
) -> ActivationBytes:
    settings = dict(zip((*WIDTHS, "vocab_size"), SHAPES[shape], strict=True))
    config = RunConfig(
        model=ModelConfig(config={"model_type": "llama", "tie_word_embeddings": False} | settings, **model),
        data=DataConfig(files=("random",), tokenizer="bytes", sequence_length=sequence, **data),
        train=TrainConfig(batch=batch, **train),
    )
    skeleton = skeleton_of(config.model)
    units, numerics = find_units(skeleton), NumericsConfig()
    work = Workload.of(skeleton, units, config.model, TiersConfig(), config.train, numerics, sequence)
    return activation_bytes(skeleton, config, work, compiles=True)


@pytest.mark.parametrize("row", range(1, 10))
def test_activation_bytes_are_those_of_a_measured_run(row: int) -> None:
    run = json.loads((RESULTS / "h200" / f"row{row}.json").read_text())
    settings = run["settings"]
    model = {"loss_chunk": 4096} | settings["model"]
    # They were measured when attention was always computed twice.
    train = {"kept_attention": False} | settings["train"]
    found = estimate(run["shape"], run["batch"], run["sequence_length"], model, train)
    beside = run["peak_gpu_bytes"] - run["state_bytes"]["gpu"] - run["other_bytes"]["gpu"]
    assert found.peak == pytest.approx(beside, rel=0.12)
    assert abs(found.peak - beside) < 0.06 * run["peak_gpu_bytes"]


def test_activation_bytes_shrink_with_slices_share_and_offload() -> None:
    keep = estimate("3b", 16, 1024, {}, {}).peak
    less = estimate("3b", 16, 1024, {"saved_share": 0.3}, {}).peak
    none = estimate("3b", 16, 1024, {"saved_share": 0.0}, {}).peak
    offload = estimate("3b", 16, 1024, {"saved_share": 0.0}, {"activations": "offload"}).peak
    cut = estimate("3b", 16, 1024, {"saved_share": 0.0}, {"activations": "offload", "slices": 4}).in_backward
    assert keep > less > none > offload
    assert cut < estimate("3b", 16, 1024, {"saved_share": 0.0}, {"activations": "offload"}).in_backward


def test_activation_bytes_of_documents_apart_have_a_mask_but_for_flex_attention() -> None:
    """4 rows of 8,192 tokens: 256 MiB as bytes, and as much again for each of the two slices in bf16."""
    slices = {"slices": 2}
    plain = estimate("3b", 4, 8192, {}, slices)
    apart = estimate("3b", 4, 8192, {}, slices, cross_documents=False)
    flex = estimate("3b", 4, 8192, {"attention": "flex_attention"}, {}, cross_documents=False)
    assert apart.at_loss - plain.at_loss == 256 << 20
    assert apart.in_backward - plain.in_backward == 512 << 20
    assert flex == estimate("3b", 4, 8192, {}, {})
