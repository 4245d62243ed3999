"""Weights go out as transformers saves them and come back in every bit; what is wrong is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import RawIOBase
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import some
from model_folders import NORM, flat_blocks, fresh, reader, skeleton_of, tensors_of
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, FUSED, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from megatier import layout
from megatier.errors import UnsupportedModelError
from megatier.models import weights
from megatier.models.decoder import Unit, build_skeleton, find_units
from megatier.models.expert_units import cut_units, places_of
from megatier.models.export import export
from megatier.models.frozen_parameters import freeze
from megatier.models.initialiser import Initialiser
from megatier.models.safetensors_format import StoredTensor
from megatier.models.weight_conversion import assemble
from megatier.models.weights import SafetensorsFolder

SHARD_BYTES = 60_000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors of tiny models come in several pieces too."""
    monkeypatch.setattr(weights, "READ_ELEMENTS", 1000)


class Counter:
    """Counts the bytes of weights that are read from files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        self._read = weights.read_exactly
        monkeypatch.setattr(weights, "read_exactly", self.read)

    def read(self, file: RawIOBase, piece: Tensor, stored: StoredTensor) -> None:
        self.num_bytes += piece.nbytes
        self._read(file, piece, stored)


def of_all_ranks(source: SafetensorsFolder, units: tuple[Unit, ...], size: int, counter: Counter) -> Iterator[int]:
    """Read all shards as so many ranks do, and compare them with whole units; yields what each rank reads.

    Shards begin at multiples of 512 elements here, so that all ranks have some of each tiny unit.
    """
    whole = flat_blocks(source, units)
    for rank in range(size):
        counter.num_bytes = 0
        for unit in units:
            padded = replace(unit, layout=unit.layout.padded(size))
            shard = padded.layout.shard(rank, size)
            found = torch.zeros(shard.num_elements)
            for start, piece in source.read(padded, shard):
                assert 0 < piece.numel() <= weights.READ_ELEMENTS
                found[start : start + piece.numel()] = piece
            parts = {t.name: whole[unit.name][t.start : t.stop] for t in unit.layout.tensors}
            offsets = {t.name: t.offset for t in unit.layout.tensors}
            for t in shard.tensors:
                first = t.offset - offsets[t.name]
                assert torch.equal(found[t.start : t.stop], parts[t.name][first : first + t.num_elements]), t.name
            assert found.count_nonzero() <= sum(t.num_elements for t in shard.tensors)
        yield counter.num_bytes


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small checkpoint in one file."""
    model, units, blocks = fresh("llama")
    export(tmp_path / "llama", model, units, reader(blocks), torch.float32, 1 << 30)
    return tmp_path / "llama"


