"""`megatier train` from the first word to the exported folder."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import fake_kvikio
import pytest
import torch
import yaml
from small_commands import IMMEDIATE, MODEL, PLACES, all_records, command, leftovers, metrics
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatier.byte_counts import format_bytes
from megatier.cli import main
from megatier.config.values import parse_bytes
from megatier.data.packed_text import PackedText
from megatier.engine.step import Engine
from megatier.engine.unit_model import Batch, UnitModel
from megatier.measure import probe
from megatier.play.player import Player
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates import Rates
from megatier.watch.watchdog import Watchdog


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


def test_train_refuses_a_tokenizer_of_few_tokens_one_of_which_the_model_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = MODEL["vocab_size"]
    made = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "far": size}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)
    assert main(command(tmp_path, {"data.tokenizer": str(folder)})) == 2
    errors = capsys.readouterr().err
    assert f"the tokenizer has tokens up to {size}, the model's vocab_size is {size}" in errors
    assert f"Raise model.config.vocab_size to {size + 1}" in errors


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
    monkeypatch.setattr(probe, "cached_rates", lambda directories, device: RATES)
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
    monkeypatch.setattr(probe, "cached_rates", lambda *_: replace(RATES, drives=(drive,), flops_per_s=1e9))
    settings = {"tiers.nvme": f"{tmp_path}:16MiB", "tiers.state": state, "tiers.gpu": "512KiB", "train.steps": 1}
    assert main(command(tmp_path, settings)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("all but compute")]
    assert len(lines) == (said is not None)
    assert all(re.fullmatch(said or "", line) for line in lines)


def test_train_that_fits_no_plan_is_tried_as_given_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = replace(RATES, gpu_bytes=1.0)
    monkeypatch.setattr(probe, "cached_rates", lambda directories, device: tiny)
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
    assert "confirmed in 3 steps, void in 0 that clipped or were skipped" in output
    assert [record["speculation"] for record in metrics(tmp_path) if "loss" in record] == ["kept"] * 3


def test_train_with_generations_in_ram_says_how_many_units_have_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**PLACES["ram"], "tiers.generations": 2, "train.clip": 1e3}
    assert main(command(tmp_path, settings)) == 0
    output = capsys.readouterr().out
    assert re.search(r"[1-9]\d* units in RAM have a second place there and are updated in the backward", output)
    assert "confirmed in 3 steps, void in 0 that clipped or were skipped" in output


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
    said = "step 2 is skipped, so that no weight changes: the gradient of lm_head.weight is not finite"
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
    assert "the loss of step 5 is not finite, and 2 steps before it were skipped; first in the gradient of" in message
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
        "compile_seconds",
        "tokens_per_s",
        "attainment",
        "compute_seconds",
        "stall_seconds",
        "host_seconds",
        "host_busy_seconds",
        "busy_seconds",
        "slowest_rank",
        "speculation",
        "moved_bytes",
        "demanded_bytes",
        "resident_bytes",
        "other_ranks",
        "nvme_path",
    }
    assert first["other_ranks"] == []
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
    assert last == format_bytes(library.posix_bytes)
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


def test_train_whose_held_out_tokens_all_are_ignored_has_no_best_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first rows that are held out have nothing but the question, which is not learnt.
    turns = [{"from": "human", "value": "why " * 200}, {"from": "gpt", "value": "so " * 9}]
    (tmp_path / "chats.json").write_text(json.dumps([{"conversations": turns}] * 10))
    info = tmp_path / "dataset_info.json"
    info.write_text(json.dumps({"chats": {"file_name": "chats.json", "formatting": "sharegpt"}}))

    settings = {
        "data.files": f"{info}#chats",
        "train.evaluate_every": 1,
        "train.evaluate_batches": 1,
        "train.early_stopping_patience": 1,
        "output.load_best_model_at_end": True,
    }
    assert main(command(tmp_path, settings)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("not evaluated, since there is no held-out text, or no token of it counts") == 3
    assert "held-out loss 0" not in said
    assert not any("heldout_loss" in record for record in metrics(tmp_path))
    assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == [1, 2, 3]


def test_train_evaluates_each_held_out_batch_before_it_reads_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    looks: list[Callable[[], int | None]] = []
    holdout, evaluation, watch = PackedText.holdout, Engine.evaluation, Watchdog.watch

    def read(text: PackedText, batch: int) -> Iterator[Batch]:
        for rows in holdout(text, batch):
            # A slow read is no hang, and a slow pass is one.
            assert looks[-1]() is None
            events.append("read")
            yield rows

    def run(engine: Engine, name: str = "evaluate") -> AbstractContextManager[None]:
        assert looks[-1]() == 0
        events.append("run")
        return evaluation(engine, name)

    def noted(watchdog: Watchdog, player: Player, done: Callable[[], int | None] = lambda: 0) -> Any:
        looks.append(done)
        return watch(watchdog, player, done)

    monkeypatch.setattr(PackedText, "holdout", read)
    monkeypatch.setattr(Engine, "evaluation", run)
    monkeypatch.setattr(Watchdog, "watch", noted)
    assert main(command(tmp_path, {"train.groups": 2, "train.evaluate_batches": 2})) == 0
    assert events[-6:] == ["read", "run", "run"] * 2


def test_train_whose_evaluation_runs_out_of_memory_goes_on_and_exports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(engine: Engine, batches: Iterable[Batch]) -> float:
        # As in training: a group at a time, and not the whole batch.
        assert {len(batch["input_ids"]) for batch in batches} <= {1, 2}
        engine._player.drain()
        with engine.evaluation():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    settings = {"train.batch": 8, "train.groups": 4, "train.evaluate_every": 1}
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "evaluate", evaluate)
        assert main(command(tmp_path, settings)) == 0
    assert capsys.readouterr().out.count("not evaluated, since memory ran out") == 3
    assert [record["loss"] for record in metrics(tmp_path)]
    assert (tmp_path / "run" / "model").is_dir()

    other = tmp_path / "other"
    other.mkdir()
    assert main(command(other, settings)) == 0
    assert [record["loss"] for record in metrics(other) if "loss" in record] == [
        record["loss"] for record in metrics(tmp_path) if "loss" in record
    ]


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
