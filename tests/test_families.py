"""Every family of models: the gradients of every parameter, streamed, are those of the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from crossed import some
from packaging.version import Version
from tiny_gradients import (
    BATCH,
    CHUNK,
    TOKENS,
    VOCAB,
    attention_of,
    far,
    padded_batch,
    plain_gradients,
    streamed_gradients,
)
from tiny_models import BASE, FAMILIES, tiny_config
from tiny_runs import PLACES, ModelWeights, opened, plain_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from megatier.config.schema import TrainConfig
from megatier.errors import ConfigError, UnsupportedModelError
from megatier.models.decoder import build_skeleton, check_document_boundaries
from megatier.setup.workload import boundary_width

NO_DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
"""Slices draw dropout in another order than a whole batch does."""


@pytest.mark.parametrize("family", FAMILIES)
def test_family_gradients_are_those_of_the_plain_model(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    loss, expected, source = plain_gradients(config, attention_of(config))
    for activations in ("keep", "recompute"):
        found_loss, found = streamed_gradients(config, tmp_path, source, activations)
        assert found_loss == loss
        assert found.keys() == expected.keys()
        different = [name for name, grad in expected.items() if not torch.equal(found[name], grad)]
        assert different == [], activations


@pytest.mark.parametrize("family", some(FAMILIES, by=3))
def test_family_fused_loss_gives_nearly_the_plain_gradients_and_no_whole_logits(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    with VocabularyRows() as rows:
        loss, expected, source = plain_gradients(config, attention_of(config))
    assert rows.largest >= BATCH * (TOKENS - 1)
    with VocabularyRows() as rows:
        found_loss, found = streamed_gradients(config, tmp_path, source, fused_loss=True)
    assert rows.largest == CHUNK
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert far(found, expected) == {}


@pytest.mark.parametrize("family", some([family for family in FAMILIES if family != "gemma3n_text"], by=3, first=1))
def test_family_slices_give_nearly_the_plain_gradients(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, **NO_DROPOUT.get(family, {}))
    loss, expected, source = plain_gradients(config, attention_of(config))
    found_loss, found = streamed_gradients(config, tmp_path, source, "recompute", slices=2)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert far(found, expected) == {}


def test_family_whose_batch_is_not_the_first_dimension_refuses_slices(tmp_path: Path) -> None:
    config = tiny_config("gemma3n_text")
    source = plain_gradients(config, attention_of(config))[2]
    with pytest.raises(ConfigError, match=r"train\.slices: the arguments of model\.layers\.0 cannot be cut"):
        streamed_gradients(config, tmp_path, source, slices=2)


STREAMS = [name for name in ("gemma3n_text", "deepseek_v4", "hy_v4", "qwen4_exp_text") if name in FAMILIES]


@pytest.mark.parametrize("family", STREAMS)
def test_family_with_several_hidden_states_offloads_them_all(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    loss, expected, source = plain_gradients(config, attention_of(config))
    found_loss, found = streamed_gradients(config, tmp_path, source, "offload")
    assert found_loss == loss
    assert [name for name, grad in expected.items() if not torch.equal(found[name], grad)] == []


NESTED: dict[str, dict[str, Any]] = {
    "openai-gpt": {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "xlstm": {**BASE, "num_blocks": 4, "num_heads": 4},
}
"""Types whose layers return a list, or their state as a tuple beside the hidden state."""


@pytest.mark.parametrize("model_type", NESTED)
def test_layers_that_return_nested_tensors_have_the_plain_gradients(model_type: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type, **NESTED[model_type])
    loss, expected, source = plain_gradients(config, attention_of(config))
    for activations in ("keep", "recompute", "offload"):
        found_loss, found = streamed_gradients(config, tmp_path, source, activations)
        assert found_loss == loss
        assert [name for name, grad in expected.items() if not torch.equal(found[name], grad)] == []


BYTES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def bytes_config() -> Any:
    local = {**BYTES, "hidden_size_global": 64, "vocab_size": VOCAB, "cross_attn_k": 2}
    return AutoConfig.for_model(
        "blt",
        vocab_size=VOCAB,
        encoder_hash_byte_group_vocab=64,
        patch_in_forward=False,
        encoder_config={**local, "num_hidden_layers": 1},
        decoder_config={**local, "num_hidden_layers": 2},
        global_config={"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 96},
        patcher_config={**BYTES, "vocab_size": VOCAB, "num_hidden_layers": 2},
    )


def test_layers_whose_width_only_their_own_config_says_have_nearly_the_plain_gradients(tmp_path: Path) -> None:
    """BLT's config has a config for each of its parts, and no hidden size."""
    config = bytes_config()
    assert boundary_width(build_skeleton(config, "sdpa")) == 64
    loss, expected, source = plain_gradients(config, "sdpa")
    found_loss, found = streamed_gradients(config, tmp_path, source)
    assert found_loss == loss
    noise = [name for name, grad in expected.items() if grad.norm() < 1e-6]  # attention to one patch has no slope
    assert [name for name in far(found, expected) if name not in noise] == []


