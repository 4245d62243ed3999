"""The examples in Python run as they stand, and the losses of their loops fall."""

from __future__ import annotations

import importlib.util
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_config
from tiny_processors import chats, model_folder
from tiny_runs import plain_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from megatier import cli
from megatier.data.tokenizer import byte_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.filterwarnings("default")  # of the other libraries


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with a tiny model and its tokenizer."""
    plain_model(tiny_config("llama", vocab_size=320)).save_pretrained(tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def example(name: str) -> Callable[..., Any]:
    main: Callable[..., Any] = runpy.run_path(str(EXAMPLES / name), run_name="example")["main"]
    return main


def records(path: Path, *keys: str) -> str:
    path.write_text("\n".join(json.dumps({key: f"{key} {number}" for key in keys}) for number in range(16)))
    return str(path)


def test_accelerate_loop_trains_and_writes_a_model(model: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "a.txt").write_text("all work and no play " * 200)
    losses = example("accelerate_loop.py")(model, str(tmp_path / "a.txt"), str(tmp_path / "out"), steps=6)
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_accelerate_loop_with_an_odd_number_of_batches_takes_steps_over_epochs(model: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "a.txt").write_text("x" * 64 * 12)
    losses = example("accelerate_loop.py")(model, str(tmp_path / "a.txt"), str(tmp_path / "out"), steps=4)
    assert len(losses) == 4
    (tmp_path / "a.txt").write_text("x" * 64 * 3)
    with pytest.raises(SystemExit, match="makes 3 rows of 64 tokens"):
        example("accelerate_loop.py")(model, str(tmp_path / "a.txt"), str(tmp_path / "out2"))


def test_pictures_are_what_the_example_of_images_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    monkeypatch.chdir(tmp_path)
    example("pictures.py")("runs/pictures")
    steps = ["--train.steps=4", "--train.warmup_steps=1", "--train.batch=4", "--train.evaluate_batches=1"]
    assert cli.main(["train", str(EXAMPLES / "images.yaml"), *steps]) == 0
    records = [json.loads(line) for line in Path("runs/images/metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0]
    model = AutoModelForImageTextToText.from_pretrained("runs/images/model")

    # A question ends as the turns did that the model learnt from, and an answer ends where they did.
    processor = AutoProcessor.from_pretrained("runs/images/model")
    turns = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("user", "?"), ("assistant", "!"))
    ]
    asked = processor.apply_chat_template(turns[:1], add_generation_prompt=True)
    assert processor.apply_chat_template(turns) == f"{asked}!{processor.tokenizer.eos_token}"
    assert model.generation_config.eos_token_id == processor.tokenizer.eos_token_id


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_trainer_with_images_learns_and_writes_model_and_processor(family: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("PIL")
    model = model_folder(family, tmp_path / "model")
    path = chats(tmp_path / "data", (1, 2, 1, 0, 1, 1, 0, 2))
    out = str(tmp_path / "out")
    losses = example("trainer_images.py")(str(model), str(path), out, learning_rate=1e-2, max_steps=4)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    AutoModelForImageTextToText.from_pretrained(out)
    AutoProcessor.from_pretrained(out)


def test_activation_cache_reads_each_entry_once_and_the_last_one_from_ram(tmp_path: Path) -> None:
    assert example("activation_cache.py")(str(tmp_path)) == (64 << 20, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["accelerate_loop.py", "trainer_images.py", "trl_sft.py", "trl_dpo.py", "recipes/grpo.py"]
)
def test_example_without_its_arguments_says_so_before_its_imports(name: str) -> None:
    code = f"import runpy, sys; sys.argv[1:] = ['model']; runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')"
    ended = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "the following arguments are required" in ended.stderr


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize(
    ("name", "keys"), [("trl_sft.py", ("prompt", "completion")), ("trl_dpo.py", ("prompt", "chosen", "rejected"))]
)
def test_trl_example_trains_and_writes_a_model(name: str, keys: tuple[str, ...], model: str, tmp_path: Path) -> None:
    loss = example(name)(model, records(tmp_path / "a.jsonl", *keys), str(tmp_path / "out"), max_steps=2)
    assert 0 < loss < 20
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_grpo_example_learns_what_is_rewarded_and_writes_a_model(tmp_path: Path) -> None:
    first, last = example("trl_grpo.py")(str(tmp_path / "out"), steps=15)
    assert last > 1.5 * first
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
