"""`megatier init`: writes a commented config for a model, a dataset and this machine, to begin with."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatier.cli.output import add_config_output, sections_of, write_config
from megatier.config import file as config_file
from megatier.config import text as config_text
from megatier.config.data_section import BYTE_TOKENIZER, DATASET_INFO, PYTHON_STDLIB, DataConfig
from megatier.config.schema import CONFIG_SECTIONS, ModelConfig
from megatier.config.section import field_docs
from megatier.config.values import parse_list, parse_mount
from megatier.data.formats import RECORD_FORMATS
from megatier.data.image_file import IMAGE_SUFFIXES
from megatier.data.sources import check_sources
from megatier.data.text import guess_shape, has_images
from megatier.drives.mounts import budget_bytes
from megatier.errors import ConfigError
from megatier.foreign import SETTINGS_BYTES_MAX, read_object
from megatier.hardware import default_budgets, device_for
from megatier.measure.probe import cached_rates
from megatier.models.location import MODEL_CONFIG_FILE, find_local
from megatier.session.paths import check_tokenizer

INIT_HEADER = """\
# A run of `megatier train`, written by `megatier init`. Every setting is explained by `megatier train --help`.
# Next: `megatier bench --nvme DIR` measures this machine and its drive once, `megatier plan {path}` says whether the
# run fits and how fast it will be, and `megatier train {path}` trains. If tiers.gpu and train.activations are left out
# on a machine that was measured, `train` chooses them.
"""
DEFAULT_LENGTH = 1024
LENGTH_WITH_IMAGES = 4096
"""Tokens of a sequence where conversations have images, which often take 256 to 2,048 tokens each."""
RATE = 1e-5
"""Learning rate for a model that is trained on, and not from scratch."""
ADAPTER_RATE = 1e-4
"""Learning rate for adapters, which begin at zero."""
CHOSEN = ("tiers.gpu", "train.activations")
"""Settings that a run chooses itself on a machine that was measured, if they are left out."""


def run(argv: Sequence[str]) -> int:
    """Write the config; returns 0 when the file is written."""
    options = _parser().parse_args(argv)

    data = _data(options.data)
    usual = LENGTH_WITH_IMAGES if data.get("data.images") else DEFAULT_LENGTH
    settings = {
        "model.path": options.model,
        **data,
        "data.sequence_length": _length(options.model, usual),
        **_tiers(options.nvme),
        "train.epochs": 1.0,
        "train.batch": 8,
        "train.learning_rate": RATE if options.lora is None else ADAPTER_RATE,
        "train.activations": "recompute",
        "output.directory": f"runs/{options.output.stem}",
        "output.checkpoint_every": "auto",
    }
    if options.lora is not None:
        settings["model.lora"] = {"rank": options.lora}
    if _is_measured(options.nvme):
        settings = {name: value for name, value in settings.items() if name not in CHOSEN}

    # What is written is a config that loads.
    config = config_file.from_dict(sections_of(settings))
    check_tokenizer(config)
    if find_local(options.model) is not None:
        _check_model(config.model)
    else:
        # Nothing is downloaded to write a file.
        print(f"{options.model} is no folder here, so it is taken for a model on the hub, which is not looked at now")
    # Written as a run will read them, and not as they were given here.
    sections = config_file.to_dict(config)
    text = INIT_HEADER.format(path=options.output) + config_text.write(sections, settings, _remarks(settings))
    write_config(options.output, text, overwrites=options.overwrite)
    print(f"{options.output} is written; next, `megatier plan {options.output}` says whether it fits")
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="megatier init",
        usage="%(prog)s MODEL DATA --output CONFIG.yaml [options]",
        description="Write a config for a run that trains a model on a dataset, with the budgets of this machine and a "
        "comment for each setting.",
        epilog="example: megatier init my/model my/chats.jsonl --output run.yaml --nvme /mnt/a",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face model, or its id on the hub")
    parser.add_argument(
        "data", metavar="DATA", help="files, folders or globs, with commas between them; or a dataset's id on the hub"
    )
    add_config_output(parser)
    parser.add_argument(
        "--nvme", default="", metavar="DIR[:SIZE],...", help="drives that state may spill to (default: none)"
    )
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank instead of the model")
    return parser


def _check_model(config: ModelConfig) -> None:
    """Refuse a local model that a run would refuse, of which nothing is read but its config.

    Raises:
        ConfigError, UnsupportedModelError: says why it cannot be streamed.
    """
    # Imported only here, since it loads torch.
    from megatier.models.expert_units import cut_units
    from megatier.setup.skeleton import skeleton_of

    cut_units(skeleton_of(config), config.expert_parts)


def _data(given: str) -> dict[str, Any]:
    """Return the settings of a dataset: files as they are, or one on the hub.

    Raises:
        DataError: there is no such file, its first record cannot be read, or a run would refuse it.
    """
    # A path that is there wins, as it does with transformers and datasets.
    is_like_an_id = re.fullmatch(r"[\w.-]+/[\w.-]+", given) is not None
    is_hub_id = is_like_an_id and not Path(given).exists() and DATASET_INFO not in given
    if is_hub_id and given != PYTHON_STDLIB:
        return {"data.dataset": given}

    # Only the shape of the records is looked at, so the tokenizer of the model need not be there.
    files = list(parse_list(given, "--data"))
    config = DataConfig(files=tuple(files), tokenizer=BYTE_TOKENIZER)

    # A folder of images has the conversations beside them, and no text.
    if _holds_images(files):
        config = replace(config, suffixes=tuple(suffix for suffix in config.suffixes if suffix in RECORD_FORMATS))
    chat, field = guess_shape(config)
    settings: dict[str, Any] = {"data.files": files}
    config = replace(config, chat=chat, text_field=field)
    check_sources(config, print)
    if chat is not None:
        settings["data.chat"] = chat
        if has_images(replace(config, images=True, tokenizer=None)):
            settings["data.images"] = True
    elif field != "text":
        settings["data.text_field"] = field
    return settings


def _holds_images(files: Iterable[str]) -> bool:
    """Return whether one of these is a folder of images."""
    return any(path.suffix.lower() in IMAGE_SUFFIXES for file in files for path in Path(file).expanduser().glob("*"))


def _length(model: str, usual: int) -> int:
    """Return the tokens in a sequence: as many as usual, or fewer if a local model was made for fewer positions.

    Raises:
        ConfigError: there is no such model.
    """
    folder = find_local(model)
    if folder is None:
        return usual
    # Read as JSON and not by transformers, which takes seconds to load.
    model_config = read_object(folder / MODEL_CONFIG_FILE, SETTINGS_BYTES_MAX, ConfigError)
    length = usual

    # A model with images says it of the part that reads texts.
    text = model_config.get("text_config")
    if isinstance(text, dict):
        model_config = {**model_config, **text}
    # GPT-2 and its like have the second name.
    for name in ("max_position_embeddings", "n_positions"):
        count = model_config.get(name)
        if isinstance(count, int) and count >= 2:
            length = min(length, count)
    return length


def _tiers(nvme: str) -> dict[str, Any]:
    """Return the budgets of this machine, in whole mebibytes, and the mounts with theirs.

    Raises:
        ConfigError: a mount cannot be used.
    """
    # Rounded down below, so that no budget written is more than the machine has.
    budgets = default_budgets(device_for("auto"))
    tiers: dict[str, Any] = {
        "tiers.gpu": f"{budgets.gpu_bytes >> 20}MiB",
        "tiers.ram": f"{budgets.ram_bytes >> 20}MiB",
    }
    mounts = [parse_mount(text, "--nvme") for text in parse_list(nvme, "--nvme")]
    if mounts:
        tiers["tiers.nvme"] = [f"{mount.directory}:{budget_bytes(mount) >> 20}MiB" for mount in mounts]
    return tiers


def _is_measured(nvme: str) -> bool:
    """Return whether `megatier bench` measured this machine with these mounts."""
    mounts = [parse_mount(text, "--nvme").directory for text in parse_list(nvme, "--nvme")]
    return cached_rates(mounts, device_for("auto")) is not None


def _remarks(settings: Iterable[str]) -> dict[str, str]:
    """Return the first words of what each setting means."""
    # A remark stands on the line of its setting, so only its beginning fits. `megatier train --help` has the rest.
    docs = {name: field_docs(section) for name, section in CONFIG_SECTIONS.items()}
    said = {}
    for dotted in settings:
        section, _, key = dotted.partition(".")
        said[dotted] = re.split(r"[.;:] ", docs[section][key])[0].rstrip(".")
    return said
