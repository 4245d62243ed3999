"""Reads a config: a YAML file, with dotted overrides laid over it, and messages that say what is wrong with them."""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import textwrap
from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentParser, get_loader
from jsonargparse.typing import register_type

from megatier.config.overrides import NESTED, joined, settings_of, take_nested
from megatier.config.schema import SECTIONS, RunConfig
from megatier.config.values import ByteCount, number, parse_bytes, parse_list, read_yaml, require, require_unit
from megatier.errors import ConfigError
from megatier.foreign import shown

DIGITS_MAX = 100
"""Digits of a whole number on the command line that nobody writes."""
OTHER_TRAINERS = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "model_name_or_path", "finetuning_type"}
)
"""Keys by which the config of DeepSpeed or LLaMA-Factory is known. MegaTrain's has sections as ours has."""
ELSEWHERE = {
    "lr": "train.learning_rate",
    "lr_scheduler_type": "train.schedule",
    "batch_size": "train.batch",
    "train_batch_size": "train.batch",
    "per_device_train_batch_size": "train.batch",
    "gradient_accumulation_steps": "train.groups",
    "micro_batch": "train.groups",
    "micro_batch_size": "train.groups",
    "train_micro_batch_size_per_gpu": "train.groups",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "max_grad_norm": "train.clip",
    "warmup_ratio": "train.warmup_steps",
    "gradient_checkpointing": "train.activations",
    "max_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "cutoff_len": "data.sequence_length",
    "model_name_or_path": "model.path",
    "attn_implementation": "model.attention",
    "dtype": "model.compute_dtype",
    "bf16": "model.compute_dtype",
    "fp16": "model.compute_dtype",
    "template": "data.chat_template",
    "output_dir": "output.directory",
    "save_steps": "output.checkpoint_every",
    "save_total_limit": "output.keep_checkpoints",
    "eval_steps": "train.evaluate_every",
}
"""Settings by the names that other trainers give them, for suggestions."""


