"""`megatier train` from the first word to the exported folder."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import fake_kvikio
import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_commands import MODEL, all_records, command, leftovers, metrics, write_chats
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatier.cli import main
from megatier.config.schema import TrainConfig
from megatier.config.values import parse_bytes
from megatier.data.tokenizer import byte_tokenizer
from megatier.engine.unit_model import Batch, UnitModel
from megatier.errors import mib
from megatier.schedule.rates import DriveRates, Rates
from megatier.train import choices
from megatier.train.loop import rate_of

PLACES: dict[str, dict[str, Any]] = {
    "gpu": {"tiers.state": "gpu"},
    "ram": {"tiers.state": "ram", "tiers.gpu": "512KiB"},
    "ram_streamed": {"tiers.state": "ram", "tiers.gpu": "16MiB", "tiers.streamed_share": 0.7},
    "nvme": {"tiers.state": "nvme", "tiers.gpu": "512KiB"},
    "gpu_ram": {"tiers.state": "gpu,ram", "tiers.gpu": "640KiB"},
    "ram_nvme": {"tiers.state": "ram,nvme", "tiers.gpu": "512KiB", "tiers.ram": None},
    "gpu_ram_nvme": {"tiers.gpu": "640KiB", "tiers.ram": None},
}
"""Tiers that hold state; a RAM budget of None stands for little more than the least there is."""
IMMEDIATE = {"train.clip": "null", "numerics.guard": False}
"""Updates run inside the backward."""
MODES: list[dict[str, Any]] = [
    {"train.clip": 0.5, "train.activations": "keep"},
    {**IMMEDIATE, "train.activations": "offload", "train.slices": 2},
    {"train.clip": 0.5, "train.groups": 2, "train.slices": 2, "train.activations": "recompute"},
    {"train.clip": "null", "train.groups": 2, "train.activations": "offload"},
]


@pytest.fixture(autouse=True)
def _repeatable_settings() -> Iterator[None]:
    """A run chooses deterministic kernels for its process; tests share theirs."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.set_num_threads(before[1])


