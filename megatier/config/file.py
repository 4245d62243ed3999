"""Reads a config: a YAML file, with dotted overrides laid over it, and messages that say what is wrong with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatier.config.overrides import check_known, is_nested, merge_settings, parse_overrides
from megatier.config.schema import CONFIG_SECTIONS, RunConfig
from megatier.config.section import from_text, hints
from megatier.config.values import parse_list, read_yaml, require_unit
from megatier.errors import ConfigError
from megatier.foreign import printable

OTHER_TRAINERS = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "model_name_or_path", "finetuning_type"}
)
"""Keys by which the config of DeepSpeed or LLaMA-Factory is known. MegaTrain's has sections as ours has."""


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
    """Return the config, and the dotted names of the settings that the file and the overrides give (`list_given`).

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
    written: Mapping[str, Any] = {}
    if not is_saved:
        written = tree.get("tiers", {})
    check_units(written, overrides)

    _check_text(overrides)
    tree = merge_settings(tree, overrides)
    return _parsed(tree), list_given(tree)


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
    _check_text(overrides)
    return _parsed(merge_settings(_sections(tree, "the stored config"), overrides))


def _parsed(tree: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """Return the config of a tree of sections."""
    sections = {}
    for name, section in CONFIG_SECTIONS.items():
        # A copy, since values are replaced while the section may be the caller's.
        values = dict(tree.get(name, {}))
        for key, value in values.items():
            entries = value if isinstance(value, list) else [value]
            _check_text(entries)

            # Nested settings were parsed as YAML when they were laid over the tree.
            if isinstance(value, str) and not is_nested(section.dotted(key)):
                values[key] = from_text(value, hints(section)[key])
        sections[name] = section(**values)
    return RunConfig(**sections)


def _check_text(words: Iterable[object]) -> None:
    """Refuse text that no path or name can be.

    Raises:
        ConfigError: it has a NUL, or bytes that are no UTF-8, which Python keeps as halves of pairs.
    """
    for word in words:
        if not isinstance(word, str):
            continue
        has_halves = any("\ud800" <= letter <= "\udfff" for letter in word)
        if has_halves or "\0" in word:
            raise ConfigError(
                f"{printable(word)!r} is no text in UTF-8 without NULs. Rename what it names, or correct the setting."
            )


def list_given(tree: Mapping[str, Mapping[str, Any]], overrides: Sequence[str] = ()) -> frozenset[str]:
    """Return the dotted names of settings that sections and overrides give, without those inside of others."""
    sections = merge_settings(tree, overrides)
    return frozenset(f"{name}.{key}" for name, keys in sections.items() for key in keys)


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the sections as plain lists, dicts, numbers and text. Written as YAML, they are read back by `load`."""
    sections: dict[str, dict[str, Any]] = dataclasses.asdict(config)
    for section in sections.values():
        for key, value in section.items():
            # YAML has no tuples.
            if isinstance(value, tuple):
                section[key] = list(value)
    return sections


def _read_sections(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a YAML file. An empty section is an empty dict."""
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        # An empty file is null to YAML.
        content = "is empty"
        if tree is not None:
            content = f"holds {printable(repr(tree))}"
        raise ConfigError(f"{path} {content}; it must hold sections such as `train:` with `steps: 100` below.")
    return _sections(tree, str(path))


def _sections(tree: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return the sections of a tree that holds nothing else, and only settings that are known."""
    # A file of another trainer has dozens of unknown names, and one remedy.
    _check_trainer(tree, where)
    unknown = [str(name) for name in tree if str(name) not in CONFIG_SECTIONS]
    check_known(unknown, where)
    check_sections(tree, where)

    # A section without lines is null to YAML.
    sections = {name: keys or {} for name, keys in tree.items()}
    for name, keys in sections.items():
        check_known([f"{name}.{key}" for key in keys], where)
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
                f"{where}: {name} is a section, so `key: value` lines belong below it; found {printable(repr(keys))}."
            )


def _check_trainer(tree: Mapping[str, Any], where: str) -> None:
    """Refuse a file that is another trainer's: none of its keys is a section."""
    names = {str(name) for name in tree}
    # A file of ours with one such key in the wrong place has a better message.
    if not CONFIG_SECTIONS.keys() & names and OTHER_TRAINERS & names:
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
    written = dict(tiers)
    for name, text in parse_overrides(overrides):
        written[name.removeprefix("tiers.")] = text

    for key in ("gpu", "gpu_limit", "ram", "locked"):
        require_unit(f"tiers.{key}", written.get(key))
    # On the command line mounts are one text, and in a file may be a list.
    mounts = written.get("nvme") or ()
    if isinstance(mounts, str):
        listed = from_text(mounts, tuple) or ()
        mounts = parse_list(listed, "tiers.nvme")
    for mount in map(str, mounts):
        # A mount without a size may take all that is free.
        _, colon, size = mount.rpartition(":")
        if colon:
            require_unit(f"tiers.nvme: the budget of {printable(mount)}", size)
