"""The comparison of systems: table and ratios, the rows it reads, how it runs systems, and how FLOPs are counted."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import compare
import pytest
import torch
from peers.shapes import SHAPES, LanguageModel, Shape, adapted_config, build, trained_shape
from record import (
    COMMON_KEYS,
    MEASURED_KEYS,
    RESULTS,
    Row,
    RowError,
    default_output,
    facts,
    has_rows,
    read_rows,
    row,
    write_row,
)


def made_up(system: str, seconds: float, batch: int = 2, shape: str = "3b", **more: object) -> Row:
    """A row of steps that all took so long."""
    result = row(
        system,
        shape,
        batch=batch,
        sequence_length=100,
        num_parameters=10,
        seconds=[seconds, seconds, seconds],
        first_step_seconds=9.0,
        model_flops=4e12,
        tflops_formula="made up",
        peak_ram_bytes=int(seconds * 10e9),
        peak_gpu_bytes=None,
        clip=True,
        master_dtype="float32",
    )
    return result | more


def cells(text: str) -> list[list[str]]:
    """Lines of a Markdown table without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_flops_of_a_small_shape_match_the_sum_by_hand() -> None:
    """Hidden 8, 4 heads of 2, 2 of keys and values: a layer has q and o 64 each, k and v 32 each, three times 80."""
    shape = Shape(hidden=8, ffn=10, heads=4, kv_heads=2, layers=3, vocab=20)
    assert shape.matmul_parameters == 3 * (64 + 64 + 32 + 32 + 240) + 160 == 1456
    assert shape.model_flops(tokens=14, sequence_length=7) == 6 * 1456 * 14 + 6 * 3 * 7 * 8 * 14 == 136_416


def test_flops_over_a_frozen_base_leave_out_the_gradients_of_its_weights() -> None:
    """An adapter of rank 2 has two parameters for each input and output: a layer has 32 + 24 + 54 of them."""
    shape = Shape(hidden=8, ffn=10, heads=4, kv_heads=2, layers=3, vocab=20)
    assert shape.adapter_parameters(2) == 3 * 2 * 110 == 660
    expected = 14 * (4 * 1456 + 6 * 660 + 6 * 3 * 7 * 8)
    assert shape.model_flops(tokens=14, sequence_length=7, rank=2) == expected == 151_088


def test_a_shape_with_adapters_is_compared_with_no_other() -> None:
    """A row of adapters has a name of its own, so a system that trains the whole model is no baseline for it."""
    whole = made_up("fsdp2_offload", 1.0)
    adapted = made_up("megatier", 0.5, shape=trained_shape("3b", 16))
    assert trained_shape("3b", 0) == "3b"
    assert compare.baseline_of(adapted, [whole, adapted], None) is None


def test_adapters_of_a_shape_are_those_of_peft() -> None:
    """PEFT puts as many parameters beside the layers of a shape as its FLOPs count."""
    peft = pytest.importorskip("peft")
    with torch.device("meta"):
        model = LanguageModel(SHAPES["tiny"], 64)
        model.requires_grad_(False)
        peft.inject_adapter_in_model(adapted_config(4), model.core)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == SHAPES["tiny"].adapter_parameters(4)


def test_parameters_of_the_shapes_match_the_published_counts() -> None:
    """3.397B and 8.030B; 2.472B with 24 layers; of experts 3.3B and 5.1B are chosen, with embedding and head."""
    assert [round(SHAPES[name].num_parameters / 1e6) for name in ("3b", "3b24", "8b")] == [3397, 2472, 8030]
    assert (SHAPES["30b-a3b"].num_parameters, SHAPES["117b-a5b"].num_parameters) == (30_532_122_624, 116_829_156_672)
    assert round((SHAPES["30b-a3b"].matmul_parameters + 2048 * 151936) / 1e8) == 34
    assert round(SHAPES["117b-a5b"].matmul_parameters / 1e8) == 51


def test_built_model_has_the_parameters_and_a_loss_of_random_tokens() -> None:
    """A random model knows nothing: its loss is the logarithm of the vocabulary."""
    model = build(SHAPES["tiny"], 32, torch.float32)
    ids = torch.randint(0, SHAPES["tiny"].vocab, (2, 32), generator=torch.Generator().manual_seed(0))
    assert sum(parameter.numel() for parameter in model.parameters()) == SHAPES["tiny"].num_parameters
    assert abs(model(ids).item() - 6.93) < 0.2