@pytest.mark.parametrize(("setting", "groups"), [("slices", 1), ("groups", 2)])
def test_model_whose_rows_depend_on_one_another_is_not_cut(setting: str, groups: int, tmp_path: Path) -> None:
    config = AutoConfig.for_model("doge", **BASE, is_moe=True, num_experts=16, num_experts_per_tok=2)
    train = TrainConfig(steps=1, batch=BATCH, slices=3 - groups, groups=groups)
    rows = padded_batch()
    batches = [{key: value[group::groups] for key, value in rows.items()} for group in range(groups)]
    options: dict[str, Any] = {"source": ModelWeights(plain_model(config)), "tokens": TOKENS}
    with (
        opened(config, tmp_path, PLACES["ram"], train, **options) as session,
        pytest.raises(UnsupportedModelError, match=rf"layers\.0\.mlp \(DogeCDMoE\).*set train\.{setting} to 1"),
    ):
        session.engine.train_step(1, 0.0, batches)


def test_argument_that_a_module_does_not_use_is_not_cut(tmp_path: Path) -> None:
    """BioGPT's positions are given the mask, which has all rows, and make one."""
    config = AutoConfig.for_model(
        "biogpt",
        **BASE,
        layerdrop=0.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        activation_dropout=0.0,
    )
    loss, expected, source = plain_gradients(config, "sdpa")
    found_loss, found = streamed_gradients(config, tmp_path, source, "recompute", slices=2)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    noise = [name for name in expected if name.endswith("k_proj.bias")]  # the softmax takes it out
    assert [name for name in far(found, expected) if name not in noise] == []


def test_layers_that_take_more_than_was_planned_are_told_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatier.setup.workload.HIDDEN_STATE_COUNTS", ())
    config = tiny_config("gemma3n_text")
    source = plain_gradients(config, attention_of(config))[2]
    with pytest.raises(
        ConfigError, match=r"layers of this model take more\. Set train\.activations to recompute or keep"
    ):
        streamed_gradients(config, tmp_path, source, "offload")


def test_batch_larger_than_what_offload_has_room_for_is_named(tmp_path: Path) -> None:
    config = tiny_config("llama")
    source = plain_gradients(config, attention_of(config))[2]
    with pytest.raises(ConfigError, match=r"the input of model\.layers\.0 is .* by train\.batch and"):
        streamed_gradients(config, tmp_path, source, "offload", tokens=TOKENS - 1)


RECURRENT = {
    "qwen3_next": "linear_attention",
    "qwen3_5_text": "linear_attention",
    "lfm2": "conv",
    "deepseek_v4": "compressed_sparse_attention, heavily_compressed_attention",
    "qwen4_exp_text": "linear_attention, an indexer over blocks of tokens",
}
"""Families with layers that carry a state over the borders of documents, or join tokens of two."""
if Version(transformers.__version__) < Version("5.17"):
    RECURRENT["glm_moe_dsa"] = "an indexer that is right from transformers 5.17 on"
