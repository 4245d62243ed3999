from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatier.config.data_section import DataConfig
from megatier.config.file import from_dict, load, load_saved, to_dict
from megatier.config.output_section import OutputConfig
from megatier.config.schema import CONFIG_SECTIONS, ModelConfig, RunConfig, TiersConfig
from megatier.config.section import field_docs
from megatier.config.text import dump
from megatier.config.values import MountBudget, parse_yaml
from megatier.errors import ConfigError

LEAST = ["--data.files=python-stdlib", "--data.tokenizer", "bytes", "--model.config.model_type", "llama"]
HUB = ["--data.files=", "--data.dataset=a"]
SAVES = ["--output.savepoint_every=9", "--tiers.nvme=/a", "--tiers.generations", "2"]

YAML = """
model:
  config: {model_type: llama, rms_norm_eps: 1e-6, rope: {theta: 10000}}
data:
  files: [a.txt, b.txt]
  tokenizer: bytes
tiers:
  ram: 24 MiB
  nvme: /a:3GiB, /b
train:
  learning_rate: 1e-3
  clip: null
output:
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    return path


def least(*overrides: str) -> RunConfig:
    return load(None, [*LEAST, *overrides])


def test_load_yaml_reads_each_kind_of_value(file: Path) -> None:
    config = load(file)
    assert config.model.config == {"model_type": "llama", "rms_norm_eps": 1e-6, "rope": {"theta": 10000}}
    assert config.data.files == ("a.txt", "b.txt")
    assert (config.tiers.ram, config.train.learning_rate, config.train.clip) == (24 << 20, 1e-3, None)
    assert config.tiers.mounts == (MountBudget(Path("/a"), 3 << 30), MountBudget(Path("/b"), None))


def test_load_override_wins_over_file(file: Path) -> None:
    config = load(
        file, ["--tiers.ram", "96GiB", "--train.clip=0.5", "--model.config.rope.theta", "5", "--data.files=c"]
    )
    assert (config.tiers.ram, config.train.clip, config.data.files) == (96 << 30, 0.5, ("c",))
    assert config.model.config == {"model_type": "llama", "rms_norm_eps": 1e-6, "rope": {"theta": 5}}


def test_load_quoted_text_in_model_config_stays_text(tmp_path: Path) -> None:
    config = {"model_type": "llama", "a": "1", "b": "null", "c": "true", "d": "2e-5", "e": {"f": "1"}, "g": 1}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": {"config": config}, "data": {"files": ["x"], "tokenizer": "bytes"}}))
    loaded = load(file)
    assert loaded.model.config == config
    assert from_dict(to_dict(loaded)) == loaded
    assert least("--model.config", json.dumps(config)).model.config == config
    assert least("--model.config.a='1'", "--model.config.b", "1").model.config == {
        "model_type": "llama",
        "a": "1",
        "b": 1,
    }


@pytest.mark.parametrize("text", ["3", "[llama]", "llama"])
def test_load_model_config_that_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"model: {{config: {text}}}\ndata: {{files: x, tokenizer: bytes}}\n")
    message = r"model\.config is .*; it must be keys with values, or null\. Hugging Face config"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=message):
        load(None, ["--data.files=x", "--data.tokenizer=bytes", "--model.config", text])


def test_load_path_over_config_needs_null(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"exactly one of model\.path .* and model\.config"):
        load(file, ["--model.path", "somewhere"])
    assert load(file, ["--model.path", "somewhere", "--model.config", "null"]).model.path == "somewhere"


def test_to_dict_written_and_loaded_is_equal(file: Path, tmp_path: Path) -> None:
    config = load(file)
    again = tmp_path / "again.yaml"
    again.write_text(dump(to_dict(config)))
    assert load(again) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("name", ["2e-5", "1e3", "1_0.5", "_1", ".5e+3", "1:30.5", "no", "a: b", "ünïcode"])
def test_dump_of_names_that_look_like_something_else_is_loaded_again(name: str, tmp_path: Path) -> None:
    config = load(None, ["--model.path=m", "--data.files=x"])
    output = dataclasses.replace(config.output, directory=name)
    data = dataclasses.replace(config.data, files=(name, "b"), tokenizer=name)
    config = dataclasses.replace(config, output=output, data=data)
    again = tmp_path / "again.yaml"
    again.write_text(dump(to_dict(config)), encoding="utf-8")
    assert load(again) == config


def test_load_budget_without_a_unit_is_refused_if_it_is_small_and_taken_from_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("{model: {path: m}, data: {files: x}, tiers: {ram: 64, nvme: ['/a:0']}}")
    with pytest.raises(ConfigError, match=r"tiers\.ram is 64, and a number without a unit is bytes"):
        load(path)
    assert load(path, ["--tiers.ram", "64B"]).tiers.ram == 64
    assert load(path, ["--tiers.ram=1048576"]).tiers.ram == 1 << 20
    assert load_saved(path).tiers.ram == 64
    with pytest.raises(ConfigError, match=r"tiers\.gpu is 40"):
        load_saved(path, ["--tiers.gpu", "40"])


def test_dump_of_any_text_is_read_again() -> None:
    draw = random.Random(7)
    letters = "0123456789eE+-._:,", "nulltrueyesNO~", "{}[]&*!|>%@#'\"\\:,- \n\t", "\x00\x7f\x85\xa0é\u2028\ufeff😀 "
    for _ in range(1000):
        text = "".join(draw.choices(draw.choice(letters), k=draw.randrange(8)))
        tree = {"a": text, "b": [text, "c"], "d": {text: {"e": text}}}
        assert parse_yaml(dump(tree)) == tree


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.config.a=["], r"model\.config\.a is no valid YAML"),
        (["--train.steps=!!timestamp x"], r"train\.steps is '!!timestamp x'; it must be a whole"),
        (["--train.stesp", "3"], r"unknown setting train\.stesp; did you mean train\.steps\?"),
        (["--train.lr", "3"], r"unknown setting train\.lr; did you mean train\.learning_rate\?"),
        (["--batch_size", "3"], r"unknown setting batch_size; did you mean train\.batch\?"),
        (["--data.max_length", "3"], r"unknown setting data\.max_length; did you mean data\.sequence_length\?"),
        (["--tiers.ram", "-5GiB"], r"tiers\.ram is '-5GiB'; it must be a size such as 96GiB"),
        (["--train.eps", "-1"], r"train\.eps is -1\.0; it must be above 0"),
        (["--learning_rate", "3"], r"unknown setting learning_rate; did you mean train\.learning_rate\?"),
        (["--model.batch=3"], r"unknown setting model\.batch; did you mean train\.batch\?"),
        (["--train.zqzqzqzqzqzqzq", "3"], r"unknown setting train\.zqzq\w+; known are train\.steps, "),
        (["--zzzzzz", "3"], r"unknown setting zzzzzz; known are model, data"),
        (["--train.st", "3"], r"unknown setting train\.st; did you mean"),
        (["--train", "3"], r"train is a section; set one of its keys, such as --train\.steps"),
        (["steps"], r"steps is no setting: settings are written --section\.key VALUE"),
        (["--train.steps"], r"train\.steps has no value\. Write it as --train\.steps VALUE"),
        (["--model.config.hidden_size"], r"model\.config\.hidden_size has no value"),
        (
            ["--train.steps", "many"],
            r"train\.steps is 'many'; it must be a whole .*\. Optimizer steps, at least 1\.",
        ),
        (["--train.steps", "1.5"], r"train\.steps is 1\.5; it must be a whole number below 2\*\*63"),
        (["--train.clip", "x"], r"train\.clip is 'x'; it must be a finite number, or null\."),
        (["--model.fused_loss", "x"], r"model\.fused_loss is 'x'; it must be true or false"),
        (["--model.compute_dtype", "fp16"], r"model\.compute_dtype is 'fp16'; it must be bf16 or fp32\."),
        (["--tiers.gpu", "5bananas"], r"tiers\.gpu is '5bananas'; it must be a size such as 96GiB"),
        (["--tiers.nvme", "null"], r"tiers\.nvme is null; it must be a list of text \(\[\] for none\)"),
        (["--tiers.nvme", "/a:x"], r"tiers\.nvme is '/a:x': 'x' is no byte size"),
        (["--tiers.nvme", "/a,/a:1G"], r"tiers\.nvme is .* without repeats"),
        (["--tiers.state", "gpu,disk"], r"tiers\.state is \['gpu', 'disk'\]; it must be one or more of gpu, ram, nvme"),
        (["--tiers.state", "gpu,gpu"], r"tiers\.state is"),
        (["--tiers.gpu_limit", "0"], r"tiers\.gpu_limit is 0; it must be at least 1 byte"),
        (["--tiers.ram", "64"], r"tiers\.ram is 64, and a number without a unit is bytes\. Write 64GiB, or 64B if"),
        (["--tiers.gpu=1e3"], r"tiers\.gpu is 1e3, and a number without a unit is bytes"),
        (["--tiers.nvme", "/a:1GiB,/b:500"], r"tiers\.nvme: the budget of /b:500 is 500, and a number without a unit"),
        (["--tiers.gpu_limit", "much"], r"tiers\.gpu_limit is 'much'; it must be a size such as"),
        (["--tiers.streamed_share", "1.1"], r"tiers\.streamed_share is 1\.1; it must be from 0 to 1"),
        (["--tiers.streamed_share", "-0.1"], r"tiers\.streamed_share is -0\.1; it must be from 0 to 1"),
        (["--tiers.generations", "4"], r"tiers\.generations is 4; it must be 1, 2 or 3"),
        (["--tiers.generations", "3"], r"tiers\.generations is 3; it must be 1 or 2 without output\.savepoint_every"),
        (["--output.savepoint_every", "-1"], r"output\.savepoint_every is -1; it must be at least 0"),
        (
            [*SAVES, "--tiers.generations", "1"],
            r"tiers\.generations is 1; it must be 2 or 3 with output\.savepoint_every",
        ),
        (
            [*SAVES, "--tiers.checksums", "false"],
            r"tiers\.checksums is False; it must be true with output\.savepoint_e",
        ),
        (
            [*SAVES, "--train.clip", "null", "--numerics.guard", "false"],
            r"numerics\.guard is False; it must be true, or",
        ),
        (["--model.saved_share", "2"], r"model\.saved_share is 2\.0; it must be from 0 to 1"),
        (["--model.saved_share", ".nan"], r"model\.saved_share is nan; it must be a finite number"),
        (["--model.tile_tokens", "0"], r"model\.tile_tokens is 0; it must be at least 1 token, or null"),
        (["--model.compile", "maybe"], r"model\.compile is 'maybe'; it must be true or false, or null\."),
        (["--tiers.io_threads", "0"], r"tiers\.io_threads is 0; it must be 1 to 256"),
        (["--train.steps", "0"], r"train\.steps is 0; it must be at least 1"),
        (["--train.seed", "-1"], r"train\.seed is -1; it must be at least 0"),
        (["--train.learning_rate", ".nan"], r"train\.learning_rate is nan"),
        (["--train.clip", "0"], r"train\.clip is 0\.0; it must be above 0, or null"),
        (["--train.stall_timeout", "-1"], r"train\.stall_timeout is -1\.0; it must be at least 0"),
        (["--numerics.max_skips", "-1"], r"numerics\.max_skips is -1; it must be at least 0"),
        (["--train.beta2", "1"], r"train\.beta2 is 1\.0; it must be from 0 to below 1"),
        (["--train.warmup_steps", "1000"], r"train\.warmup_steps is 1000; it must be below train\.steps 1000"),
        (
            ["--train.epochs=2", "--train.steps=5", "--train.warmup_steps=5"],
            r"train\.warmup_steps is 5; it must be below train\.steps 5",
        ),
        (["--train.warmup_ratio", "1"], r"train\.warmup_ratio is 1\.0; it must be from 0 to below 1"),
        (
            ["--train.warmup_ratio=0.1", "--train.warmup_steps=5"],
            r"train\.warmup_ratio is 0\.1; it must be 0 beside train\.warmup_steps",
        ),
        (["--train.early_stopping_patience=2"], r"train\.evaluate_every is 0; it must be at least 1 with train\.ear"),
        (["--output.load_best_model_at_end=true"], r"train\.evaluate_every is 0; it must be at least 1 with output\."),
        (
            ["--train.evaluate_every=1", "--train.early_stopping_patience=0"],
            r"train\.early_stopping_patience is 0; it must be at least 1, or null",
        ),
        (["--train.early_stopping_threshold=-1"], r"train\.early_stopping_threshold is -1\.0; it must be at least 0"),
        (["--train.early_stopping_threshold=1"], r"train\.early_stopping_threshold is 1\.0; it must be 0 without"),
        (["--train.decay_ratio", "0"], r"train\.decay_ratio is 0\.0; it must be above 0, and at most 1"),
        (["--train.groups", "3"], r"train\.batch is 8; it must be a multiple of groups \* slices \(3\)"),
        (["--data.holdout_fraction", "1"], r"data\.holdout_fraction is 1\.0"),
        (["--data.files", ""], r"data\.files is \[\]; it must be at least one"),
        (["--data.dataset=org/name"], r"data\.files is \['python-stdlib'\]; it must be empty if data\.dataset"),
        (["--data.files=", "--data.dataset="], r"data\.dataset is ''; it must be a name on the hub"),
        (["--data.streaming=true"], r"data\.streaming is True; it must be left out without data\.dataset"),
        (["--data.holdout_split=test"], r"data\.holdout_split is 'test'; it must be left out without data\.dataset"),
        ([*HUB, "--data.holdout_split=train"], r"data\.holdout_split is 'train'; it must be a split that shares"),
        ([*HUB, "--data.split=train + test", "--data.holdout_split=test"], r"data\.holdout_split is 'test'; it must"),
        ([*HUB, "--data.holdout_split=train[:1%]"], r"data\.holdout_split is 'train\[:1%\]'; it must be a split"),
        ([*HUB, "--data.split=train[:9]", "--data.holdout_split=train"], r"data\.holdout_split is 'train'; it must be"),
        ([*HUB, "--data.holdout_split= "], r"data\.holdout_split is ' '; it must be the name of a split, or null"),
        (
            ["--data.files=", "--data.dataset=a", "--data.streaming=true", "--data.max_bytes=1GiB"],
            r"data\.max_bytes is 1073741824; it must be null with data\.streaming",
        ),
        (
            ["--data.files=", "--data.dataset=a", "--data.streaming=true", "--data.max_samples=3"],
            r"data\.max_samples is 3; it must be null with data\.streaming",
        ),
        (["--data.max_samples=0"], r"data\.max_samples is 0; it must be at least 1, or null"),
        (["--data.window_rows", "0"], r"data\.window_rows is 0; it must be at least 1"),
        (["--data.holdout_rows", "-1"], r"data\.holdout_rows is -1; it must be at least 0"),
        (["--data.suffixes", "txt"], r"data\.suffixes is"),
        (["--data.tokenizer", "null"], r"data\.tokenizer is None; it must be a tokenizer such as \"bytes\""),
        (
            ["--data.chat", "openai"],
            r"data\.chat is 'openai'; it must be messages, sharegpt, alpaca or prompt_completion, or null\.",
        ),
        (["--data.chat=alpaca", "--model.attention=flash_attention_2"], r"model\.attention is .* sdpa, eager or flex"),
        (
            ["--data.chat=alpaca", "--model.attention=flex_attention", "--train.slices=2"],
            r"train\.slices is 2; it must be 1 with flex_attention",
        ),
        (
            ["--output.checkpoint_every", "often"],
            r"checkpoint_every is 'often'; it must be a whole .* or auto\. Steps",
        ),
        (["--output.checkpoint_every", "-1"], r"output\.checkpoint_every is -1; it must be auto or at least 0\."),
        (["--model.config", "{hidden_size: 3}"], r"model\.config is .* with a model_type"),
    ],
)
def test_load_bad_override_says_key_value_and_bound(overrides: list[str], message: str) -> None:
    without_type = [*LEAST[:3]] if overrides[0] == "--model.config" else LEAST
    with pytest.raises(ConfigError, match=message) as raised:
        load(None, [*without_type, *overrides])
    assert "\n" not in str(raised.value)


def test_load_comma_in_the_name_of_a_mount_is_refused_as_text_and_taken_in_a_list() -> None:
    with pytest.raises(ConfigError, match=r"tiers\.nvme is \['/mnt/a', 'b:5GiB'\]; .* comma goes into a list"):
        least("--tiers.nvme", "/mnt/a,b:5GiB")
    assert least("--tiers.nvme", '["/mnt/a,b:5GiB"]').tiers.mounts == (MountBudget(Path("/mnt/a,b"), 5 << 30),)


def test_field_docs_every_setting_has_one() -> None:
    for section in CONFIG_SECTIONS.values():
        assert set(field_docs(section)) == set(section.__dataclass_fields__)


def test_load_defaults_are_valid() -> None:
    assert least().train.steps == 1000


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("null", None)])
def test_load_compile_is_yes_no_or_left_to_the_device(text: str, value: bool | None) -> None:
    assert least("--model.compile", text).model.compile is value
    assert least().model.compile is None


def test_load_documents_are_apart_for_conversations_unless_told() -> None:
    assert not least().data.is_apart
    assert least("--data.cross_documents=false").data.is_apart
    assert least("--data.chat=alpaca").data.is_apart
    assert least("--data.files=a/dataset_info.json#mine").data.is_apart
    assert not least("--data.chat=alpaca", "--data.cross_documents=true").data.is_apart


@pytest.mark.parametrize(("split", "held_out"), [("train", "training"), ("train[9:]", "train[:9]"), ("a+b", "ab")])
def test_load_splits_that_are_apart_are_taken(split: str, held_out: str) -> None:
    assert least(*HUB, f"--data.split={split}", f"--data.holdout_split={held_out}").data.holdout_split == held_out


@pytest.mark.parametrize(("text", "every"), [(None, "auto"), ("auto", "auto"), ("0", 0), ("100", 100)])
def test_load_checkpoints_come_by_time_unless_told(text: str | None, every: object) -> None:
    words = [] if text is None else ["--output.checkpoint_every", text]
    output = least(*words).output
    assert (output.checkpoint_every, output.saves_by_time) == (every, every == "auto")
    assert not least(*words, "--output.savepoint_every", "5").output.saves_by_time


def test_load_past_ram_is_off_unless_asked_for() -> None:
    assert not least().tiers.gpu_direct
    assert least("--tiers.gpu_direct", "true").tiers.gpu_direct


@pytest.mark.parametrize("share", ["0", "1", "0.8"])
def test_load_shares_include_their_bounds(share: str) -> None:
    config = least("--model.saved_share", share, "--tiers.streamed_share", share, "--tiers.gpu_limit", "40GiB")
    assert config.model.saved_share == config.tiers.streamed_share == float(share)
    assert config.tiers.gpu_limit == 40 << 30


def test_sections_made_in_python_take_text_as_files_do() -> None:
    tiers = TiersConfig(gpu="8MiB", gpu_limit="1GiB", ram="500MB", chunk="24KiB", nvme="/mnt/a:1GiB", state="ram")  # type: ignore[arg-type]
    assert (tiers.gpu, tiers.gpu_limit, tiers.ram, tiers.chunk) == (8 << 20, 1 << 30, 500_000_000, 24576)
    assert (tiers.mounts, tiers.state) == ((MountBudget(Path("/mnt/a"), 1 << 30),), ("ram",))
    assert ModelConfig(path="here", frozen="lm_head").frozen == ("lm_head",)  # type: ignore[arg-type]
    assert DataConfig(files="texts").files == ("texts",)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tiers\.ram is 'much'; it must be a size such as 96GiB"):
        TiersConfig(ram="much")  # type: ignore[arg-type]


def test_load_quickstart_is_valid() -> None:
    example = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    assert load(example).data.files == ("python-stdlib",)


def test_import_config_loads_no_torch() -> None:
    code = "import sys, megatier.config.schema, megatier.hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_output_directory_that_is_no_utf8_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"output\.directory is .*a path in UTF-8"):
        OutputConfig(directory=os.fsdecode(b"runs/\xff"))