def patch(folder: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a checkpoint in one file."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


# Families: out to a folder, into transformers, out of transformers, back in.
@pytest.mark.parametrize("family", some(FAMILIES, by=3))
def test_export_family_is_what_transformers_loads_and_saves(family: str, tmp_path: Path) -> None:
    dtype = (torch.float32, torch.bfloat16)[list(FAMILIES).index(family) % 2]
    model, units, blocks = fresh(family)
    export(tmp_path / "ours", model, units, reader(blocks), dtype, SHARD_BYTES)
    result: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto", output_loading_info=True)
    loaded, report = result
    assert not any(report.values()), report
    assert loaded.config.dtype == dtype
    found, expected = loaded.state_dict(), tensors_of(blocks, units)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
    for name, buffer in persistent_buffers(model).items():
        assert torch.equal(found[name].float(), buffer.to(found[name].dtype).float()), name

    loaded.save_pretrained(tmp_path / "theirs", max_shard_size=SHARD_BYTES)
    ours, theirs = stored_tensors(tmp_path / "ours"), stored_tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype or name in persistent_buffers(model), name
        assert torch.equal(theirs[name], tensor.to(theirs[name].dtype)), name

    again = skeleton_of(tmp_path / "theirs")
    read_back = tensors_of(flat_blocks(SafetensorsFolder(tmp_path / "theirs", again), units), units)
    assert find_units(again) == units
    for name, tensor in expected.items():
        assert torch.equal(read_back[name], tensor.to(found[name].dtype).float()), name
    for name, buffer in persistent_buffers(again).items():
        assert torch.equal(buffer, found[name].float()), name


@pytest.mark.parametrize(("family", "parts"), [("llama", 1), ("qwen3_moe", 1), ("qwen3_moe", 3)])
def test_read_shards_reads_their_own_bytes_and_no_others(
    family: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, units, blocks = fresh(family, parts)
    export(tmp_path / "out", model, units, reader(blocks), torch.bfloat16, SHARD_BYTES)
    freeze(model, ("model.embed_tokens.weight",))
    source = SafetensorsFolder(tmp_path / "out", model)
    monkeypatch.setattr(layout, "SHARD_ELEMENTS", 512)
    counter = Counter(monkeypatch)
    units = cut_units(model, parts)
    num_bytes = 2 * sum(tensor.num_elements for unit in units for tensor in unit.layout.tensors)
    for size in (1, 2, 4):
        found = list(of_all_ranks(source, units, size, counter))
        assert sum(found) == num_bytes
        assert max(found) < num_bytes / size * 1.4, "padding lies with the last ranks"


def with_table(dtype: torch.dtype) -> PreTrainedModel:
    model = build_skeleton(tiny_config("llama", num_hidden_layers=1), "sdpa")
    model.model.register_buffer("table", torch.tensor([[3, (1 << 40) + 1], [-5, 0]]).to(dtype))
    return model


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool], ids=str)
def test_buffer_of_integers_goes_out_and_comes_back_in_every_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """Such as the experts of each token in DeepSeek-V4's first layers."""
    model, again = with_table(dtype), with_table(dtype)
    units = find_units(model)
    export(tmp_path / "out", model, units, reader(flat_blocks(Initialiser(model, 1), units)), torch.bfloat16, 1 << 30)
    again.model.get_buffer("table").zero_()
    SafetensorsFolder(tmp_path / "out", again)
    assert torch.equal(again.model.get_buffer("table"), model.model.get_buffer("table"))
    assert load_file(tmp_path / "out" / "model.safetensors")["model.table"].dtype is dtype


@pytest.mark.parametrize("stored", [torch.float32, torch.int64], ids=str)
def test_buffer_of_integers_that_would_not_hold_what_is_stored_is_refused(stored: torch.dtype, tmp_path: Path) -> None:
    model = with_table(torch.int64 if stored is torch.int64 else torch.int32)
    units = find_units(model)
    export(tmp_path / "out", model, units, reader(flat_blocks(Initialiser(model, 1), units)), torch.float32, 1 << 30)
    patch(tmp_path / "out", {"model.table": torch.zeros(2, 2, dtype=stored)})
    with pytest.raises(UnsupportedModelError, match=r"model\.table is \w+; the model takes torch\.int32 there"):
        SafetensorsFolder(tmp_path / "out", with_table(torch.int32))


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("family", FUSED)
def test_weights_in_parts_go_out_as_those_of_a_whole_model_and_come_back(
    family: str, parts: int, tmp_path: Path
) -> None:
    model, units, blocks = fresh(family, parts)
    export(tmp_path / "cut", model, units, reader(blocks), torch.float32, SHARD_BYTES)
    expected, whole = tensors_of(blocks, units), find_units(model)
    blocks = {unit.name: torch.zeros(unit.layout.num_elements) for unit in whole}
    for name, [(unit, tensor)] in places_of(whole).items():
        blocks[unit.name][tensor.start : tensor.stop] = expected[name].flatten()
    export(tmp_path / "whole", model, whole, reader(blocks), torch.float32, SHARD_BYTES)
    assert {path.name for path in tmp_path.glob("cut/*")} == {path.name for path in tmp_path.glob("whole/*")}
    assert all(path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes() for path in tmp_path.glob("cut/*"))
    checkpoint = SafetensorsFolder(tmp_path / "whole", skeleton_of(tmp_path / "whole"))
    found = tensors_of(flat_blocks(checkpoint, units), units)
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