def load(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, lay overrides over it, check everything.

    Args:
        path: YAML file with the sections of `RunConfig`; None: overrides alone.
        overrides: command-line words, "--section.key value" or "--section.key=value"; also keys inside `model.config`.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong; names the key, the value and what is allowed.
    """
    return load_given(path, overrides)[0]


def load_given(
    path: Path | None, overrides: Sequence[str] = (), *, is_saved: bool = False
) -> tuple[RunConfig, frozenset[str]]:
    """Return the config, and the dotted names of the settings that the file and the overrides give (`given_in`).

    The file is read once: it may be a pipe, or be written meanwhile.

    Args:
        path: as for `load`.
        overrides: as for `load`.
        is_saved: whether a run wrote the file, as for `load_saved`.

    Raises:
        ConfigError: as `load`.
    """
    tree = {} if path is None else _read_sections(path)

    # A run writes numbers of bytes without a unit, also those of small models.
    written = {} if is_saved else tree.get("tiers", {})
    check_units(written, overrides)

    # Asked first, because overrides are laid over the tree below.
    given = given_in(tree, overrides)
    return _parsed(tree, overrides), given


def load_saved(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the config that a run wrote into its directory, where sizes are numbers of bytes, however small.

    Raises:
        ConfigError: as `load`.
    """
    return load_given(path, overrides, is_saved=True)[0]


def from_dict(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config of sections such as `to_dict` gives, with overrides laid over them.

    Raises:
        ConfigError: as `load`.
    """
    return _parsed(_sections(copy.deepcopy(tree), "the stored config"), overrides)


def _parsed(tree: dict[str, dict[str, Any]], overrides: Sequence[str]) -> RunConfig:
    """Return the config of a tree of sections, with overrides laid over it."""
    # Overrides go into the tree one after the other, so the last one of a setting wins, and each wins over the file.
    _check_text(overrides)
    words = joined(take_nested(overrides, tree))
    _check_known(_options(words))

    # What is nested goes past the parser, which would take quoted "1" and "null" in it for 1 and null.
    nested = {key: tree.setdefault("model", {}).pop(key, None) for key in NESTED}
    for key, value in nested.items():
        if not isinstance(value, dict | None):
            raise ConfigError(_refusal("model", key, f"is {shown(repr(value))}"))

    # The parser converts whole numbers that are too large for a float, and does not say where they stand.
    for section, keys in tree.items():
        for key, value in keys.items():
            if type(value) is int:
                number(f"{section}.{key}", value, whole=True)
    for name, text in settings_of(words):
        is_short = len(text) < DIGITS_MAX or not text.lstrip("+-").isdigit()
        require(is_short, name, text, "a number of fewer digits")

    # The parser raises errors that are not its own for a word such as "!!timestamp x", and for an int too large for a
    # float.
    try:
        values = _parser().parse_args(words, namespace=_parser().parse_object(tree)).as_dict()
    except (ArgumentError, AttributeError, OverflowError) as error:
        raise ConfigError(_one_line(str(error))) from error

    values["model"].update(nested)
    _check_text(
        word
        for section in values.values()
        for value in section.values()
        for word in (value if isinstance(value, tuple) else (value,))
    )
    _check_given(values)
    return RunConfig(
        **{
            name: section(**{key: _builtin(value) for key, value in values[name].items()})
            for name, section in SECTIONS.items()
        }
    )


def _check_text(words: Iterable[object]) -> None:
    """Refuse text that no path or name can be.

    Raises:
        ConfigError: it has a NUL, or bytes that are no UTF-8, which Python keeps as halves of pairs.
    """
    for word in words:
        if isinstance(word, str) and ("\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word)):
            raise ConfigError(
                f"{shown(word)!r} is no text in UTF-8 without NULs. Rename what it names, or correct the setting."
            )


def given_in(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> frozenset[str]:
    """Return the dotted names of settings that sections and overrides give, without those inside of others."""
    sections = copy.deepcopy(dict(tree))
    words = take_nested(overrides, sections)
    given = set(_options(words))
    for name, keys in sections.items():
        given.update(_dotted(name, keys))
    return frozenset(given)


def _options(words: Iterable[str]) -> Iterator[str]:
    """Yield the names of the options among words of a command line."""
    return (word[2:].partition("=")[0] for word in words if word.startswith("--"))


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the sections as plain lists, dicts, numbers and text. Written as YAML, they are read back by `load`."""
    sections = dataclasses.asdict(config)
    return {
        name: {key: list(value) if isinstance(value, tuple) else value for key, value in section.items()}
        for name, section in sections.items()
    }


class _ByteSize(int):
    """The parser's type for a `ByteCount`: text with a unit, or an int."""

    def __new__(cls, value: object) -> _ByteSize:
        # YAML and the parser read 1e9 as a float.
        if isinstance(value, float) and value.is_integer():
            value = int(value)

        if isinstance(value, str):
            return super().__new__(cls, parse_bytes(value))
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{value!r} is no byte size")

        # Not parsed, so that an int of any size keeps its value.
        return super().__new__(cls, value)


class _CommaList(tuple[str, ...]):
    """The parser's type for a tuple of text: a list, or one comma-separated string."""

    __slots__ = ()

    def __new__(cls, value: object) -> _CommaList:
        words = [value] if isinstance(value, str) else value
        if words == ["null"]:
            raise ConfigError("null is no list of text")
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            raise ConfigError(f"{value!r} is no list of text")

        # Commas part the entries of one text. An entry of a list keeps its own.
        entries = parse_list(value if isinstance(value, str) else words)
        return super().__new__(cls, entries)


def _builtin(value: object) -> object:
    """Return a plain int or tuple in place of a value of our own types, which only the parser needs."""
    if isinstance(value, _ByteSize):
        return int(value)
    return tuple(value) if isinstance(value, _CommaList) else value


register_type(_ByteSize, serializer=int)
register_type(_CommaList, serializer=list)


@functools.cache
def _parser() -> ArgumentParser:
    """Return the parser that reads and converts values. Keys and bounds are checked here, for better messages."""
    known = ArgumentParser(exit_on_error=False, add_help=False)
    for name, section in SECTIONS.items():
        for item in dataclasses.fields(section):
            known.add_argument(
                f"--{name}.{item.name}", type=_argument_type(_hints(section)[item.name]), default=item.default
            )
    return known


def field_docs(section: type[Any]) -> dict[str, str]:
    """Return the string under each field of a section, as one line. It says null and false, as YAML does."""
    # Python keeps no strings under fields, so they are read from the source.
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for statement, doc in itertools.pairwise(tree.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = doc.value.value if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) else None
        if isinstance(text, str):
            line = " ".join(text.split())
            docs[statement.target.id] = line.replace("None:", "null:").replace("False:", "false:")
    return docs


def _hints(section: type[Any]) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def _argument_type(hint: Any) -> Any:  # noqa: ANN401  type hints have no common type
    """Return the parser's type for the type of a field."""
    if hint == tuple[str, ...]:
        return _CommaList
    return _ByteSize | None if ByteCount in get_args(hint) else hint


def _read_sections(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a YAML file. An empty section is an empty dict."""
    tree = read_yaml(path, get_loader("yaml"))
    if not isinstance(tree, dict):
        found = "is empty" if tree is None else f"holds {shown(repr(tree))}"
        raise ConfigError(f"{path} {found}; it must hold sections such as `train:` with `steps: 100` below.")
    return _sections(tree, str(path))


def _sections(tree: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return the sections of a tree that holds nothing else, and only settings that are known."""
    # A file of another trainer has dozens of unknown names, and one remedy.
    _check_trainer(tree, where)
    names = [str(name) for name in tree]
    _check_known((name for name in names if name not in SECTIONS), where)
    check_sections(tree, where)

    sections = {name: keys or {} for name, keys in tree.items()}
    settings = [dotted for name, keys in sections.items() for dotted in _dotted(name, keys)]
    _check_known(settings, where)
    return sections


def check_sections(tree: Mapping[str, Any], where: str) -> None:
    """Refuse sections that hold no settings by name.

    Args:
        tree: sections and nothing else. A section may be empty.
        where: the file, for messages.

    Raises:
        ConfigError: names the section.
    """
    for name, keys in tree.items():
        if not isinstance(keys, dict | None):
            raise ConfigError(
                f"{where}: {name} is a section, so `key: value` lines belong below it; found {shown(repr(keys))}."
            )


def _dotted(name: str, keys: Mapping[str, Any]) -> Iterator[str]:
    return (f"{name}.{key}" for key in keys)


def _check_known(keys: Iterable[str], where: str | None = None) -> None:
    """Refuse unknown keys, and name the nearest known one, and the file if they stand in one."""
    known = [dotted for name, section in SECTIONS.items() for dotted in _dotted(name, _hints(section))]

    for key in keys:
        if key in known:
            continue
        if key in SECTIONS:
            raise ConfigError(f"{key} is a section; set one of its keys, such as --{_section_keys(key)[0]}.")

        if near := _near(key, known):
            hint = f"did you mean {near[0]}?"
        else:
            section = key.partition(".")[0]
            hint = f"known are {', '.join(_section_keys(section))}."
        place = f"{where}: " if where else ""
        raise ConfigError(f"{place}unknown setting {key}; {hint}")


def _near(key: str, known: Sequence[str]) -> list[str]:
    """Return what somebody may have meant by an unknown key, if that can be told."""
    # A name of another trainer, or a key in the wrong section, is as common as a misspelt one.
    last = key.rpartition(".")[2]
    if last in ELSEWHERE:
        return [ELSEWHERE[last]]
    if same := [name for name in known if name.rpartition(".")[2] == last]:
        return same
    return difflib.get_close_matches(key, [*known, *SECTIONS], n=1, cutoff=0.5)


def _check_trainer(tree: Mapping[str, Any], where: str) -> None:
    """Refuse a file that is another trainer's: none of its keys is a section."""
    names = [str(name) for name in tree]
    if names and not SECTIONS.keys() & names and OTHER_TRAINERS & set(names):
        raise ConfigError(
            f"{where} is the config of another trainer. `megatier convert {where} --output run.yaml` makes one of "
            "megatier of it."
        )


def check_units(tiers: Mapping[str, Any], overrides: Sequence[str] = ()) -> None:
    """Refuse budgets without a unit that are too small to be meant as bytes.

    Args:
        tiers: the section, as somebody wrote it.
        overrides: command-line words, which win over it.

    Raises:
        ConfigError: names the budget.
    """
    found = dict(tiers)
    for name, text in settings_of(overrides):
        found[name.removeprefix("tiers.")] = text

    for key in ("gpu", "gpu_limit", "ram"):
        require_unit(f"tiers.{key}", found.get(key))
    # On the command line mounts are one text, and in a file may be a list.
    mounts = found.get("nvme") or ()
    if isinstance(mounts, str):
        mounts = parse_list(mounts)
    for mount in mounts:
        _, colon, size = str(mount).rpartition(":")
        require_unit(f"tiers.nvme: the budget of {shown(str(mount))}", size if colon else None)


def _check_given(values: Mapping[str, Any]) -> None:
    """Refuse null for a setting that must have a value: the parser lets it pass."""
    for name, section in SECTIONS.items():
        for key, hint in _hints(section).items():
            if values[name][key] is None and NoneType not in get_args(hint):
                raise ConfigError(_refusal(name, key, "is null"))


def _section_keys(name: str) -> list[str]:
    """Return the dotted keys of a section; the names of all sections if there is none of this name."""
    return list(_dotted(name, _hints(SECTIONS[name]))) if name in SECTIONS else list(SECTIONS)


def _one_line(message: str) -> str:
    """Return the parser's complaint as one sentence, with what the setting means."""
    # The parser says the key and the value in several ways, each of which these find.
    key = re.search(r'Parser key "(\w+)\.(\w+)"|argument --(\w+)\.(\w+): expected', message)
    value = re.search(r"(?:Given value|Got value): (.*)|type _CommaList: (.*) is no", message)
    if key is None:
        return f"{' '.join(message.split())}; settings are written --section.key VALUE, after the config file."
    found = "has no value"
    if value:
        # The parser has made None of null by then.
        given = value[1] or value[2]
        found = "is null" if given == "None" else f"is {given!r}"
    return _refusal(key[1] or key[3], key[2] or key[4], found)


def _refusal(section: str, name: str, found: str) -> str:
    """Return a sentence that says what was found, what may stand there, and what the setting means."""
    # The type in words: null, sizes and choices as a user writes them.
    hint = str(_hints(SECTIONS[section])[name]).replace("typing.", "")
    for pattern, words in (
        ("Optional\\[(.*)\\]$", r"\1 | None"),
        (" \\| None$", ", or null"),
        ("Annotated\\[int, 'bytes'\\]", "size such as 96GiB"),
        ("Literal\\[(.*)'\\]", r"\1'"),
        ("Union\\[(.*), (.*)\\]$", r"\1 or \2"),
        (" \\| ", " or "),
        (", ('\\w+')(?=$|, or null)", r" or \1"),
        ("'(\\w+)'", r"\1"),
        ("<class (\\w+)>", r"\1"),
        ("tuple\\[str, \\.\\.\\.\\]", "a list of text ([] for none)"),
        ("dict\\[str, Any\\]", "keys with values"),
    ):
        hint = re.sub(pattern, words, hint)

    return f"{section}.{name} {found}; expected {hint}. {field_docs(SECTIONS[section])[name]}"
