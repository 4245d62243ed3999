"""Reads another trainer's config file, recognises the trainer by its keys, and converts it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatier.config.file import check_sections
from megatier.config.schema import CONFIG_SECTIONS
from megatier.config.values import parse_yaml, read_text_of
from megatier.convert import accelerate, axolotl, deepspeed, llama_factory, megatrain
from megatier.convert.conversion import Conversion, Table
from megatier.errors import ConfigError

_KNOWN_CONFIGS = (
    "MegaTrain's YAML (model.name, dataset, training), LLaMA-Factory's (model_name_or_path, finetuning_type), "
    "Axolotl's (base_model), accelerate's (compute_environment, distributed_type) or DeepSpeed's JSON "
    "(zero_optimization, train_batch_size)"
)


def convert(path: Path) -> Conversion:
    """Convert a config of another trainer into settings, with a finding for each of its keys.

    Raises:
        ConfigError: the file cannot be read, belongs to neither trainer, or has a value that makes no sense.
    """
    tree = _read(path)
    trainer, table = _recognised(path, tree)
    try:
        conversion = Conversion(trainer, str(path), tree)

        # Sections are nested deeper than `SECTION_DEPTH_MAX`, or lists deeper than Python's stack.
        conversion.convert(*table)
    except RecursionError:
        raise ConfigError(f"{path} has settings in settings too deep to be a config.") from None

    return conversion


def _recognised(path: Path, tree: Mapping[str, Any]) -> tuple[str, Table]:
    keys = tree.keys()
    # LLaMA-Factory's files are flat, so one with these sections belongs to another trainer.
    if keys & llama_factory.LLAMA_FACTORY_KEYS and not keys & {"model", "training"}:
        return "LLaMA-Factory", llama_factory.LLAMA_FACTORY_TABLE

    # Both share key names with DeepSpeed, such as bf16.
    if axolotl.AXOLOTL_KEY in keys and not keys & {deepspeed.ZERO, "train_batch_size"}:
        return "Axolotl", axolotl.AXOLOTL_TABLE
    if keys >= accelerate.ACCELERATE_KEYS:
        return "accelerate", accelerate.ACCELERATE_TABLE

    # Both MegaTrain and megatier have a section `model`, but only MegaTrain's contains a name.
    model = tree.get("model")
    has_name = isinstance(model, dict) and "name" in model
    is_megatrain = has_name or bool(keys & {"dataset", "training"})
    is_deepspeed = bool(keys & deepspeed.DEEPSPEED_KEYS)
    if is_megatrain and not is_deepspeed:
        # Only known sections are checked. Other keys get a finding as unknown.
        known = {name: tree[name] for name in keys & megatrain.MEGATRAIN_SECTIONS}
        check_sections(known, str(path))
        return "MegaTrain", megatrain.MEGATRAIN_TABLE
    if is_deepspeed and not is_megatrain:
        return "DeepSpeed", deepspeed.DEEPSPEED_TABLE
    if keys & CONFIG_SECTIONS.keys() and keys <= CONFIG_SECTIONS.keys():
        raise ConfigError(f"{path} is a config of megatier already; `megatier config show {path}` shows all of it.")
    raise ConfigError(f"{path} is no config that `megatier convert` reads. It must be {_KNOWN_CONFIGS}.")


def _read(path: Path) -> Mapping[str, Any]:
    """Return the settings of a file.

    JSON is tried first, since YAML would also parse most of it, but reads 2e8 as text.
    """
    text = read_text_of(path)
    try:
        tree = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        # A repeated key is an error of ours and a ValueError too, but the file is still JSON.
        if isinstance(error, ConfigError):
            raise ConfigError(f"{path}: {error}") from error
        try:
            tree = parse_yaml(text)
        except ConfigError as refusal:
            # A file that begins like JSON was meant as JSON, so the JSON parser's reason helps more than YAML's.
            is_meant_as_json = text.lstrip().startswith("{")
            said = f"no valid JSON: {error}" if is_meant_as_json else str(refusal)

            # Some of what YAML is refused for has a remedy already.
            remedy = "" if said.endswith(".") else ". Give a YAML or JSON file."
            raise ConfigError(f"{path} is {said}{remedy}") from refusal

    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings by name, but {str(tree)[:80]!r}. It must be {_KNOWN_CONFIGS}.")
    # YAML reads some names as numbers or dates, but rules expect text.
    return {str(name): value for name, value in tree.items()}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Python's parser would silently keep a repeated key's last value."""
    tree: dict[str, Any] = {}
    for name, value in pairs:
        if name in tree:
            raise ConfigError(f"{name} is given twice. Remove one of them.")
        tree[name] = value
    return tree
