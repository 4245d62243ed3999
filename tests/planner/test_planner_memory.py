"""The estimate of GPU memory beside the arena, against what runs on a GPU took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_memory import CASES
from small_setups import elsewhere

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig, TrainConfig
from megatier.planner.memory import ActivationBytes, activation_bytes
from megatier.setup.skeleton import skeleton_of

RESULTS = Path(__file__).parents[2] / "bench" / "results"
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
    return activation_bytes(elsewhere(config, model=skeleton))


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


MEASURED = json.loads((RESULTS / "h100" / "memory.json").read_text())["cases"]


@pytest.mark.parametrize("name", MEASURED)
def test_activation_bytes_are_at_least_those_of_a_gpu_and_no_more_than_three_percent_above(name: str) -> None:
    """What tensors took there, and what torch took for them, both with the arena and what libraries hold."""
    case, row = CASES[name], MEASURED[name]
    config = case.settings()
    config = replace(config, model=replace(config.model, attention=row["attention"]))
    model = skeleton_of(config.model)
    compiles = config.model.compile is not False
    found = activation_bytes(elsewhere(config, compiles=compiles, model=model))
    plan = row["arena_bytes"] + found.peak
    assert row["peak_allocated_bytes"] <= plan <= 1.03 * row["peak_bytes"]


def test_activation_bytes_shrink_with_slices_share_and_offload() -> None:
    keep = estimate("3b", 16, 1024, {}, {}).peak
    less = estimate("3b", 16, 1024, {"saved_share": 0.3}, {}).peak
    none = estimate("3b", 16, 1024, {"saved_share": 0.0}, {}).peak
    offload = estimate("3b", 16, 1024, {"saved_share": 0.0}, {"activations": "offload"}).peak
    cut = estimate("3b", 16, 1024, {"saved_share": 0.0}, {"activations": "offload", "slices": 4}).in_backward
    assert keep > less > none > offload
    assert cut < estimate("3b", 16, 1024, {"saved_share": 0.0}, {"activations": "offload"}).in_backward


def test_activation_bytes_under_offload_have_the_input_of_the_lowest_trained_layer_alone() -> None:
    boundary = 16 * 1024 * 2048 * 2
    saved = {
        (frozen, policy): estimate("3b", 16, 1024, {"frozen": names}, {"activations": policy}).saved / boundary
        for frozen, names in {"none": (), "lower": ("model.embed_tokens", "model.layers.?")}.items()
        for policy in ("offload", "recompute")
    }
    assert saved["none", "offload"] == 0
    assert saved["none", "recompute"] == 36
    assert saved["lower", "offload"] == 1
    assert saved["lower", "recompute"] == 36 - 10


@pytest.mark.parametrize("compiled", [{"saved_share": 0.0}, {"saved_share": 0.8}])
def test_activation_bytes_in_tiles_are_those_of_attention_alone(compiled: dict[str, Any]) -> None:
    """Of 3B the MLP takes 16 of 18 hidden sizes that products give."""
    train = {"activations": "offload", "kept_attention": False}
    whole = estimate("3b", 1, 131_072, compiled, train)
    tiles = [estimate("3b", 1, 131_072, compiled | {"tile_tokens": n}, train) for n in (131_072, 16_384, 8_192)]
    assert tiles[0] == whole
    assert whole.in_backward > 2 * tiles[1].in_backward >= 2 * tiles[2].in_backward
    assert tiles[1].at_loss == whole.at_loss

    # Twice the tokens: what attention holds doubles, and a tile holds less than that.
    doubled = estimate("3b", 1, 262_144, compiled | {"tile_tokens": 8_192}, train)
    assert doubled.in_backward <= 2 * tiles[2].in_backward
    boundary = 131_072 * 2048 * 2
    assert doubled.in_backward - tiles[2].in_backward < 15 * boundary
    assert estimate("3b", 2, 8_192, {"tile_tokens": 8_192}, {"slices": 2}) == estimate(
        "3b", 2, 8_192, {}, {"slices": 2}
    )


def test_activation_bytes_in_tiles_that_are_kept_leave_out_what_mlps_save() -> None:
    whole, tiles = (estimate("3b", 1, 65_536, {"tile_tokens": n}, {}) for n in (None, 8_192))
    assert whole.saved > 4 * tiles.saved > 0


def test_activation_bytes_of_documents_apart_have_a_mask_but_for_flex_attention() -> None:
    """4 rows of 8,192 tokens: 256 MiB as bytes, and as much again for each of the two slices in bf16."""
    slices = {"slices": 2}
    plain = estimate("3b", 4, 8192, {}, slices)
    apart = estimate("3b", 4, 8192, {}, slices, cross_documents=False)
    flex = estimate("3b", 4, 8192, {"attention": "flex_attention"}, {}, cross_documents=False)
    assert apart.at_loss - plain.at_loss == 256 << 20
    assert apart.in_backward - plain.in_backward == 512 << 20
    assert flex == estimate("3b", 4, 8192, {}, {})


def test_activation_bytes_with_a_mask_have_a_key_and_value_of_each_query_head_in_what_layers_could_save() -> None:
    """A compiled layer of Qwen3, 4,096 wide, saved 7.5 boundary activations at a share of 0.4, and 8.0 with a mask."""
    share = {"saved_share": 0.4}
    plain = estimate("8b", 1, 4096, share, {"activations": "keep"})
    apart = estimate("8b", 1, 4096, share, {"activations": "keep"}, cross_documents=False)
    boundary = 4096 * 4096 * 2
    copies = 2 * (32 - 8) * 128 / 4096
    assert apart.saved - plain.saved == pytest.approx(32 * boundary * 0.4 * (copies + 1))