NO_BALANCE = {name: {"router_aux_loss_coef": 0.0} for name in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")}
"""Routers are balanced over all tokens of a group."""
BORDERS = torch.tensor([[9], [1], [16], [23]])
"""Where the second document of each row begins."""


def two_documents(seed: int) -> dict[str, Tensor]:
    """Rows of two documents, of which the second is learnt; the seed chooses the first."""
    ids = [torch.randint(3, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(n)) for n in (seed, 0)]
    order = torch.arange(TOKENS).expand(BATCH, -1)
    is_second = order >= BORDERS
    return {
        "input_ids": torch.where(is_second, ids[1], ids[0]),
        "labels": torch.where(order > BORDERS, ids[1], -100),
        "position_ids": torch.where(is_second, order - BORDERS, order),
    }


@pytest.mark.parametrize(
    "family", some([family for family in FAMILIES if family not in {*RECURRENT, "gpt_oss"}], by=3, first=2)
)
def test_family_gradients_of_a_document_do_not_depend_on_the_one_before(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, **NO_DROPOUT.get(family, {}), **NO_BALANCE.get(family, {}))
    source = ModelWeights(plain_model(config, attention_of(config)))
    results = []
    for seed in (1, 2):
        slices = 1 if family == "gemma3n_text" else seed  # and so not on the mask being cut
        results.append(streamed_gradients(config, tmp_path, source, slices=slices, batch=two_documents(seed)))
    (loss, expected), (found_loss, found) = results
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert far(found, expected) == {}


def test_family_gradients_of_a_document_equal_every_bit_whatever_comes_before(tmp_path: Path) -> None:
    config = tiny_config("llama")
    source = ModelWeights(plain_model(config))
    results = [streamed_gradients(config, tmp_path, source, batch=two_documents(seed)) for seed in (1, 2)]
    assert results[0][0] == results[1][0]
    assert [name for name, grad in results[0][1].items() if not torch.equal(results[1][1][name], grad)] == []


@pytest.mark.usefixtures("compiled")
def test_documents_apart_in_compiled_layers_give_the_same_bits_by_every_policy(tmp_path: Path) -> None:
    source = ModelWeights(plain_model(config := tiny_config("llama")))
    options: dict[str, Any] = {"slices": 2, "compile": True, "saved_share": 0.5}
    results = [
        streamed_gradients(config, tmp_path, source, policy, batch=two_documents(seed), **options)
        for seed, policy in ((1, "keep"), (2, "recompute"), (3, "offload"))
    ]
    (loss, expected), *others = results
    assert [found_loss for found_loss, _ in others] == [loss, loss]
    assert [name for _, found in others for name in expected if not torch.equal(found[name], expected[name])] == []


FLEX_WARNS = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""Of PyTorch's own code, which flex attention compiles."""


def test_flex_attention_on_a_cpu_is_refused(tmp_path: Path) -> None:
    """In plain transformers, too, half of its losses are NaN on a CPU without AVX-512."""
    train = TrainConfig(steps=1, batch=BATCH)
    with (
        pytest.raises(ConfigError, match=r"flex_attention, which needs a GPU: .* Set model\.attention to sdpa"),
        opened(tiny_config("llama"), tmp_path, PLACES["gpu"], train, attention="flex_attention"),
    ):
        pass


@pytest.mark.gpu
@FLEX_WARNS
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # fp32 products are meant
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_documents_apart_in_compiled_layers_on_a_gpu_do_not_depend_on_each_other(
    attention: str, tmp_path: Path
) -> None:
    config = tiny_config("llama", head_dim=64)
    source = ModelWeights(plain_model(config))
    options: dict[str, Any] = {"attention": attention, "compile": True, "device": "cuda"}
    results = [streamed_gradients(config, tmp_path, source, batch=two_documents(n), **options) for n in (1, 2)]
    expected = streamed_gradients(config, tmp_path, source, batch=two_documents(1), compile=False, device="cpu")
    for loss, found in results:
        assert loss == pytest.approx(expected[0], rel=1e-4)
        assert {name: distance for name, distance in far(found, expected[1]).items() if distance > 1e-2} == {}
    assert far(results[0][1], results[1][1]) == {}


@pytest.mark.parametrize("family", [family for family in RECURRENT if family in FAMILIES])
def test_family_with_recurrent_layers_is_not_trained_on_documents_apart(family: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"has layers \({RECURRENT[family]}\) .* data\.cross_documents to true"
    ):
        check_document_boundaries(build_skeleton(tiny_config(family), "sdpa"))


def test_family_whose_patches_cross_borders_is_not_trained_on_documents_apart(tmp_path: Path) -> None:
    """BLT's layers are attention by their names, over patches that begin in one document and end in the next."""
    config = bytes_config()
    check_document_boundaries(build_skeleton(config, "sdpa"))
    _, _, source = plain_gradients(config, "sdpa")
    with pytest.raises(UnsupportedModelError, match="lets a document of a row see the one before it"):
        streamed_gradients(config, tmp_path, source, batch=two_documents(1))


def test_family_whose_masks_do_not_ask_for_positions_is_not_trained_on_documents_apart(tmp_path: Path) -> None:
    config = tiny_config("gpt_oss")
    check_document_boundaries(build_skeleton(config, "sdpa"))
    source = ModelWeights(plain_model(config, attention_of(config)))
    with pytest.raises(UnsupportedModelError, match="makes its masks without position_ids"):
        streamed_gradients(config, tmp_path, source, batch=two_documents(1))


class VocabularyRows(TorchDispatchMode):
    """The most rows that any result as wide as the vocabulary had."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.dim() > 1 and tensor.shape[-1] == VOCAB:
                rows = tensor.numel() // VOCAB
                if tensor.is_floating_point() and rows != 64:  # a head's weight transposed has hidden_size rows
                    self.largest = max(self.largest, rows)
        return result