def test_table_takes_the_fastest_peer_as_baseline_at_each_shape_and_tokens() -> None:
    """Ourselves and rows with an error are never the baseline; other tokens a step have their own."""
    rows = [
        made_up("megatier", 0.5, row=5),
        made_up("slow", 4.0),
        made_up("fast", 2.0),
        made_up("slow", 8.0, batch=4),
        {**made_up("broken", 1.0), "error": "out of memory"},
    ]
    body = cells(compare.table(rows))
    assert [(line[3], line[4], line[5], line[6]) for line in body if line[1] == "200" and line[3] != "broken"] == [
        ("megatier row 5", "400", "4.00", "0.500"),
        ("fast", "100", "1.00", "2.000"),
        ("slow", "50", "0.50", "4.000"),
    ]
    assert [(line[3], line[5]) for line in body if line[1] == "400"] == [("slow", "1.00")]
    ours = next(line for line in body if line[3] == "megatier row 5")
    assert ours[7:11] == ["5.0", "0.25", "-", "-"]
    broken = next(line for line in body if line[3] == "broken")
    assert "could not run: out of memory" in broken[-1]


def test_table_with_a_named_baseline_gives_ratios_to_it_alone() -> None:
    """Where the baseline was not measured there is no ratio."""
    rows = [made_up("fast", 2.0), made_up("slow", 4.0), made_up("fast", 2.0, batch=4)]
    assert [line[5] for line in cells(compare.table(rows, "slow"))] == ["2.00", "1.00", "-"]


def test_table_with_an_unknown_baseline_names_the_systems() -> None:
    """A typo is told, not answered with an empty column."""
    with pytest.raises(RowError, match=r"no row of slwo.*fast"):
        compare.table([made_up("fast", 2.0)], "slwo")


def test_table_without_rows_is_refused() -> None:
    """Nothing to compare."""
    with pytest.raises(RowError, match="no rows"):
        compare.table([])


def test_results_of_the_repository_are_read_and_stored_ones_are_flagged(capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments: other measurements beside the rows are left out."""
    compare.main([])
    text = capsys.readouterr().out
    assert "stored, not rerun" in text
    assert "stored: measured by us on one H200" in text
    assert not has_rows(RESULTS / "h200" / "bounds.json")


def test_row_written_and_read_again_is_the_same(tmp_path: Path) -> None:
    """Every key of the schema is there."""
    path, result = tmp_path / "new" / "row.json", made_up("fast", 2.0)
    write_row(result, path)
    assert (COMMON_KEYS | MEASURED_KEYS).keys() <= result.keys()
    assert read_rows(path) == [json.loads(json.dumps(result))]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{", "not JSON"),
        ("3", "a row is an object, not int"),
        ('{"system": "x"}', "no batch, .*shape"),
        (
            '{"system": "x", "shape": "3b", "sequence_length": 1, "tokens_per_step": 1, "source": "y"}',
            "no tokens_per_s",
        ),
        ('{"system": "x", "shape": "3b", "sequence_length": 1, "tokens_per_step": "2", "error": "y"}', "'2', .* str"),
        (
            '{"system": "x", "shape": "3b", "sequence_length": 1, "tokens_per_step": 1, "error": "y", "batch": true}',
            "batch is True",
        ),
    ],
)
def test_file_that_holds_no_row_is_refused_by_name(text: str, wanted: str, tmp_path: Path) -> None:
    """The message names the file and what is wrong."""
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=rf"(?s)bad\.json.*{wanted}"):
        compare.main([str(path)])


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    """Not a traceback."""
    with pytest.raises(SystemExit, match=r"none\.json: cannot be read"):
        compare.main([str(tmp_path / "none.json")])


def test_rounds_of_a_system_merge_into_one_row() -> None:
    """All seconds, the highest peaks; a round that failed is told."""
    merged = compare.merged([made_up("fast", 2.0), made_up("fast", 4.0), {**made_up("fast", 1.0), "error": "gone"}])
    assert merged["seconds"] == [2.0] * 3 + [4.0] * 3
    assert (merged["median_seconds"], merged["tokens_per_s"]) == (3.0, 200 / 3.0)
    assert merged["model_tflops"] == pytest.approx(4 / 3.0)
    assert merged["peak_ram_bytes"] == 40_000_000_000
    assert (merged["round_medians"], merged["note"]) == ([2.0, 4.0], "1 of 3 rounds failed")


def test_run_alternates_systems_and_records_one_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two made-up systems, two rounds: one writes its row, one is killed."""
    write_row(made_up("megatier", 2.0), tmp_path / "made.json")
    good, dead = tmp_path / "good.py", tmp_path / "dead.py"
    good.write_text(
        f"import shutil, sys\nshutil.copy({str(tmp_path / 'made.json')!r}, sys.argv[-1])\n", encoding="utf-8"
    )
    dead.write_text("import os\nos.kill(os.getpid(), 9)\n", encoding="utf-8")
    monkeypatch.setattr(compare, "SCRIPTS", {"megatier": (str(good),), "fsdp2_offload": (str(dead),)})
    results = tmp_path / "results"
    compare.main(["--run", "megatier,fsdp2_offload", "--rounds", "2", "--directory", str(results)])
    text = capfd.readouterr().out
    began = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("round ")]
    assert began == ["megatier", "fsdp2_offload", "fsdp2_offload", "megatier"]
    assert "could not run: killed by signal 9" in text
    written = [entry for path in results.iterdir() for entry in read_rows(path)]
    assert {entry["system"]: len(entry.get("seconds", [])) for entry in written} == {"megatier": 6, "fsdp2_offload": 0}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--run", "nobody"], "no script measures 'nobody'"),
        (["--run", "deepspeed_zero3_nvme"], "needs --path"),
        (["--run", "megatier", "--batch", "3"], "name one of its rows with --row"),
    ],
)
def test_run_that_cannot_start_says_why(arguments: list[str], wanted: str) -> None:
    """Before anything runs."""
    with pytest.raises(SystemExit, match=wanted):
        compare.main(arguments)


