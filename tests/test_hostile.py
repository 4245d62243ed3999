"""Model folders from strangers: every file harmed in every way is read, or refused by one message that names it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from small_commands import MODEL
from transformers import AutoConfig, AutoModelForCausalLM

from megatier import foreign
from megatier.cli import main
from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig
from megatier.data import tokenizer as tokenizers
from megatier.data.tokenizer import byte_tokenizer, load_tokenizer
from megatier.errors import ConfigError, DataError, MegatierError, UnsupportedModelError
from megatier.models import limits
from megatier.models.decoder import build_skeleton
from megatier.models.location import resolve
from megatier.models.weights import SafetensorsFolder
from megatier.setup.skeleton import read_model_config

SECONDS = 60
"""No file may keep a reader busy for that long, on a busy machine."""


ROOM = 1 << 30
"""Bytes of address space that a reader may add."""


MESSAGE_CHARACTERS_MAX = 3000


class TooSlow(BaseException):
    """A reader did not come back. No Exception, so that no reader catches it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with every file that a folder may have, its weights in one file."""
    folder = tmp_path_factory.mktemp("hostile") / "model"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**MODEL, "num_hidden_layers": 1}))
    model.generation_config.max_length = 77
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(str(tokenizer.chat_template))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (folder / "added_tokens.json").write_text(json.dumps({"<|endoftext|>": 256}))
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy to harm."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def sharded(model: Path) -> None:
    """The same weights with an index."""
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    names = json.loads((model / "model-00001-of-00001.safetensors").read_bytes()[8:].partition(b"}}")[0] + b"}}")
    weight_map = {name: "model-00001-of-00001.safetensors" for name in names if name != "__metadata__"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read(folder: Path) -> None:
    """All that a run reads of a model's folder before it plans."""
    skeleton = build_skeleton(read_model_config(ModelConfig(path=str(folder)), folder), "sdpa")
    SafetensorsFolder(folder, skeleton)
    load_tokenizer(RunConfig(model=ModelConfig(path=str(folder)), data=DataConfig(files=("x",))))


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Limited time and memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    handler = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)


def refused(folder: Path, name: str) -> str:
    """The message, which names the file."""
    with bounded(), pytest.raises(MegatierError) as caught:
        read(folder)
    message = str(caught.value)
    assert name in message, message
    assert str(folder) in message, message
    assert len(message) < MESSAGE_CHARACTERS_MAX
    assert message.isprintable()
    return message


def read_or_refused(folder: Path, name: str) -> None:
    """Some harm does not matter: a number that is a little different, a key that nobody asks for."""
    with bounded():
        try:
            read(folder)
        except MegatierError as error:
            assert str(folder) in str(error) or name == "config.json", error
            assert len(str(error)) < MESSAGE_CHARACTERS_MAX


# ---------------------------------------------------------------------- whatever the file


JSON = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "model.safetensors.index.json",
)


OTHERS = ("model.safetensors", "chat_template.jinja")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 4)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def huge(path: Path) -> None:
    """Sparse, so that it is no load for the disk."""
    os.truncate(path, 1 << 40)


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


BYTES = (empty, binary, truncated, huge)


PLACES = (link_to_itself, folder_instead, pipe_instead)


def prepared(model: Path, name: str) -> Path:
    if name == "model.safetensors.index.json":
        sharded(model)
    return model / name


@pytest.mark.parametrize("harm", [*BYTES, *PLACES])
@pytest.mark.parametrize("name", [*JSON, *OTHERS])
def test_harmed_file_is_refused_by_name(name: str, harm: Callable[[Path], None], model: Path) -> None:
    harm(prepared(model, name))
    if name == "chat_template.jinja" and harm in (empty, truncated):
        read_or_refused(model, name)  # still a text, and what it says is asked for by conversations alone
    elif name == "model.safetensors" and harm is huge:
        read(model)  # bytes behind the last tensor are nobody's
    else:
        refused(model, name)


# ---------------------------------------------------------------------- JSON


ROOTS = ("[]", "[1, 2]", "7", '"text"', "null", "true", "NaN", "-Infinity")


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("name", JSON)
def test_json_of_another_kind_is_refused_by_name(name: str, root: str, model: Path) -> None:
    prepared(model, name).write_text(root)
    message = refused(model, name)
    assert "holds no JSON object" in message


def nested(opening: str, closing: str, depth: int) -> Callable[[str], str]:
    return lambda text: '{"deep": ' + opening * depth + "1" + closing * depth + "," + text.lstrip()[1:]


