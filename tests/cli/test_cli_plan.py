"""`megatier plan`: tables, JSON, picture, and refusals."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from megatier import hardware
from megatier.byte_counts import format_bytes
from megatier.cli import main
from megatier.config import file as config_file
from megatier.measure.probe import cache_rates
from megatier.planner.memory import CONTEXT_BYTES
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates import ASSUMED, RANK_RATES, Rates
from megatier.schedule.rates_file import as_dict, read_rates
from megatier.setup.machine import Machine
from megatier.train.shared_setup import plan_setup

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples/quickstart.yaml")
H200 = str(ROOT / "examples/machines/h200.yaml")
LONG = """
model:
  config: {model_type: llama, hidden_size: 4096, intermediate_size: 14336, num_attention_heads: 32,
    num_key_value_heads: 8, num_hidden_layers: 32, vocab_size: 128256, tie_word_embeddings: false}
  saved_share: 0.0
data: {files: [python-stdlib], tokenizer: bytes, sequence_length: 524288}
tiers: {state: [ram], gpu: 5GiB, ram: 116GiB}
train: {batch: 1}
"""
"""8B, one sequence of 524,288 tokens: row 8 of the benchmarks, once more doubled."""


def plan(*words: str) -> int:
    return main(["plan", QUICKSTART, "--machine", H200, *words])


def test_plan_prints_bytes_times_and_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan() == 0
    out = capsys.readouterr().out
    assert all(
        word in out for word in ("nvme", "compute", "tokens/s", "one change", "Bound by", "by sdpa (model.attention)")
    )
    assert "With output.checkpoint_every auto there is one about every 30 minutes." in " ".join(out.split())
    assert "NVMe: 4 I/O threads each way, the default; `megatier bench` finds the best number for these drives." in out
    assert "…" not in out, "80 columns cut a word"
    assert "exp_avg_sq" in out


def test_plan_of_the_example_of_100b_fits_its_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has been run there with so many bytes, in 72 to 79 s a step."""
    machine = str(ROOT / "examples/machines/h100-64-cores.yaml")
    output = tmp_path / "plan.json"
    assert main(["plan", str(ROOT / "examples/llama-100b.yaml"), "--machine", machine, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["num_parameters"] == found["num_trained"] == 100_648_443_904
    assert 65 < found["seconds"] < 80
    assert found["moved_bytes"]["nvme_to_ram"] < 60 << 30
    assert found["lent_room"]["weight_bytes"] >= 2 * found["num_parameters"]
    missing = format_bytes(-found["lent_room"]["left_bytes"])
    assert f"such as GRPO, would need {missing} more of GPU memory to hold all weights" in " ".join(
        capsys.readouterr().out.split()
    )
    assert found["export_bytes"] == 0


def test_plan_says_what_text_has_of_the_gpu_in_lent_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--output", str(tmp_path / "plan.json")) == 0
    room = json.loads((tmp_path / "plan.json").read_text())["lent_room"]
    assert room["weight_bytes"] + room["left_bytes"] == 150_700_000_000 - CONTEXT_BYTES
    left, weights = format_bytes(room["left_bytes"]), format_bytes(room["weight_bytes"])
    sizes = f"{left} of the GPU for keys and values, beside {weights} of weights"
    assert f"A loop that generates text in lent memory, such as GRPO, has {sizes}" in " ".join(
        capsys.readouterr().out.split()
    )


def test_plan_writes_json_and_a_picture(tmp_path: Path) -> None:
    assert plan("--output", str(tmp_path / "plan.json"), "--picture", str(tmp_path / "plan.svg")) == 0
    read = json.loads((tmp_path / "plan.json").read_text())
    assert read["seconds"] > 0
    assert ElementTree.parse(tmp_path / "plan.svg").getroot()[0].text == "quickstart.yaml, as planned"


def test_plan_of_a_loss_that_cannot_be_fused_counts_whole_logits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model.config.model_type=bert", "--model.config.is_decoder=true"]
    with pytest.warns(UserWarning, match="the output embedding of BertLMHeadModel is not a unit"):
        assert plan(*words) == 0
    found = capsys.readouterr().out
    assert plan(*words, "--model.fused_loss=false") == 0
    assert capsys.readouterr().out == found


def test_plan_documents_apart_say_what_the_mask_takes_and_what_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.sequence_length=4096", "--data.cross_documents=false", "--train.batch=4"]
    found = {}
    for attention in ("sdpa", "flex_attention"):
        output = tmp_path / attention
        assert plan(*words, f"--model.attention={attention}", "--output", str(output)) == 0
        found[attention] = json.loads(output.read_text())["mask_bytes"]
        out = " ".join(capsys.readouterr().out.split())
        assert ("With model.attention flex_attention masked blocks are skipped" in out) is bool(found[attention])
    assert found == {"sdpa": 64 << 20, "flex_attention": 0}


def test_plan_for_unified_memory_says_so_and_refuses_budgets_above_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = tmp_path / "gb10.json"
    output = tmp_path / "plan.json"
    rates = replace(read_rates(Path(H200)), gpu_bytes=64e9, unified_bytes=60e9)
    machine.write_text(json.dumps(as_dict(rates)))
    words = ["plan", QUICKSTART, "--machine", str(machine)]
    assert main([*words, "--output", str(output)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"GPU memory and RAM are one memory of {format_bytes(60_000_000_000)}: tiers.gpu and tiers.ram take 26.0 MiB"
        in said
    )
    assert "Weights in ram are there twice while they are in a GPU slot" in said
    assert "a quarter more" not in said
    made = json.loads(output.read_text())
    assert made["unified_bytes"] == 60e9
    room = made["lent_room"]
    left = 60_000_000_000 - made["budget_bytes"]["ram"] - room["weight_bytes"] - room["state_bytes"] - CONTEXT_BYTES
    assert made["lent_room"]["left_bytes"] == left

    assert main([*words, "--tiers.gpu", "40GB", "--tiers.ram", "30GB"]) != 0
    assert "but GPU memory and RAM are one memory of" in capsys.readouterr().err


def test_plan_override_changes_the_plan(tmp_path: Path) -> None:
    assert (
        plan("--output", str(tmp_path / "a.json"))
        == plan("--output", str(tmp_path / "b.json"), "--tiers.ram", "1GiB")
        == 0
    )
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert "nvme" in first["homes"].values()
    assert "nvme" not in second["homes"].values()


def test_plan_names_the_bytes_of_gradients_that_ram_does_not_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for groups in (1, 2):
        words = ["--tiers.ram", "4MiB", "--train.groups", str(groups), "--output", str(tmp_path / "plan.json")]
        assert plan(*words) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert ("Sums of groups of" if groups > 1 else "Gradients of") in out
        assert "lie on NVMe, because RAM is too short for them" in out
        assert ("train.groups 1" if groups > 1 else "train.clip null") in out
        found.append(json.loads((tmp_path / "plan.json").read_text())["spilled_gradient_bytes"])
    assert 0 < found[0] < found[1]


def test_plan_of_what_the_drive_cannot_keep_is_refused_as_the_run_would_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [QUICKSTART, "--tiers.device=cpu", "--output.keep_checkpoints=1000000000000"]
    directory = f"--output.directory={tmp_path / 'not' / 'there'}"
    assert main(["plan", *words, directory, "--output.checkpoint_every=1", "--json"]) == 2
    said = capsys.readouterr()
    assert f"there is no room for 1000000000001 checkpoints in {tmp_path}/not/there/checkpoints" in said.err
    assert said.out == ""
    assert plan("--output.keep_checkpoints=1000000000000", directory, "--output.checkpoint_every=1") == 0
    assert "1000000000000 checkpoints, then one more or the export" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tiers.ram", "1MiB"], "Raise tiers.ram to at least"),
        (["--tiers.gpu", "null"], "set tiers.gpu, such as --tiers.gpu 60GiB, or add --search"),
        (["--tiers.ram", "null"], "a plan for another machine needs its budget of RAM"),
        (["--tiers.rom", "1MiB"], "tiers.rom"),
        (["--output", "/nowhere/plan.json"], "cannot write /nowhere/plan.json"),
    ],
)
def test_plan_bad_input_is_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*words) == 2
    assert message in capsys.readouterr().err