@pytest.mark.slow
def test_fsdp2_on_the_cpu_leaves_a_row(tmp_path: Path) -> None:
    """A smoke run of a real peer, as a user starts it."""
    options = ["--shape", "tiny", "--batch", "2", "--seq", "32", "--steps", "1", "--device", "cpu"]
    compare.main(["--run", "fsdp2_offload", *options, "--directory", str(tmp_path)])
    (result,) = [entry for path in tmp_path.iterdir() for entry in read_rows(path)]
    assert "error" not in result
    assert result["tokens_per_s"] > 0
    assert result["peak_ram_bytes"] > 100e6


@pytest.mark.parametrize("output", [["--output", "/somewhere/row.json"], ["--output=/somewhere/row.json"], []])
def test_facts_name_the_command_without_where_its_result_went(
    output: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench/bench_step.py", "--row", "1", *output, "--steps", "4"])
    assert facts()["command"] == "python bench/bench_step.py --row 1 --steps 4"


def test_stored_results_name_no_path_of_a_machine() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in RESULTS.rglob("*.json*")}
    assert texts
    assert not [name for name, text in texts.items() if re.search(r"/(root|home|tmp)/", text)]


def test_stored_results_are_all_in_the_index_and_the_index_names_no_other() -> None:
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"\]\(([\w./-]+\.jsonl?)\)", index)
    stored = [path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.json*")]
    assert sorted(named) == sorted(stored)


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [("NVIDIA H200, 580.159.04", "h200"), ("NVIDIA GeForce RTX 4090, 1.2", "geforce_rtx_4090"), (None, "2_cores")],
)
def test_default_output_is_in_the_folder_of_the_machine(gpu: str | None, folder: str) -> None:
    peer = made_up("fast", 2.0, machine={"gpu": gpu, "cores": 2})
    ours = made_up("megatier", 2.0, machine={"gpu": gpu, "cores": 2}, row=5)
    assert default_output(peer) == RESULTS / folder / "fast_3b_200.json"
    assert default_output(ours) == RESULTS / folder / "row5.json"
    assert compare.output_of(ours, None) == RESULTS / folder / "row5_beside_peers.json"