def long_text(text: str) -> str:
    return '{"long": "' + "x" * 5_000_000 + '",' + text.lstrip()[1:]


def many_lists(text: str) -> str:
    return '{"many": [' + "[]," * 3_000_000 + "[]]," + text.lstrip()[1:]


def twice(text: str) -> str:
    tree = json.loads(text)
    return "{" + ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in [*tree.items()] * 2) + "}"


TEXTS = {
    "lists 40,000 deep": (nested("[", "]", 40_000), "no valid JSON: maximum recursion depth"),
    "lists 500 deep": (nested("[", "]", 500), "lists or objects more than 50 deep"),
    "objects 500 deep": (nested('{"a":', "}", 500), "lists or objects more than 50 deep"),
    "cut list": (lambda text: text[:-2], "no valid JSON"),
    "a number of 9,999 digits": (
        lambda text: '{"n": ' + "9" * 9999 + "," + text.lstrip()[1:],
        "no valid JSON: Exceeds the limit",
    ),
    "three million lists": (many_lists, "lists and objects|more than 4.0 MiB"),
    "keys twice": (twice, "no valid JSON: a key comes twice"),
    "lone quote": (lambda text: text + '"', "no valid JSON"),
}


@pytest.mark.parametrize("harm", TEXTS)
@pytest.mark.parametrize("name", JSON)
def test_json_that_no_parser_should_see_is_refused_by_name(name: str, harm: str, model: Path) -> None:
    path, (change, message) = prepared(model, name), TEXTS[harm]
    path.write_text(change(path.read_text()))
    found = refused(model, name)
    assert any(part in found for part in message.split("|")), found


@pytest.mark.parametrize("name", JSON)
def test_json_with_a_long_text_is_read_or_refused(name: str, model: Path) -> None:
    path = prepared(model, name)
    path.write_text(long_text(path.read_text()))
    read_or_refused(model, name)


VALUES: dict[str, Any] = {
    "nothing": None,
    "list": [1, [2]],
    "object": {"a": {"b": 1}},
    "text": "\x1b[2Jtext\n",
    "number": -1,
    "huge number": 10**18,
    "beyond floats": 10**400,
    "fraction": 0.5,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "truth": True,
}


