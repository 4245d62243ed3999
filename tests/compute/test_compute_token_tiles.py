"""Layers in tiles of tokens: nearly the uncut gradients, and memory that does not grow with the sequence."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import some
from living import Living
from tiny_gradients import attention_of, far, streamed_gradients
from tiny_models import BASE, known_config, tiny_config
from tiny_runs import ModelWeights, Run, plain_model, run_in_fresh_process
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatier.compute.token_tiles import Decision, TiledModule
from megatier.engine.step import Engine, StepResult
from megatier.errors import UnsupportedModelError
from megatier.guards.crossing import check_inside
from megatier.guards.token_rows import names_of_rows, why_joined
from megatier.models.decoder import build_skeleton, decoder_layers

TILE = 20
"""Tokens of a tile: the last one of a batch has fewer."""


CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {},
    "cohere2": {},
    "qwen2_moe": {"output_router_logits": False},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "gpt_oss": {},
    "qwen3_next": {},
    "gpt2": {},
    "gemma3n_text": {},
    "llama4_text": {},
}
"""Norms on both sides of an MLP, attention and MLP beside each other, experts with and without an auxiliary loss,
several hidden states a token, and experts that take rows for each expert (Llama 4)."""


@pytest.mark.filterwarnings("ignore:.*runs whole")
@pytest.mark.parametrize("family", some(CASES, by=2))
def test_layers_in_tiles_give_nearly_the_loss_and_the_gradients_of_whole_ones(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, **CASES[family])
    source = ModelWeights(plain_model(config, attention_of(config)))
    expected = streamed_gradients(config, tmp_path, source)
    found = streamed_gradients(config, tmp_path, source, "recompute", tile_tokens=TILE)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert far(found[1], expected[1]) == {}


@pytest.mark.filterwarnings("ignore:.*runs whole")
@pytest.mark.parametrize(
    "options",
    some(
        [
            {"expert_parts": 2},
            {"frozen": ("*.mlp.*",)},
            {"slices": 2},
            {"frozen": ("model.layers.[0-1]", "model.embed_tokens")},
            {"frozen": ("*.up_proj.weight", "*norm*")},
        ],
        by=2,
    ),
)
def test_layers_in_tiles_that_are_cut_or_frozen_give_nearly_the_gradients_of_whole_ones(
    options: dict[str, Any], tmp_path: Path
) -> None:
    family = "qwen2_moe" if "expert_parts" in options else "llama"
    config = tiny_config(family, **CASES[family])
    source = ModelWeights(plain_model(config))
    expected = streamed_gradients(config, tmp_path, source, **options)
    found = [streamed_gradients(config, tmp_path, source, a, tile_tokens=TILE, **options) for a in ("keep", "offload")]
    assert found[0][0] == pytest.approx(expected[0], rel=1e-6)
    assert far(found[0][1], expected[1]) == {}
    assert all(torch.equal(found[1][1][name], grad) for name, grad in found[0][1].items())


def test_layers_in_tiles_as_large_as_the_batch_give_the_bits_of_whole_ones(tmp_path: Path) -> None:
    run = Run(model="plain", slices=2)
    assert replace(run, tile_tokens=3 * 16)(tmp_path) == run(tmp_path)
    # Of the last token nothing is learnt, so a tile of it alone adds zeros.
    assert replace(run, tile_tokens=3 * 16 - 2)(tmp_path) != run(tmp_path)


# ---------------------------------------------------------------------- compiled layers


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("share", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_compiled_layers_in_tiles_give_the_same_bits_under_any_policy(share: float, tmp_path: Path) -> None:
    run = Run(model="plain", dtype="fp32", compile=True, saved_share=share, fused_loss=True, loss_chunk=32, eps=1e3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*runs uncompiled")
        whole = run(tmp_path)
        run = replace(run, tile_tokens=TILE)
        settings = [("keep", "ram"), ("recompute", "nvme"), ("offload", "ram_streamed")]
        found = [replace(run, activations=a, place=p)(tmp_path) for a, p in settings]
        kept = replace(run, kept_attention=True)(tmp_path)
    assert found[0].losses == pytest.approx(whole.losses, rel=1e-6)
    assert found[0].norms == pytest.approx(whole.norms, rel=1e-5)
    assert found[0].digests != whole.digests
    assert [result == found[0] for result in [*found, kept]] == [True] * 4


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_compiled_layers_in_tiles_on_cuda_give_the_same_bits_in_two_fresh_processes(
    attention: str, tmp_path: Path
) -> None:
    """Under every policy, with and without kept attention, and with a cold cache in each process."""
    base = Run(model="flash", device="cuda", attention=attention, saved_share=0.0, tile_tokens=TILE, fused_loss=True)
    runs = [replace(base, kept_attention=k, activations=a) for k in (False, True) for a in ("keep", "offload")]
    found = [run_in_fresh_process(runs, tmp_path, tmp_path / name) for name in ("first", "second")]
    assert [result == found[0][0] for result in found[0] + found[1]] == [True] * 8
    [whole] = run_in_fresh_process([replace(base, tile_tokens=None)], tmp_path)
    assert found[0][0].losses == pytest.approx(whole.losses, rel=2e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_in_tiles_on_cuda_give_the_same_bits_with_and_without_a_graph_that_stays(tmp_path: Path) -> None:
    for share, compiles in ((0.8, True), (0.0, False)):
        run = Run(model="flash", device="cuda", compile=compiles, saved_share=share, tile_tokens=TILE, slices=2)
        runs = [replace(run, activations=a) for a in ("keep", "recompute", "offload")]
        found = run_in_fresh_process(runs, tmp_path)
        assert [result == found[0] for result in found] == [True] * 3


# ---------------------------------------------------------------------- memory


class Wide(nn.Module):
    """An MLP whose inside is 32 times as wide as its rows."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 32 * width, bias=False)
        self.down = nn.Linear(32 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.nn.functional.silu(self.up(x)))
        return result