def trained(folder: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Masters at the end of a run in a new folder."""
    folder.mkdir()
    assert main(command(folder, {"output.export_dtype": "fp32", **settings})) == 0
    return load_file(folder / "run" / "model" / "model.safetensors")


def least_ram(folder: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> int:
    """The budget, in bytes, that refused runs ask for."""
    least = 1
    while True:  # for gradients, perhaps, then for slots
        folder.mkdir()
        code = main(command(folder, {**settings, "tiers.ram": least}))
        shutil.rmtree(folder)
        if code == 0:
            return least
        [(number, unit)] = re.findall(r"Raise tiers.ram to at least ([\d.]+) (\w+)", capsys.readouterr().err)
        least = parse_bytes(number + unit)


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# ---------------------------------------------------------------------- records


def test_train_run_leaves_config_metrics_and_model_and_nothing_else(tmp_path: Path) -> None:
    assert main(command(tmp_path, {"tiers.nvme": f"{tmp_path}:16MiB", "tiers.state": "nvme"})) == 0
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.yaml",
        "numbers.json",
        "run-id",
        "metrics.jsonl",
        "data",
        "model",
    }
    assert list(leftovers(tmp_path)) == []


def test_train_run_records_whether_it_compiled(tmp_path: Path) -> None:
    assert main(command(tmp_path, {})) == 0
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert recorded["model"]["compile"] is False


def test_train_run_records_that_its_loss_could_not_be_fused(tmp_path: Path) -> None:
    given = {"model.config.model_type": "bert", "model.config.is_decoder": True, "train.steps": 1}
    with pytest.warns(UserWarning, match="the output embedding of BertLMHeadModel is not a unit") as warned:
        assert main(command(tmp_path, given)) == 0
    assert len(warned) == 1
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert recorded["model"]["fused_loss"] is False


RATES = Rates(
    drives=(DriveRates(directory="a", read_bytes_per_s=1e9, write_bytes_per_s=1e9, mixed_bytes_per_s=1e9),),
    to_gpu_bytes_per_s=1e10,
    to_ram_bytes_per_s=1e10,
    update_parameters_per_s=1e9,
    memory_bytes_per_s=1e11,
    gpu_update_parameters_per_s=1e10,
    flops_per_s=1e12,
)


def test_train_on_a_measured_machine_takes_what_the_planner_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choices, "cached_rates", lambda directories, device: RATES)
    given = {"tiers.nvme": f"{tmp_path}:16MiB", "train.slices": 2}
    assert main(command(tmp_path, given)) == 0
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if line.startswith("planned, ")]
    line_of_step = next(line for line in lines if line.startswith("step 1/"))
    chosen = dict(re.findall(r"--(\S+) (\S+)", line))
    assert {"train.groups", "train.activations", "tiers.streamed_share"} <= chosen.keys()
    assert not {"train.slices", "tiers.gpu", "tiers.nvme"} & chosen.keys()
    for name, value in chosen.items():
        section, _, key = name.partition(".")
        assert str(recorded[section][key]) == value
    assert recorded["train"]["slices"] == 2
    steps = [record for record in metrics(tmp_path) if "loss" in record]
    assert all(step["attainment"] > 0 for step in steps)
    assert re.search(r"attainment \d+%", line_of_step)
    assert all_records(tmp_path)[0]["expected"]["seconds"] == pytest.approx(
        steps[0]["attainment"] * steps[0]["seconds"]
    )


@pytest.mark.parametrize(
    ("state", "bytes_per_s", "said"),
    [
        ("nvme", 1e6, r"all but compute is hidden from N\* = (?!128 )[\d,]+ tokens a step on; this run has 128"),
        ("nvme", 1e12, r"all but compute is hidden at this run's 128 tokens a step"),
        ("ram", 1e6, None),
    ],
)
def test_train_on_a_measured_machine_says_how_many_tokens_hide_what_spills(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    bytes_per_s: float,
    said: str | None,
) -> None:
    drive = DriveRates(
        directory="a", read_bytes_per_s=bytes_per_s, write_bytes_per_s=bytes_per_s, mixed_bytes_per_s=bytes_per_s
    )
    monkeypatch.setattr(choices, "cached_rates", lambda *_: replace(RATES, drives=(drive,), flops_per_s=1e9))
    settings = {"tiers.nvme": f"{tmp_path}:16MiB", "tiers.state": state, "tiers.gpu": "512KiB", "train.steps": 1}
    assert main(command(tmp_path, settings)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("all but compute")]
    assert len(lines) == (said is not None)
    assert all(re.fullmatch(said or "", line) for line in lines)


def test_train_that_fits_no_plan_is_tried_as_given_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = replace(RATES, gpu_bytes=1.0)
    monkeypatch.setattr(choices, "cached_rates", lambda directories, device: tiny)
    assert main(command(tmp_path, {})) == 0
    assert "no plan fits by estimate" in capsys.readouterr().out


def test_train_streamed_run_reports_the_lanes_of_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, PLACES["ram_streamed"])) == 0
    output = capsys.readouterr().out
    assert {"state_to_gpu", "state_to_ram"} <= set(re.findall(r"\w+", output))
    assert re.search(r"[1-9]\d* units stream their state", output)


def test_train_gpu_limit_without_a_gpu_is_said_to_be_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, {"tiers.gpu_limit": "1GiB", "train.steps": 1, "train.warmup_steps": 0})) == 0
    assert "tiers.gpu_limit is ignored" in capsys.readouterr().out


def test_train_run_that_cannot_stream_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, {**PLACES["ram_streamed"], **IMMEDIATE})) == 0
    assert "0 units stream their state" in capsys.readouterr().out


def test_train_run_with_two_generations_says_what_became_of_its_guesses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            command(
                tmp_path,
                {**PLACES["nvme"], "tiers.nvme": f"{tmp_path}:16MiB", "tiers.generations": 2, "train.clip": 1e3},
            )
        )
        == 0
    )
    output = capsys.readouterr().out
    assert re.search(
        r"[1-9]\d* units spill to NVMe and are updated in the backward, before the norm is known\. If", output
    )
    assert "confirmed in 3 steps, void in 0 that clipped or were left out" in output
    assert [record["speculation"] for record in metrics(tmp_path) if "loss" in record] == ["kept"] * 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "updated in place. If the run is killed it goes on from its last checkpoint (by time)"),
        ({"output.checkpoint_every": 0}, "updated in place. If the run is killed it restarts from step 1"),
        (
            {"output.checkpoint_every": 3},
            "updated in place. If the run is killed it goes on from its last checkpoint (every 3",
        ),
        (
            {"output.savepoint_every": 2, "tiers.generations": 2},
            "updated when the norm is known, apart from the savepoint. If the run is killed it goes on from its last",
        ),
        (
            {"output.savepoint_every": 2, "tiers.generations": 3},
            "updated in the backward, before the norm is known. If the run is killed it goes on from its last save",
        ),
    ],
)
def test_train_run_that_spills_says_what_is_safe(
    settings: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, {**PLACES["nvme"], "tiers.nvme": f"{tmp_path}:16MiB", **settings})) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("clip", [1.0, "null"])
def test_train_step_that_is_not_finite_is_left_out_and_said(
    clip: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_losses(monkeypatch, {2})
    assert main(command(tmp_path, {"tiers.state": "ram", "train.clip": clip})) == 0
    said = "step 2 is left out, so that no weight changes: the gradient of lm_head.weight is not finite"
    assert said in capsys.readouterr().out
    steps = [record for record in metrics(tmp_path) if "loss" in record]
    assert [record["skipped"] for record in steps] == [None, "lm_head.weight", None]
    assert [record["loss"] == "nan" for record in steps] == [False, True, False]


def test_train_more_steps_in_a_row_than_may_be_left_out_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_losses(monkeypatch, {1, 3, 4, 5})
    words = command(tmp_path, {"train.steps": 6, "train.schedule": "constant", "numerics.max_skips": 2})
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "the loss of step 5 is not finite, and 2 steps before it were left out; first in the gradient of" in message
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == [1, 2, 3, 4]
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == [1, 2, 3, 4, 6], (
        "behind the bad step"
    )


def spoil_losses(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """The loss of these steps is NaN."""
    real, begun = UnitModel.loss, itertools.count(1)

    def loss(self: UnitModel, batch: Batch, *how: Any) -> torch.Tensor:
        found = real(self, batch, *how)
        return found * float("nan") if torch.is_grad_enabled() and next(begun) in steps else found

    monkeypatch.setattr(UnitModel, "loss", loss)


def test_train_metrics_have_every_figure_of_every_step(tmp_path: Path) -> None:
    assert main(command(tmp_path, {"train.evaluate_every": 2, "tiers.state": "ram", "tiers.gpu": "512KiB"})) == 0
    records = metrics(tmp_path)
    assert [(record["step"], "heldout_loss" in record) for record in records] == [
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (3, True),
    ]
    first = records[0]
    assert first.keys() == {
        "step",
        "loss",
        "learning_rate",
        "grad_norm",
        "clip_coefficient",
        "skipped",
        "tokens",
        "tokens_seen",
        "time",
        "seconds",
        "tokens_per_s",
        "attainment",
        "stall_seconds",
        "busy_seconds",
        "slowest_rank",
        "speculation",
        "moved_bytes",
        "demanded_bytes",
        "resident_bytes",
        "nvme_path",
    }
    assert first["loss"] == pytest.approx(math.log(MODEL["vocab_size"]), rel=0.05)
    assert first["tokens"] == 4 * 32
    assert [record["tokens_seen"] for record in records if "loss" in record] == [128, 256, 384]
    assert all(datetime.fromisoformat(record["time"]).tzinfo for record in records if "loss" in record)
    assert first["tokens_per_s"] == pytest.approx(first["tokens"] / first["seconds"])
    assert first["clip_coefficient"] == min(1.0, 1.0 / (first["grad_norm"] + 1e-6))
    assert set(first["moved_bytes"]) == {"ram_to_gpu", "gpu_to_ram"}
    assert first["demanded_bytes"].keys() == first["moved_bytes"].keys()
    assert first["nvme_path"] == "no NVMe tier"
    assert 0 < first["busy_seconds"]["compute"] <= first["seconds"]
    assert first["resident_bytes"] > 8 << 20


def test_train_past_ram_reports_what_kvikio_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = fake_kvikio.install(monkeypatch)
    settings = {**PLACES["nvme"], "tiers.nvme": f"{tmp_path}:16MiB", "tiers.gpu_direct": True}
    assert main(command(tmp_path, settings)) == 0
    output = capsys.readouterr().out
    first, last = re.findall(r"kvikio in compatibility mode \(([^)]+)\)", output)
    assert 0 < parse_bytes(first) <= 1 << 20  # the probe
    assert last == mib(library.posix_bytes)
    [(moved, demanded)] = re.findall(r"nvme_to_gpu │ +([\d,]+) │ +([\d,]+) │", output)
    assert moved == demanded != "0"
    assert "kvikio in compatibility mode" in metrics(tmp_path)[0]["nvme_path"]


def test_train_learns(tmp_path: Path) -> None:
    assert main(command(tmp_path, {"train.steps": 30, "output.export": False})) == 0
    records = metrics(tmp_path)
    assert records[-1]["heldout_loss"] < records[0]["loss"] - 2


def test_train_without_export_writes_no_model(tmp_path: Path) -> None:
    assert main(command(tmp_path, {"output.export": False})) == 0
    assert not (tmp_path / "run" / "model").exists()


def test_train_without_held_out_text_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, {"data.holdout_fraction": 0, "train.evaluate_every": 1})) == 0
    assert "no held-out text" in capsys.readouterr().out
    assert not any("heldout_loss" in record for record in metrics(tmp_path))


def test_train_trace_is_a_chrome_trace_of_the_last_steps(tmp_path: Path) -> None:
    settings = {"output.trace": True, "train.steps": 5, "tiers.nvme": f"{tmp_path}:16MiB", "tiers.state": "nvme"}
    assert main(command(tmp_path, settings)) == 0
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {"compute", "nvme_to_ram", "ram_to_gpu", "gpu_to_ram", "ram_to_nvme", "update_nvme"} <= set(lanes)
    assert {span["args"]["step"] for span in spans} == {3, 4, 5}
    assert all(span["dur"] >= 0 and span["ts"] > 0 for span in spans)
    for lane in ("compute", "update_nvme"):
        times = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if s["tid"] == lanes[lane])
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(times)), f"{lane} overlaps itself"


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(str(value) for value in mode.values()))
def test_train_any_placement_moves_what_it_demands_and_gives_the_same_weights(
    mode: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    few = "gpu", "nvme", "gpu_ram_nvme"  # the exactness tests have every pair
    for place, tiers in PLACES.items() if mode is MODES[0] else ((place, PLACES[place]) for place in few):
        settings = {**tiers, **mode, "tiers.nvme": f"{tmp_path}:16MiB", "model.config.num_hidden_layers": 8}
        if settings.get("tiers.ram", "") is None:
            settings["tiers.ram"] = least_ram(tmp_path / place, settings, capsys) + (100 << 10)
        found[place] = trained(tmp_path / place, {**settings, "train.evaluate_every": 2})
        report = capsys.readouterr().out
        moves = {row[0]: row[1:] for row in re.findall(r"(\w+_to_\w+)\s+│\s+([\d,]+) │\s+([\d,]+) │\s+(\S+) │", report)}
        assert {row[2] for row in moves.values()} == {"none"}, report
        assert len(moves) == (6 if place == "ram_streamed" else 4)
        lies = dict(re.findall(r"│ (gpu|ram|nvme)\s+│\s+(\S+)", report))
        assert {tier for tier, size in lies.items() if size != "0"} == {*place.split("_")} - {"streamed"}, report
    assert [place for place, weights in found.items() if not equal(weights, found["gpu"])] == []


def test_train_conversations_any_placement_and_policy_give_the_same_weights(tmp_path: Path) -> None:
    settings = {"data.files": write_chats(tmp_path), "data.sequence_length": 64, "tiers.nvme": f"{tmp_path}:16MiB"}
    runs: dict[str, dict[str, Any]] = {
        "gpu": {},
        "nvme": {**PLACES["nvme"], "train.activations": "offload"},
        "gpu_ram": {**PLACES["gpu_ram"], "train.activations": "recompute"},
    }
    found = {name: trained(tmp_path / name, {**settings, **run}) for name, run in runs.items()}
    assert [name for name, weights in found.items() if not equal(weights, found["gpu"])] == []
    records = metrics(tmp_path / "gpu")
    assert all(0 < record["tokens"] < 4 * 64 for record in records if "tokens" in record), "the fill does not count"
    assert "generation" in AutoTokenizer.from_pretrained(tmp_path / "gpu" / "run" / "model").chat_template
    crossing = trained(tmp_path / "crossing", {**settings, "data.cross_documents": True})
    assert not equal(crossing, found["gpu"])


def test_train_documents_apart_on_recurrent_layers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {"model.config.layer_types": "[linear_attention, full_attention, full_attention]"}
    settings = {**layers, "model.config.model_type": "qwen3_next", "data.cross_documents": False}
    assert main(command(tmp_path, settings)) != 0
    assert "layers (linear_attention) that do not stop at the borders of documents" in capsys.readouterr().err


def test_train_evaluations_in_between_change_no_bit(tmp_path: Path) -> None:
    settings = {"tiers.nvme": f"{tmp_path}:16MiB", "tiers.state": "ram,nvme", "train.steps": 4}
    for name, mode in (("deferred", {"train.clip": 0.5}), ("immediate", IMMEDIATE)):
        runs = [
            trained(tmp_path / f"{name}-{every}", {**settings, **mode, "train.evaluate_every": every})
            for every in (0, 1)
        ]
        assert equal(*runs)
        [seldom, often] = [metrics(tmp_path / f"{name}-{every}") for every in (0, 1)]
        assert len(often) == len(seldom) + 3
        assert [r["loss"] for r in seldom if "loss" in r] == [r["loss"] for r in often if "loss" in r]
        assert seldom[-1]["heldout_loss"] == often[-1]["heldout_loss"]


def test_train_a_fresh_process_gives_the_same_bytes(tmp_path: Path) -> None:
    settings = {"tiers.nvme": f"{tmp_path}:16MiB", "tiers.state": "nvme", "model.config.attention_dropout": 0.1}
    here, fresh = tmp_path / "here", tmp_path / "fresh"
    found = []
    for folder in (here, fresh):
        folder.mkdir()
        words = command(folder, {**settings, "model.compute_dtype": "bf16"})
        if folder is here:
            assert main(words) == 0
        else:
            code = "import sys; from megatier.cli import main; sys.exit(main(sys.argv[1:]))"
            done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
        losses = [record.get("loss", record.get("heldout_loss")) for record in metrics(folder)]
        found.append((losses, (folder / "run" / "model" / "model.safetensors").read_bytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rate_of_any_schedule_follows_its_formula(schedule: str) -> None:
    train = TrainConfig(
        steps=11,
        warmup_steps=4,
        learning_rate=2.0,
        min_learning_rate_ratio=0.1,
        schedule=schedule,  # type: ignore[arg-type]
    )
    rates = [rate_of(step, train) for step in range(1, 12)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    for position, rate in enumerate(rates[4:]):
        share = position / 7
        factor = {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share))}[schedule]
        floor = 1.0 if schedule == "constant" else 0.1
        assert rate == pytest.approx(2.0 * (floor + (1 - floor) * factor), rel=1e-12)


# ---------------------------------------------------------------------- Hugging Face in and out


def saved_model(folder: Path, dtype: torch.dtype, layers: int = 2) -> LlamaForCausalLM:
    """A model whose one shard has about 6 MB in fp32, with a tokenizer, written by transformers."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": layers, "head_dim": 32}
    model = LlamaForCausalLM(LlamaConfig(**{**MODEL, **sizes}))
    model = model.bfloat16() if dtype is torch.bfloat16 else model
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_train_local_folder_larger_than_ram_trains_and_exports(dtype: torch.dtype, tmp_path: Path) -> None:
    source = tmp_path / "source"
    layers = 4 if dtype is torch.float32 else 8
    saved = saved_model(source, dtype, layers)
    settings: dict[str, Any] = {
        "model.path": str(source),
        "data.tokenizer": None,
        "tiers.gpu": "5MiB",
        "tiers.ram": "3MiB",
        "tiers.nvme": f"{tmp_path}:64MiB",
        "train.steps": 2,
        **IMMEDIATE,
        "output.export_dtype": "fp32",
        "model.compute_dtype": "bf16",
    }
    assert (source / "model.safetensors").stat().st_size > 3 << 20
    for rate in (0.0, 1e-3):
        folder = tmp_path / f"rate-{rate}"
        folder.mkdir()
        assert main(command(folder, {**settings, "train.learning_rate": rate})) == 0
        model = AutoModelForCausalLM.from_pretrained(folder / "run" / "model")
        assert model.dtype is torch.float32
        expected = {name: parameter.float() for name, parameter in saved.named_parameters()}
        found = dict(model.named_parameters())
        assert found.keys() == expected.keys()
        same = [torch.equal(found[name], expected[name]) for name in expected]
        assert all(same) if rate == 0 else not any(same)
        tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "model")
        assert tokenizer.decode(tokenizer("häuser\n")["input_ids"]) == "häuser\n"
        assert list(leftovers(folder)) == []