def test_plan_of_a_machine_that_was_not_measured_is_that_of_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "ram_available_bytes", lambda root=None: 64 << 30)
    words = [QUICKSTART, f"--tiers.nvme={tmp_path}:64MiB", "--tiers.gpu=null", "--tiers.device=cpu"]
    assert main(["plan", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    loaded, given = config_file.load_given(Path(words[0]), words[1:])
    setup, _, prediction = plan_setup(loaded, given, Machine.here(loaded.tiers), None, Console(quiet=True))
    settled = {"model.attention": "sdpa", "model.compile": False}
    assert (setup.config, prediction) == (loaded.changed(settled), None)
    assert document["chosen"] == {}
    assert document["budget_bytes"]["gpu"] == hardware.default_budgets("cpu").gpu_bytes
    assert document["assumed_rates"].keys() == {field.name for field in fields(Rates)} - {
        "gpu_bytes",
        "compute_capability",
        "unified_bytes",
        "locked_bytes",
        "ring_to_gpu_bytes_per_s",
        "ring_to_ram_bytes_per_s",
        "fp8_flops_per_s",
        *RANK_RATES,
    }
    assert document["assumed_rates"]["drives"][0]["mixed_bytes_per_s"] == 2e9
    assert document["seconds"] > 0

    assert main(["plan", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "This machine was not measured, so the times are rough, and no settings are chosen" in out
    assert f"each drive 2 GB/s. Run `megatier bench --nvme {tmp_path}:64MiB` to measure them." in out
    assert "chosen: " not in out
    assert main(["plan", *words, "--search"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "chosen: --train.groups" in out
    assert "so the times are rough, and so is the choice" in out


def test_plan_with_a_drive_that_was_not_measured_assumes_the_drive_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache_rates(replace(read_rates(Path(H200)), drives=(), gpu_bytes=None), "cpu")
    words = [QUICKSTART, "--tiers.ram=1GiB", "--tiers.device=cpu"]
    assert main(["plan", *words, f"--tiers.nvme={tmp_path}:64MiB"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "These drives were not measured" in out
    assert "Assumed: each drive 2 GB/s." in out
    assert main(["plan", *words, "--tiers.nvme=[]"]) == 0
    assert "Assumed" not in capsys.readouterr().out


def test_plan_of_this_machine_is_that_of_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "ram_available_bytes", lambda root=None: 64 << 30)
    (tmp_path / "drive").mkdir()
    drive = DriveRates(
        directory=str(tmp_path / "drive"),
        read_bytes_per_s=3e9,
        write_bytes_per_s=2e9,
        mixed_bytes_per_s=2.5e9,
        io_threads=8,
        first_write_bytes_per_s=None,
        mixed_low_bytes_per_s=2e9,
        mixed_high_bytes_per_s=3e9,
    )
    cache_rates(replace(read_rates(Path(H200)), drives=(drive,), gpu_bytes=None), "cpu")
    config_path = tmp_path / "run.yaml"
    lines = Path(QUICKSTART).read_text().splitlines()
    config_path.write_text("\n".join(line for line in lines if "gpu: 9MiB" not in line and "ram: 17MiB" not in line))
    words = [str(config_path), f"--tiers.nvme={drive.directory}:1GiB", "--tiers.device=cpu"]
    assert main(["plan", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    loaded, given = config_file.load_given(Path(words[0]), words[1:])
    setup, _, prediction = plan_setup(loaded, given, Machine.here(loaded.tiers), None, Console(quiet=True))
    config = setup.config
    assert prediction is not None
    assert document["seconds"] == prediction.forecast.seconds
    assert document["budget_bytes"]["gpu"] == document["chosen"]["tiers.gpu"] == config.tiers.gpu
    assert document["chosen"]["train.groups"] == config.train.groups
    assert document["budget_bytes"]["ram"] == hardware.default_budgets("cpu").ram_bytes
    assert document["io_threads"] == 8
    assert main(["plan", *words]) == 0
    assert "chosen: --train.groups" in capsys.readouterr().out


def test_plan_with_a_drive_that_wavers_gives_a_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = tmp_path / "machine.json"
    slow = DriveRates(directory="a", read_bytes_per_s=3e6, write_bytes_per_s=2e6, mixed_bytes_per_s=2.5e6)
    found = {}
    for name, drive in {
        "median": slow,
        "wavers": replace(slow, mixed_low_bytes_per_s=2e6, mixed_high_bytes_per_s=3e6),
        "low": slow.times(0.8),
        "high": slow.times(1.2),
    }.items():
        machine.write_text(json.dumps(as_dict(replace(read_rates(Path(H200)), drives=(drive,)))))
        assert main(["plan", QUICKSTART, "--machine", str(machine), "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    spans = {name: (plan["seconds_low"], plan["seconds"], plan["seconds_high"]) for name, plan in found.items()}
    assert spans["median"] == (found["median"]["seconds"],) * 3
    assert spans["wavers"] == pytest.approx([spans[name][1] for name in ("high", "median", "low")])
    assert spans["wavers"][0] < spans["wavers"][1] < spans["wavers"][2]
    machine.write_text(
        json.dumps(as_dict(replace(read_rates(Path(H200)), drives=(replace(slow, mixed_low_bytes_per_s=2e6),))))
    )
    assert main(["plan", QUICKSTART, "--machine", str(machine)]) == 0
    assert "as the drives waver" in " ".join(capsys.readouterr().out.split())


def test_plan_search_prints_settings_and_plans_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "long.yaml"
    config.write_text(LONG.replace("  saved_share: 0.0\n", "").replace("gpu: 5GiB, ", ""))
    words = ["--machine", H200, "--data.sequence_length", "1024", "--train.batch", "16", "--search"]
    assert main(["plan", str(config), *words, "--output", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert "chosen: --train.groups 1 --train.slices 1 --train.activations keep --model.saved_share 0.8" in out
    assert json.loads((tmp_path / "plan.json").read_text())["seconds"] < 1.7  # 1.62 were measured
    assert main(["plan", str(config), *words, "--tiers.streamed_share=0.4", "--train.groups", "2"]) == 0
    chosen = capsys.readouterr().out.splitlines()[0]
    assert chosen.startswith("chosen: --train.slices")
    assert "streamed_share" not in chosen


def test_plan_machine_that_is_no_file_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", QUICKSTART, "--machine", "/nowhere.yaml"]) == 2
    assert "cannot read /nowhere.yaml: No such file or directory." in capsys.readouterr().err


def test_plan_activations_beyond_the_gpu_are_refused_with_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "long.yaml"
    config.write_text(LONG)
    assert main(["plan", str(config), "--machine", H200]) == 2
    message = capsys.readouterr().err
    assert "GPU memory for activations, next to 4.9 GiB" in message
    assert "needs 355.7 GiB, there is 135.5 GiB" in message
    assert "train.kept_attention false" in message
    words = ["plan", str(config), "--machine", H200, "--train.kept_attention", "false"]
    assert main(words) == 2
    assert "needs 243.2 GiB, there is 135.5 GiB" in capsys.readouterr().err
    assert main([*words, "--data.sequence_length", "262144"]) == 0


def test_plan_of_ranks_names_them_and_what_is_assumed_of_their_links(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "4", "--hosts", "2"]
    assert plan(*words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "4 ranks share the state. The figures are those of one rank, which has a GPU and one part in 2" in out
    assert "│ ranks │" in out
    assert "Assumed: a GPU gathers 25 GB/s from the others of its host" in out
    assert "it receives 12.5 GB/s from other hosts" in out

    assert plan(*words, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["ranks"], document["hosts"]) == (4, 2)
    assert document["assumed_rates"] == ASSUMED
    assert document["moved_bytes"]["ranks"] > 0
    assert plan("--json") == 0
    of_one = json.loads(capsys.readouterr().out)
    assert (of_one["ranks"], of_one["assumed_rates"]) == (1, {})
    assert [size // 2 for size in list(of_one["budget_bytes"].values())[1:]] == list(document["budget_bytes"].values())[
        1:
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "2", "--train.groups", "1"], "1, which 2 ranks cannot share equally. Start 1 of them"),
        (["--ranks", "4", "--train.groups", "2"], "Start 1, 2 of them, or set train.groups to a multiple of 4"),
        (["--ranks", "3", "--hosts", "2"], "give a number of ranks that so many hosts share equally"),
        (["--ranks", "0"], "give a number of ranks"),
        (["--ranks", "2", "--tiers.ram", "256KiB", "--tiers.nvme", "[]"], "there is 256.0 KiB. Raise tiers.ram"),
    ],
)
def test_plan_of_ranks_that_cannot_run_is_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*words) == 2
    assert message in capsys.readouterr().err
