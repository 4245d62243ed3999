"""Opens a run's model without its weights, and the source of the weights that it begins with."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from megatier.adapters.base import check_base, check_beside, identity_of, note_identity
from megatier.adapters.first_weights import AdaptedWeights
from megatier.adapters.in_place import note_base_tensors
from megatier.adapters.lora import add_adapters, stored_names
from megatier.adapters.quantised_base import CodesReader, is_quantised, open_quantised
from megatier.adapters.stored_adapters import StoredAdapter
from megatier.config.schema import ModelConfig, RunConfig
from megatier.defaults import usual_defaults
from megatier.errors import UnsupportedModelError
from megatier.foreign import SETTINGS_BYTES_MAX, first_sentence, printable, read_object, reading
from megatier.models.decoder import build_skeleton
from megatier.models.frozen_parameters import freeze
from megatier.models.initialiser import Initialiser
from megatier.models.limits import check_counts
from megatier.models.location import MODEL_CONFIG_FILE, find_local, resolve
from megatier.models.model_class import is_classifier
from megatier.models.safetensors_format import StoredTensor
from megatier.models.weights import SafetensorsFolder, TensorReader
from megatier.setup.workload import COMPUTE_DTYPES

NAME_CHARACTERS_MAX = 100
"""Characters of a name that are compared. A longer name resembles none, and comparing it would take long."""


@usual_defaults()
def skeleton_of(config: ModelConfig, model_config: PretrainedConfig | None = None) -> PreTrainedModel:
    """Return the model without its weights, which need not be there yet.

    Args:
        config: the model.
        model_config: Hugging Face's config of it, if it was read already (`model_config_of`).

    Raises:
        UnsupportedModelError: transformers does not take its config, or it cannot be streamed.
        ConfigError: a pattern of what is frozen, or a target of adapters, names nothing.
    """
    model_config = model_config or model_config_of(config)

    # Quantised linear layers have other modules than plain ones. So the skeleton of such a base is made from its files,
    # also for a plan.
    has_base = config.path is not None and config.adapters is not None
    if has_base and is_quantised(model_config):
        model, _ = open_base(config, 0, model_config)
    else:
        model = build_skeleton(model_config, config.attention)
    return _add_adapters(model, config)


@usual_defaults()
def open_model(config: RunConfig, model_config: PretrainedConfig | None = None) -> tuple[PreTrainedModel, TensorReader]:
    """Return the skeleton of a run's model, with its buffers and generation settings, and the reader of its weights.

    Args:
        config: the run.
        model_config: as for `skeleton_of`.

    Raises:
        ConfigError, UnsupportedModelError: there is no such model, or it cannot be streamed.
    """
    folder = _find_folder(config.model)
    seed = config.train.seed
    model, reader = open_base(config.model, seed, model_config)

    # The files hold the base, so they are compared with it before it has adapters.
    stored = reader.stored if isinstance(reader, SafetensorsFolder | CodesReader) else None
    model = _add_adapters(model, config.model, stored)
    if folder is None or config.model.adapters is None:
        return model, reader

    # Noted in the model, since the adapters that it is exported with name their base.
    identity = identity_of(folder, stored)
    note_identity(model, identity)
    if (given := config.model.adapters.adapter) is None:
        return model, AdaptedWeights(reader, model, seed)
    adapter = Path(given).expanduser()
    check_base(adapter, folder, identity, _find_base(config.model))
    return model, AdaptedWeights(reader, model, seed, StoredAdapter(adapter, model, stored_names(model)))


@usual_defaults()
def open_base(
    config: ModelConfig, seed: int, model_config: PretrainedConfig | None = None, *, decodes: bool = False
) -> tuple[PreTrainedModel, TensorReader]:
    """Return the skeleton of a model without its adapters, and the reader of its weights.

    Args:
        config: the model. With adapters it may be quantised: then its linear layers keep their codes.
        seed: decides the values if the model starts from scratch.
        model_config: as for `skeleton_of`.
        decodes: a quantised model is a plain one instead, decoded as it is read.

    Raises:
        ConfigError, UnsupportedModelError: there is no such model, or it cannot be streamed.
    """
    folder = _find_folder(config)
    model_config = model_config or model_config_of(config)
    if folder is not None and config.adapters is not None and is_quantised(model_config):
        # Without a dtype the codes are decoded while they are read, which export and merging need.
        dtype = None if decodes else COMPUTE_DTYPES[config.compute_dtype]
        return open_quantised(folder, model_config, config.attention, dtype)

    model = build_skeleton(model_config, config.attention)
    if folder is None:
        return model, Initialiser(model, seed)
    return model, SafetensorsFolder(folder, model)


def model_config_of(config: ModelConfig) -> PretrainedConfig:
    """Return Hugging Face's config of a run's model, as `read_model_config` does.

    Raises:
        UnsupportedModelError: it is that of a classifier, which has no loss of the next token; or see there.
    """
    folder = _find_folder(config, weights=False)
    model_config = read_model_config(config, folder)
    if is_classifier(model_config):
        where = "model.config" if folder is None else str(folder / MODEL_CONFIG_FILE)
        named = printable(", ".join(map(str, model_config.architectures or ())))
        raise UnsupportedModelError(
            f"{where} names {named}, and runs train language models alone. "
            "Train a classifier in a loop of your own with megatier.stream, or as a reward model under TRL."
        )
    return model_config


def _find_folder(config: ModelConfig, *, weights: bool = True) -> Path | None:
    """Return the folder of the model, which may have to be downloaded; None: it starts from scratch."""
    return resolve(config.path, weights=weights) if config.path is not None else None


def _add_adapters(
    model: PreTrainedModel, config: ModelConfig, stored: Mapping[str, StoredTensor] | None = None
) -> PreTrainedModel:
    """Add the adapters to a model, if there are any, and freeze what is not trained; `stored` is what is read of it."""
    if config.adapters is not None:
        # A plan does with a folder that has no weights yet.
        folder = _find_folder(config, weights=False)
        if folder is not None and any(folder.glob("*.safetensors")) and not is_quantised(model.config):
            note_base_tensors(model, folder, stored)
        add_adapters(model, config.adapters, _find_base(config))
    freeze(model, config.frozen)
    return model


def _find_base(config: ModelConfig) -> str:
    """Return the base of adapters as their folder names it: the whole path of a folder, or a name on the hub."""
    assert config.path is not None
    local = find_local(config.path)
    return config.path if local is None else str(local.resolve())


def read_model_config(config: ModelConfig, folder: Path | None) -> PretrainedConfig:
    """Return Hugging Face's config of a folder, or of the settings given.

    Raises:
        UnsupportedModelError: transformers does not take it, or it asks for more than any model has.
        ConfigError: the folder holds adapters too, which nobody asked for.
    """
    settings: Mapping[str, Any] = config.config or {}
    where = "model.config"
    if folder is not None:
        where = str(folder / MODEL_CONFIG_FILE)
        check_beside(folder, None if config.adapters is None else config.adapters.adapter)
        try:
            settings = read_object(folder / MODEL_CONFIG_FILE, SETTINGS_BYTES_MAX, UnsupportedModelError)
        except FileNotFoundError as error:
            raise UnsupportedModelError(
                f"{folder} has no {MODEL_CONFIG_FILE}, so it holds no Hugging Face model."
            ) from error

    # transformers would try to build whatever the counts say, so they are checked first.
    check_counts(settings, where)

    # Code that comes with a model is never run (`trust_remote_code`).
    complaint = f"{where}: transformers does not take this model config"
    with reading(complaint, UnsupportedModelError, _describe_complaint, _suggest_key(settings)):
        model_config: PretrainedConfig = (
            AutoConfig.from_pretrained(folder, trust_remote_code=False)
            if folder is not None
            else AutoConfig.for_model(**settings)
        )

    if folder is None:
        _check_keys(settings)
    return model_config


def _describe_complaint(error: BaseException) -> str:
    """Return the reason why transformers refuses a config, from its message."""
    # A message about a field of the config has the reason in its last line; others have it in their first sentence.
    lines = str(error).strip().splitlines()
    if isinstance(error, StrictDataclassError) and lines:
        return printable(lines[-1].strip()).rstrip(".")
    return first_sentence(error)


def _suggest_key(settings: Mapping[str, Any]) -> str:
    """Return a question that names the nearest model type, if there is none of the name given."""
    given = settings.get("model_type")

    # Where the name itself is one of transformers, something else of the config was refused.
    if isinstance(given, str) and given in CONFIG_MAPPING:
        return ""
    compared = str(given)[:NAME_CHARACTERS_MAX]
    nearest = get_close_matches(compared, CONFIG_MAPPING, n=1)
    return f"Did you mean {nearest[0]}?" if nearest else ""


def _check_keys(settings: Mapping[str, Any]) -> None:
    """Refuse what looks like a misspelt key.

    transformers would keep it as an unknown key, and use its own default for the one that was meant.
    """
    # A key that resembles no known one is taken, since configs hold settings that only other programs read.
    known = AutoConfig.for_model(settings["model_type"])
    unknown = [key for key in settings if not hasattr(known, key)]
    for key in unknown:
        near = get_close_matches(key[:NAME_CHARACTERS_MAX], known.to_dict(), n=1, cutoff=0.85)
        if near:
            raise UnsupportedModelError(
                f"model.config: {settings['model_type']} has no setting {key}. Did you mean {near[0]}?"
            )