class Layer(nn.Module):
    """What is left of a layer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.mlp = Wide()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.mlp(self.norm(x))
        return result


def tiled(module: nn.Module, tokens: int, rows: Tensor) -> TiledModule:
    """A module in tiles, which was tried."""
    found = TiledModule(module, "", tokens, None, warnings.catch_warnings, lambda result, leaves: None)
    found.try_next(why_joined)
    with torch.no_grad():
        module(rows)
    return found


def most_bytes(tokens: int, tile: int | None) -> int:
    """The most that lives in forward and backward of a layer, over what its input takes."""
    torch.manual_seed(0)
    layer = Layer()
    x = torch.randn(1, tokens, 8, requires_grad=True)
    if tile is not None:
        assert all(tiled(part, tile, x).is_cut for part in (layer.norm, layer.mlp))
    with Living() as living:
        torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    most: int = living.most
    return most


def test_memory_of_a_layer_in_tiles_grows_by_few_hidden_sizes_with_its_tokens() -> None:
    boundary = 8 * 4
    grown = [(most_bytes(2048, tile) - most_bytes(1024, tile)) / (1024 * boundary) for tile in (None, 128)]
    assert grown[0] > 64  # the inside of the MLP, twice
    assert grown[1] < 8  # what the norm gives, what the MLP gives, their sum, and gradients


# ---------------------------------------------------------------------- what may be cut


def test_names_of_rows_are_norms_mlps_and_experts_of_a_layer_and_no_attention() -> None:
    found = {}
    for family in ("llama", "gpt2", "qwen2_moe", "qwen3_next", "lfm2"):
        layers = decoder_layers(build_skeleton(tiny_config(family), "sdpa"))
        found[family] = names_of_rows(layers[0], is_layer=True)
    assert sorted(found["llama"]) == ["input_layernorm", "mlp", "post_attention_layernorm"]
    assert sorted(found["gpt2"]) == ["ln_1", "ln_2", "mlp", "mlp.c_fc", "mlp.c_proj"]
    assert {"mlp", "mlp.experts", "mlp.shared_expert"} <= set(found["qwen2_moe"])
    assert not [name for names in found.values() for name in names if "attn" in name or "conv" in name]


class Drawing(nn.Module):
    """A module that draws random numbers while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(x * self.gain, 0.1, self.training)