def every_field(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to values, but of one list no more than its first, and of a vocabulary no more than its first word."""
    if path:
        yield path
    if isinstance(tree, dict):
        for key in list(tree)[: 1 if len(tree) > 50 else None]:
            yield from every_field(tree[key], (*path, key))
    elif isinstance(tree, list) and tree:
        yield from every_field(tree[0], (*path, 0))


def try_fields(model: Path, name: str, kinds: Callable[[int], Sequence[str]]) -> None:
    """Give every field some kinds, by its number."""
    path = prepared(model, name)
    text = path.read_text()
    for number, keys in enumerate(every_field(json.loads(text))):
        for kind in kinds(number):
            tree = json.loads(text)
            parent = tree
            for key in keys[:-1]:
                parent = parent[key]
            parent[keys[-1]] = VALUES[kind]
            path.write_text(json.dumps(tree))
            try:
                read_or_refused(model, name)
            except BaseException as error:
                error.add_note(f"{name}: {keys} is {kind}")
                raise


@pytest.mark.parametrize("name", JSON)
def test_json_with_a_field_of_a_wrong_kind_is_read_or_refused(name: str, model: Path) -> None:
    kinds = list(VALUES)
    try_fields(model, name, lambda number: [kinds[number % len(kinds)]])


@pytest.mark.slow
@pytest.mark.parametrize("name", JSON)
def test_json_with_a_field_of_any_kind_is_read_or_refused(name: str, model: Path) -> None:
    try_fields(model, name, lambda _: list(VALUES))


# ---------------------------------------------------------------------- sizes that a config asks for


def settings(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("count", [5000, 10**9, 10**30, 1e9, float("inf")])
def test_config_with_more_layers_than_any_model_is_refused(count: float, model: Path) -> None:
    settings(model, num_hidden_layers=count)
    assert "config.json: num_hidden_layers is above 4096" in refused(model, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": {"num_hidden_layers": 10**9}},
        {"model_type": "gpt2", "n_layer": 10**9},
        {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 10**9]]},
        {"model_type": "deepseek_v3", "first_k_dense_replace": 10**9},
        {"vision_config": {"depths": [2, 10**9]}},
    ],
    ids=lambda changes: next(iter(changes.values())),
)
def test_config_that_counts_under_another_name_is_refused(changes: dict[str, Any], model: Path) -> None:
    settings(model, **changes)
    assert "is above 4096" in refused(model, "config.json")


def test_settings_with_more_layers_than_any_model_are_refused() -> None:
    given = ModelConfig(config={"model_type": "llama", "num_hidden_layers": 10**9})
    with bounded(), pytest.raises(UnsupportedModelError, match=r"model\.config: num_hidden_layers is above 4096"):
        read_model_config(given, None)


def test_model_with_more_modules_than_any_is_refused_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MODULES_MAX", 500)
    config = AutoConfig.for_model(**{**MODEL, "num_hidden_layers": 4000})
    with bounded(), pytest.raises(UnsupportedModelError, match="more than 500 modules"):
        build_skeleton(config, "sdpa")


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_key_value_heads"])
@pytest.mark.parametrize("size", [2**40, 2**62, 10**30])
def test_config_of_a_size_that_no_drive_holds_is_refused(key: str, size: int, model: Path) -> None:
    settings(model, **{key: size})
    with bounded(), pytest.raises(UnsupportedModelError):
        read(model)


def test_config_whose_masks_would_fill_ram_is_refused() -> None:
    sizes = {"hidden_size": 32, "num_heads": 2, "vocab_size": 300, "num_layers": 2}
    attention = [[["global", "local"], 1]]
    config = AutoConfig.for_model("gpt_neo", **sizes, max_position_embeddings=1 << 20, attention_types=attention)
    with bounded(), pytest.raises(UnsupportedModelError, match=r"buffers take more than 1\.0 GiB"):
        build_skeleton(config, "sdpa")


def test_hooks_that_count_are_gone_after_building() -> None:
    from torch.nn.modules import module

    build_skeleton(AutoConfig.for_model(**MODEL), "sdpa")
    assert not module._global_module_registration_hooks
    assert not module._global_parameter_registration_hooks
    assert not module._global_buffer_registration_hooks


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize("file_name", ["x" * 300, "x" * 100_000, "\0", "a\x1b[2Jb", "..", "a/b"])
def test_index_with_a_name_that_is_no_file_is_refused(file_name: str, model: Path) -> None:
    path = prepared(model, "model.safetensors.index.json")
    path.write_text(json.dumps({"weight_map": {"lm_head.weight": file_name}}))
    assert "is no file in this folder" in refused(model, "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["x" * 300, "x" * 100_000, "a\nb", "\x1b[2J"])
def test_model_of_a_name_that_is_no_path_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no such model folder"):
        resolve(f"./{name}")
    with pytest.raises(DataError, match="no tokenizer at"):
        load_tokenizer(RunConfig(model=ModelConfig(config=MODEL), data=DataConfig(files=("x",), tokenizer=f"./{name}")))


def test_tensor_of_a_name_that_moves_the_cursor_is_printed_harmless(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = (model / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["\x1b[2J\n" + "y" * 10_000] = header.pop("lm_head.weight")
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    words = [f"--model.path={model}", f"--data.files={model}/config.json", f"--output.directory={tmp_path}/run"]
    assert main(["train", *words, "--tiers.device=cpu", "--tiers.gpu=4MiB", "--tiers.ram=16MiB"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert len(line) < 5000


def test_tokenizer_as_large_as_the_largest_known_is_within_the_limits() -> None:
    """Of the shape of Gemma's: half a million merges as pairs."""
    vocab = ", ".join(f'"{n}": {n}' for n in range(262_144))
    merges = ", ".join(['["left", "right"]'] * 514_906)
    tree = foreign.parse_json(f'{{"vocab": {{{vocab}}}, "merges": [{merges}]}}'.encode(), "tokenizer.json", DataError)
    assert (len(tree["vocab"]), len(tree["merges"])) == (262_144, 514_906)


def test_chat_template_of_the_settings_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.touch()
    os.truncate(path, 1 << 40)
    data = DataConfig(files=("x",), tokenizer="bytes", chat_template=str(path))
    with bounded(), pytest.raises(DataError, match=r"template\.jinja has more than 4\.0 MiB"):
        load_tokenizer(RunConfig(model=ModelConfig(config=MODEL), data=data))


def test_small_files_are_among_those_that_are_looked_at() -> None:
    assert set(tokenizers.SMALL) <= {*tokenizers.OBJECTS, *tokenizers.TABLE_FILES, *tokenizers.TEXTS}
