"""`megatier export`: what a checkpoint holds is what the run itself exports, byte by byte."""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import reader
from safetensors.torch import load_file
from small_commands import MODEL, command
from test_checkpoint_checkpoint import SmallGrid
from tiny_models import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megatier.checkpoint import checkpoint, checkpoint_writer, plane_writer
from megatier.checkpoint.chunkfile import ChunkFiles
from megatier.checkpoint.grid import ArrayChunk, StoredArray
from megatier.checkpoint.manifest import digest_of
from megatier.cli import main
from megatier.data.tokenizer import byte_tokenizer
from megatier.models import weights
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.export import export

MOE = {**FAMILIES["qwen3_moe"], "model_type": "qwen3_moe", "head_dim": 16}
"""transformers holds the experts of a layer in two tensors; the hub has three for each."""
MODELS: dict[str, dict[str, Any]] = {"untied": {}, "tied": {"tie_word_embeddings": True}, "moe": MOE}


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """So that the arrays of tiny models have many chunks, and tensors come in pieces that are no whole ones."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (checkpoint, checkpoint_writer, plane_writer):
            patch.setattr(module, "Grid", SmallGrid)
        patch.setattr(weights, "READ_ELEMENTS", 700)
        yield


def trained(folder: Path, model: str = "untied", **settings: Any) -> Path:
    """The run directory of two steps in a new folder, with a checkpoint of each."""
    folder.mkdir()
    chosen = {f"model.config.{key}": json.dumps(value) for key, value in MODELS[model].items()}
    saved = {"train.steps": 2, "output.checkpoint_every": 1, "model.compute_dtype": "bf16", "tiers.ram": "16MiB"}
    named = {name.replace("__", "."): value for name, value in settings.items()}
    assert main(command(folder, {**saved, **chosen, **named})) == 0
    return folder / "run"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def trained_once(small_chunks: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run directory of a model that was trained before the first test which asks for it. No test changes it."""
    return functools.cache(lambda model: trained(tmp_path_factory.mktemp("once") / "a run", model))


@pytest.fixture
def run(trained_once: Callable[[str], Path], tmp_path: Path) -> Path:
    """A run directory of the test's own."""
    return Path(shutil.copytree(trained_once("untied"), tmp_path / "a run"))


# ---------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("model", MODELS)
def test_export_of_a_checkpoint_is_what_the_run_exports(
    model: str, trained_once: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained_once(model)
    masters = trained(tmp_path / "fp32", model, output__export_dtype="fp32")
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "x" / "as the run")]) == 0
    assert main(["export", str(run), str(tmp_path / "x" / "masters"), "--dtype", "fp32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[2] == f"from {run}/checkpoints/step-00000002"
    assert lines[1].startswith(f"model written to {tmp_path}/x/as the run (")
    assert files(tmp_path / "x" / "as the run") == files(run / "model")
    assert files(tmp_path / "x" / "masters") == files(masters / "model")
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"as the run", "masters"}


def test_export_of_a_run_with_experts_in_parts_is_that_of_whole_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "a", "moe", model__expert_parts=3, tiers__state="ram", tiers__gpu="128KiB")
    assert "expert_parts: 3" in (run / "config.yaml").read_text()
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert files(tmp_path / "out") == files(run / "model")
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    capsys.readouterr()
    assert main(["resume", str(run), "--model.expert_parts=2"]) == 2
    assert "model.expert_parts was 3 and is 2" in capsys.readouterr().err
    assert main(["resume", str(run)]) == 0
    assert files(tmp_path / "out") == files(run / "model")


def test_export_of_a_step_is_the_model_after_that_step(tmp_path: Path) -> None:
    run = trained(tmp_path / "two", train__schedule="constant")
    once = trained(tmp_path / "one", train__schedule="constant", train__steps=1)
    assert main(["export", str(run / "checkpoints" / "step-00000001"), str(tmp_path / "out")]) == 0
    found = files(tmp_path / "out")
    assert found == files(once / "model")
    assert found["model.safetensors"] != (run / "model" / "model.safetensors").read_bytes()