# Export


# Folders of safetensors
def test_checkpoint_bf16_and_fp16_come_as_fp32(llama: Path) -> None:
    expected = load_file(llama / "model.safetensors")

    dtypes = {name: (torch.bfloat16, torch.float16, torch.float32)[k % 3] for k, name in enumerate(expected)}
    patch(llama, {name: tensor.to(dtypes[name]) for name, tensor in expected.items()})
    model = skeleton_of(llama)
    units = find_units(model)
    found = tensors_of(flat_blocks(SafetensorsFolder(llama, model), units), units)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(dtypes[name]).float()), name


def test_checkpoint_of_the_bare_decoder_gets_its_prefix(llama: Path) -> None:
    expected = load_file(llama / "model.safetensors")

    patch(llama, dict.fromkeys(expected) | {n.removeprefix("model."): t for n, t in expected.items()})
    model = skeleton_of(llama)
    units = find_units(model)
    found = tensors_of(flat_blocks(SafetensorsFolder(llama, model), units), units)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_checkpoint_reads_generation_settings(llama: Path) -> None:
    GenerationConfig(eos_token_id=[2, 7]).save_pretrained(llama)
    model = skeleton_of(llama)
    SafetensorsFolder(llama, model)
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == [2, 7]


def test_checkpoint_old_leftovers_are_ignored(llama: Path) -> None:
    patch(llama, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    SafetensorsFolder(llama, skeleton_of(llama))


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
def test_checkpoint_tied_head_stored_twice_must_agree(equal: bool, tmp_path: Path) -> None:
    model, units, blocks = fresh("llama_tied")
    export(tmp_path / "out", model, units, reader(blocks), torch.float32, 1 << 30)
    embedding = stored_tensors(tmp_path / "out")["model.embed_tokens.weight"]
    patch(tmp_path / "out", {"lm_head.weight": embedding + (0 if equal else 1)})
    if equal:
        SafetensorsFolder(tmp_path / "out", model)
        return
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        SafetensorsFolder(tmp_path / "out", model)


def test_checkpoint_tied_weight_stored_under_the_heads_name_is_found(tmp_path: Path) -> None:
    model, units, blocks = fresh("llama_tied")
    export(tmp_path / "out", model, units, reader(blocks), torch.float32, 1 << 30)
    embedding = stored_tensors(tmp_path / "out")["model.embed_tokens.weight"]
    patch(tmp_path / "out", {"model.embed_tokens.weight": None, "lm_head.weight": embedding})
    found = tensors_of(flat_blocks(SafetensorsFolder(tmp_path / "out", model), units[:1]), units[:1])
    assert torch.equal(found["model.embed_tokens.weight"], embedding)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: None}, rf"tensor {NORM} is missing"),
        ({"model.extra": torch.ones(3)}, r"model\.safetensors: tensor model\.extra is not part of LlamaForCausalLM"),
        ({NORM: torch.ones(65)}, rf"tensor {NORM} has shape \(65,\).*\(64,\)"),
        ({NORM: torch.ones(64, dtype=torch.int8)}, rf"tensor {NORM} is I8"),
        ({NORM: torch.ones(64, dtype=torch.float8_e4m3fn)}, rf"tensor {NORM} is F8_E4M3"),
        ({"norm.weight": torch.ones(64)}, rf"{NORM}: two stored tensors claim to be it"),
    ],
    ids=["missing", "extra", "shape", "integer", "fp8", "twice"],
)
def test_checkpoint_wrong_tensor_is_refused_by_name(
    llama: Path, change: dict[str, Tensor | None], message: str
) -> None:
    patch(llama, change)
    with pytest.raises(UnsupportedModelError, match=message):
        SafetensorsFolder(llama, skeleton_of(llama))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("5.up_proj.weight", None, r"experts\.gate_up_proj: .*different shapes"),
        ("7.down_proj.weight", None, r"experts\.0\.down_proj\.weight has shape \(7, 64, 32\)"),
        ("1.down_proj.weight", torch.ones(64, 31), r"experts\.down_proj: .*different shapes"),
    ],
    ids=["up missing", "down missing", "shape"],
)
def test_checkpoint_wrong_expert_is_refused_by_name(
    name: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    model, units, blocks = fresh("qwen3_moe")
    export(tmp_path / "out", model, units, reader(blocks), torch.float32, 1 << 30)
    patch(tmp_path / "out", {f"model.layers.2.mlp.experts.{name}": tensor})
    with pytest.raises(UnsupportedModelError, match=rf"layers\.2\.mlp\.{message}"):
        SafetensorsFolder(tmp_path / "out", model)


def test_checkpoint_form_that_only_transformers_converts_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.core_model_loading import PermuteForRope, WeightConverter

    model = build_skeleton(tiny_config("llama"), "sdpa")
    converter = WeightConverter("wide.weight", "lm_head.weight", operations=[PermuteForRope()])
    monkeypatch.setattr("megatier.models.weight_conversion.get_model_conversion_mapping", lambda model: [converter])
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight.*PermuteForRope"):
        assemble(model, {"wide.weight": (160, 64)})


def test_checkpoint_with_a_transposed_matrix_is_read_and_written_by_columns(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.core_model_loading import Transpose, WeightConverter

    stored = load_file(llama / "model.safetensors")
    patch(llama, {"lm_head.weight": None, "wide.weight": stored["lm_head.weight"].t().contiguous()})
    converter = WeightConverter("wide.weight", "lm_head.weight", operations=[Transpose(0, 1)])
    mapping = "get_model_conversion_mapping"
    monkeypatch.setattr(f"megatier.models.weight_conversion.{mapping}", lambda model: [copy.deepcopy(converter)])
    model = build_skeleton(tiny_config("llama"), "sdpa")
    units = find_units(model)
    blocks = flat_blocks(SafetensorsFolder(llama, model), units)
    found = tensors_of(blocks, units)
    assert [name for name in stored if not torch.equal(found[name], stored[name])] == []

    # Each rank that has some of the matrix reads all of it, and nothing else that is not its own.
    with monkeypatch.context() as shards:
        shards.setattr(layout, "SHARD_ELEMENTS", 512)
        read = list(of_all_ranks(SafetensorsFolder(llama, model), units, 2, Counter(shards)))
    matrix = stored["lm_head.weight"].nbytes
    assert sum(read) == sum(tensor.nbytes for tensor in stored.values()) + matrix

    def hub_names(_: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            ("wide.weight" if n == "lm_head.weight" else n): t.t() if n == "lm_head.weight" else t
            for n, t in tensors.items()
        }

    monkeypatch.setattr("megatier.models.weight_conversion.revert_weight_conversion", hub_names)
    export(tmp_path / "out", model, units, reader(blocks), torch.float32, 1 << 30)
    written, patched = load_file(tmp_path / "out" / "model.safetensors"), load_file(llama / "model.safetensors")
    assert written.keys() == patched.keys()
    assert torch.equal(written["wide.weight"], patched["wide.weight"])


def test_checkpoint_transposed_in_a_way_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.core_model_loading import Chunk, Transpose, WeightConverter

    model = build_skeleton(tiny_config("llama"), "sdpa")
    cut = WeightConverter("wide.weight", ["lm_head.weight", "other.weight"], operations=[Transpose(0, 1), Chunk(0)])
    for converter, shape in (
        (WeightConverter("wide.weight", "lm_head.weight", operations=[Transpose(0, 2)]), (4, 5, 6)),
        (cut, (64, 320)),
    ):
        monkeypatch.setattr(
            "megatier.models.weight_conversion.get_model_conversion_mapping", lambda model, c=converter: [c]
        )
        with pytest.raises(UnsupportedModelError, match="stored transposed"):
            assemble(model, {"wide.weight": shape})