class Mixing(Drawing):
    """A module whose tokens depend on one another in a way that is chosen."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm = nn.BatchNorm1d(4)
        self.conv = nn.Conv1d(4, 4, 3, padding=2)

    def forward(self, x: Tensor) -> Any:
        rows = x.reshape(-1, 4) * self.gain
        ways: Mapping[str, Any] = {
            "apart": lambda: x * self.gain,
            "mean": lambda: x - rows.mean(0),
            "norm": lambda: self.norm(rows).view_as(x),
            "conv": lambda: self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2),
            "count": lambda: x / len(rows),
            "place": lambda: x + torch.arange(x.shape[1])[:, None],
            "two": lambda: (x, rows),
            "narrow": lambda: x[..., :2],
            "change": lambda: x.mul_(2.0) * self.gain,
        }
        return ways[self.way]()


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("apart", None),
        ("mean", "depends on other tokens"),
        ("norm", "changes a buffer"),
        ("conv", "depends on other tokens"),
        ("count", "on how many there are"),
        ("place", "on the place of the token"),
        ("two", "something else than one tensor"),
        ("narrow", "something else than one tensor"),
        ("change", "changes its arguments"),
    ],
)
def test_module_whose_tokens_depend_on_one_another_runs_whole(way: str, why: str | None) -> None:
    torch.manual_seed(0)
    module = Mixing(way).eval()
    x = torch.randn(2, 40, 4)
    expected = module(x.clone())
    state = torch.get_rng_state()
    found = tiled(module, 16, x.clone())
    assert found.why_whole is None if why is None else why in str(found.why_whole)
    assert found.is_cut is (why is None)
    assert torch.equal(torch.get_rng_state(), state)
    assert not module.norm.training
    result = module(x)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(result), tree_leaves(expected), strict=True))


def test_load_beside_weights_while_a_tile_runs_looks_like_no_change_of_them() -> None:
    """All slots of an arena share a version counter, and queues load into others while a backward computes."""
    arena = torch.zeros(8192)

    class Beside(Wide):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            with torch.no_grad():
                arena[-1:].zero_()
            return result

    module, rows = Beside(), torch.randn(1, 40, 8)
    slots = arena[:4096].view(2, -1)
    for part, slot in zip((module.up, module.down), slots, strict=True):
        part._parameters["weight"] = slot.view(part.weight.shape).copy_(part.weight.detach()).requires_grad_()

    found = tiled(module, 16, rows)
    assert found.is_cut
    whole = rows.clone().requires_grad_()
    [expected] = torch.autograd.grad(Wide.forward(module, whole).sum(), whole)
    weights = [part.weight for part in (module.up, module.down)]
    [grad, *_] = found.backward([rows], weights, [True] * 3, torch.ones_like(rows))
    assert torch.allclose(grad, expected)


def test_module_that_another_rank_could_not_cut_runs_whole_here_too() -> None:
    rows = torch.randn(1, 40, 8)
    found = tiled(Wide(), 16, rows)
    assert found.is_cut
    found.decide(Decision("it draws random numbers", ()))
    assert found.why_whole == "it draws random numbers"
    assert torch.equal(found.module(rows), Wide.forward(found.module, rows))  # type: ignore[arg-type]


def test_module_that_draws_random_numbers_runs_whole() -> None:
    module = Drawing().eval()
    assert tiled(module, 16, torch.randn(1, 40, 4)).why_whole == "it draws random numbers"


def test_model_whose_router_mixes_tokens_runs_it_whole_and_says_so(tmp_path: Path) -> None:
    config = known_config("doge", **BASE, is_moe=True, num_experts=16, num_experts_per_tok=2)
    plain = plain_model(config)
    if isinstance(plain.get_submodule("model.layers.0.mlp")(torch.zeros(1, 4, config.hidden_size)), tuple):
        pytest.skip("the experts of Doge do not run in this transformers")
    source = ModelWeights(plain)
    expected = streamed_gradients(config, tmp_path, source)
    with pytest.warns(UserWarning, match=r"layers\.0\.mlp \(DogeCDMoE\) runs whole, without tiles of tokens: "):
        found = streamed_gradients(config, tmp_path, source, tile_tokens=TILE)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert far(found[1], expected[1]) == {}


def test_module_in_tiles_that_computes_with_a_tensor_of_another_is_refused() -> None:
    """Its gradient would be lost, as in a node."""
    foreign = torch.randn(4, requires_grad=True)

    class Reaching(Drawing):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain * foreign

    module = Reaching()
    found = TiledModule(
        module, "", 16, None, warnings.catch_warnings, lambda out, own: check_inside("it", [out], own, module)
    )
    found.try_next(why_joined)
    x = torch.randn(1, 40, 4, requires_grad=True)
    with torch.no_grad():
        module(x)
    with pytest.raises(UnsupportedModelError, match="it computes with a tensor that requires a gradient"):
        module(x).sum().backward()


@pytest.mark.parametrize(
    ("family", "runs"), some([("gemma2", 3), ("llama", 2), ("cohere2", 2), ("qwen2_moe", 2)], by=2), ids=str
)
def test_module_in_tiles_whose_result_is_only_added_does_not_run_again_before_its_tiles(
    family: str, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward and the backward's tiles need it. A norm behind it needs its numbers (Gemma 2)."""
    ran = Counter[str]()
    real = TiledModule._run

    def run(self: TiledModule, *args: Any) -> Any:
        ran[type(self.module).__name__] += self.is_cut
        return real(self, *args)

    def train_step(self: Engine, *args: Any) -> StepResult:
        ran.clear()
        return step(self, *args)

    step = Engine.train_step
    monkeypatch.setattr(TiledModule, "_run", run)
    monkeypatch.setattr(Engine, "train_step", train_step)
    config = tiny_config(family, **CASES[family])
    source = ModelWeights(plain_model(config, attention_of(config)))
    found, counts = [], []
    for policy in ("keep", "recompute", "offload"):
        found.append(streamed_gradients(config, tmp_path, source, policy, steps=3, tile_tokens=TILE)[1])
        counts.append(max(count for name, count in ran.items() if name.endswith(("MLP", "MoeBlock"))))

    # The last of three steps: in the first two forwards of a module what comes after it is looked at, too.
    assert counts == [counts[0], counts[0] // 2 * runs, counts[0] // 2 * runs]
    assert all(torch.equal(other[name], grad) for other in found[1:] for name, grad in found[0].items())