def test_export_in_shards_loads_with_transformers(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert main(["export", str(run), str(folder), "--shard-size", "30KB"]) == 0
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert (folder / "model.safetensors.index.json").is_file()
    assert {path.name for path in folder.iterdir()} > {"config.json", "generation_config.json", "tokenizer.json"}
    found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    expected = load_file(run / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert AutoTokenizer.from_pretrained(folder)("häuser")["input_ids"] == byte_tokenizer()("häuser")["input_ids"]


def deepseek(folder: Path) -> None:
    """A model with a persistent buffer that is not what a fresh model has, and generation settings."""
    settings = {**MODEL, **FAMILIES["deepseek_v3"], "model_type": "deepseek_v3", "num_hidden_layers": 2}
    model = build_skeleton(AutoConfig.for_model(**settings), "sdpa")
    buffers = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    assert buffers
    for tensor in buffers.values():
        tensor.copy_(torch.linspace(0.1, 0.2, tensor.numel()).view(tensor.shape))
    model.generation_config = GenerationConfig(top_k=7, do_sample=True)
    units = find_units(model)
    blocks = {unit.name: 0.1 * torch.randn(unit.layout.num_elements) for unit in units}
    export(folder, model, units, reader(blocks), torch.float32, 1 << 30, byte_tokenizer())


def test_export_takes_buffers_and_settings_from_where_the_run_began(tmp_path: Path) -> None:
    deepseek(tmp_path / "source")
    run = trained(tmp_path / "run", model__path=tmp_path / "source", data__tokenizer=None)
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert files(tmp_path / "out") == files(run / "model")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["top_k"] == 7
    buffer = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(buffer, torch.linspace(0.1, 0.2, 8))


@pytest.mark.parametrize("model", MODELS)
def test_export_reads_each_chunk_once(
    model: str, trained_once: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(trained_once(model), tmp_path / "run"))
    shutil.rmtree(run / "model")  # as of a run that writes none
    begin, reads = ChunkFiles._begin_read, Counter[Path]()

    def counted(self: ChunkFiles, array: StoredArray, place: int, chunk: ArrayChunk) -> Any:
        reads[array.folder / chunk.key] += 1
        return begin(self, array, place, chunk)

    monkeypatch.setattr(ChunkFiles, "_begin_read", counted)
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    masters = run / "checkpoints" / "step-00000002" / "params"
    assert dict(reads) == {path: 1 for path in masters.glob("*/c/**/*") if path.is_file()}


# ---------------------------------------------------------------------- refused


def refused(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The message; nothing is left of the folder."""
    before = sorted(folder.parent.iterdir())
    capsys.readouterr()
    assert main(["export", str(run), str(folder)]) == 2
    assert sorted(folder.parent.iterdir()) == before
    return capsys.readouterr().err


@pytest.mark.parametrize("missing", ["run", "checkpoints", "step"])
def test_export_without_a_checkpoint_says_how_to_get_one(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    if missing != "run":
        (path / "checkpoints" / ".step-00000001.partial").mkdir(parents=True)
    path = path / "checkpoints" / "step-00000001" if missing == "step" else path
    error = refused(path, tmp_path / "out", capsys)
    assert error.startswith(f"megatier: error: {path} is no checkpoint and holds none. Name a run directory")
    assert "output.checkpoint_every" in error


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[5] ^= 1
    path.write_bytes(raw)


HARMS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped chunk": ("params/model.norm.weight/c/0", flip, "is damaged: its checksum"),
    "missing chunk": ("params/lm_head.weight/c/3/0", Path.unlink, "cannot be read: No such file"),
    "missing array": ("params/lm_head.weight/zarr.json", Path.unlink, "cannot be read: No such file"),
    "cut state": ("zarr.json", lambda path: path.write_text("{"), "is damaged: it is no JSON"),
    "missing state": ("zarr.json", Path.unlink, "cannot be read: No such file"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_export_of_a_damaged_checkpoint_says_what_and_leaves_nothing(
    harm: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, apply, words = HARMS[harm]
    last = run / "checkpoints" / "step-00000002"
    apply(last / name)
    error = refused(run, tmp_path / "out", capsys)
    assert f"{last / name} {words}" in error
    assert "Move this checkpoint away; then the one before it is used." in error
    last.rename(tmp_path / "away")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0


def test_export_of_a_checkpoint_with_exchanged_moments_says_so_and_how_the_weights_come_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No export has moments, but a drive that exchanged them is not to be trusted with the weights."""
    last = run / "checkpoints" / "step-00000002"
    one, other = (last / name / "lm_head.weight/c/0/0" for name in ("exp_avg", "exp_avg_sq"))
    between = one.rename(tmp_path / "between")
    other.rename(one)
    between.rename(other)
    error = refused(run, tmp_path / "out", capsys)
    assert "lm_head.weight/c/0/0 holds other bytes than were written there" in error
    assert error.rstrip().endswith("with --accept-changes.")
    assert main(["export", str(run), str(tmp_path / "out"), "--accept-changes"]) == 0
    assert files(tmp_path / "out") == files(run / "model")


def test_export_whose_checkpoint_is_removed_meanwhile_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    last, fetch = run / "checkpoints" / "step-00000002", ChunkFiles.fetch

    def removed(self: ChunkFiles, *args: Any) -> torch.Tensor:
        shutil.rmtree(last, ignore_errors=True)
        return fetch(self, *args)

    monkeypatch.setattr(ChunkFiles, "fetch", removed)
    assert "was removed meanwhile" in refused(run, tmp_path / "out", capsys)


def test_export_of_a_state_that_no_run_wrote_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / "step-00000002" / "zarr.json"
    stored = path.read_text()
    for config, words in (
        ({"train": 3}, "its config has a section without settings"),
        ({"trainn": {}}, "did you mean train"),
        (3, "damaged"),
    ):
        tree = json.loads(stored)
        held = tree["attributes"]["megatier"]
        held["state"]["config"] = config
        held["digest"] = digest_of({"state": held["state"], "manifest": held["manifest"]})
        path.write_text(json.dumps(tree))
        assert words in refused(run, tmp_path / "out", capsys)


def test_export_to_a_folder_with_files_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    assert "is not empty; export writes only to a new or empty folder" in refused(run, tmp_path / "out", capsys)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["checkpoints", "savepoints"])
def test_export_to_where_it_would_count_as_a_checkpoint_is_refused(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    assert f"would count as one of the {name} of a run" in refused(run, tmp_path / name / "step-00000009", capsys)


def test_export_of_a_link_that_leads_back_to_itself_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "is no checkpoint and holds none" in refused(tmp_path / "loop", tmp_path / "out", capsys)


def test_export_to_a_link_is_written_where_it_leads(run: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    for name, target in (("one", "real"), ("two", "none yet")):
        (tmp_path / name).symlink_to(tmp_path / target)
        assert main(["export", str(run), str(tmp_path / name)]) == 0
        assert (tmp_path / name).is_symlink()
        assert files(tmp_path / target) == files(run / "model")


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_export_where_a_file_is_names_it(
    below: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["export", str(run), str(tmp_path / "file" / below)]) == 2
    assert f"{tmp_path}/file is a file; export writes only to a new or empty folder." in capsys.readouterr().err


def test_export_without_room_is_refused_with_figures(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    error = refused(run, tmp_path / "out", capsys)
    assert "1000 B free. Free space on this disk, or export to another one." in error


def test_export_whose_first_model_is_gone_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deepseek(tmp_path / "source")
    run = trained(tmp_path / "run", model__path=tmp_path / "source", data__tokenizer="bytes")
    (tmp_path / "source").rename(tmp_path / "elsewhere")
    assert f"no such model folder: {tmp_path}/source" in refused(run, tmp_path / "out", capsys)


@pytest.mark.parametrize("words", [["--shard-size", "much"], ["--dtype", "fp8"]])
def test_export_with_a_wrong_option_is_refused(words: list[str], run: Path, tmp_path: Path) -> None:
    try:
        assert main(["export", str(run), str(tmp_path / "out"), *words]) == 2
    except SystemExit as error:
        assert error.code == 2
    assert not (tmp_path / "out").exists()
