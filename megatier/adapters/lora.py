"""LoRA adapters of the `peft` library in a skeleton: its own layers take the places of the modules that they adapt.

They are parts of the units that these modules are parts of. Everything but the adapters is frozen.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from megatier.config.lora import ALL_LINEAR, LoraConfig
from megatier.errors import ConfigError
from megatier.foreign import reading
from megatier.models.decoder import decoder_layers

ADAPTER = "default"
"""The name that an adapter has in its model, as with PEFT."""
WILDCARDS = frozenset("*?[")
"""Characters by which a pattern is known."""
LINEAR = (nn.Linear, Conv1D)
"""Modules that `all-linear` stands for, as with PEFT."""
ADAPTED = (*LINEAR, nn.Embedding)
"""Modules that a pattern stands for; a name may stand for any."""


def load_peft() -> Any:  # noqa: ANN401 - a module without types
    """Return the module peft.

    Raises:
        ConfigError: it is not installed.
    """
    # Asked for here alone: it is slow to import, and most runs never need it.
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(f"model.lora needs peft ({error}): pip install 'megatier[lora]', or leave it out.") from error


def add_adapters(model: PreTrainedModel, settings: LoraConfig, base: str) -> None:
    """Let PEFT put its layers into a skeleton, which has its parameters on meta, and freeze all but the adapters.

    Args:
        model: the skeleton of the base.
        settings: the adapters.
        base: the folder or name of the base, which is noted in the adapter's config.

    Raises:
        ConfigError: peft is missing, a target or a module to save names nothing, is tied, or cannot have an adapter.
    """
    peft = load_peft()
    targets = _targets(model, settings.targets)
    saved = [module for name in settings.modules_to_save for module in _saved(model, name)]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=settings.rank,
        lora_alpha=settings.scaled_alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        modules_to_save=saved or None,
        bias="none",
    )

    with reading(f"model.lora: PEFT {peft.__version__} makes no such adapters", ConfigError), _quiet():
        config.target_modules = _without_experts(config, model, settings.targets)
        peft.inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)


def adapter_config(model: PreTrainedModel) -> Any | None:  # noqa: ANN401 - PEFT's, which has no types
    """Return PEFT's config of the adapters in a model; None if it has none."""
    configs = getattr(model, "peft_config", None)
    return None if configs is None else configs[ADAPTER]


def _targets(model: PreTrainedModel, wanted: Sequence[str]) -> list[str]:
    """Return the targets as PEFT takes them: names of modules, and ends of names.

    Raises:
        ConfigError: one names nothing, or a weight that is tied.
    """
    if wanted == (ALL_LINEAR,):
        head = model.get_output_embeddings()
        return [n for n, module in model.named_modules() if isinstance(module, LINEAR) and module is not head]

    # PEFT takes ends of names as they are, so its config stays as short as what was asked for.
    found: dict[str, None] = {}
    for name in wanted:
        modules = _named(model, name, "targets")
        found |= dict.fromkeys(modules if WILDCARDS & set(name) else [name])
    return list(found)


def _without_experts(config: Any, model: PreTrainedModel, wanted: Sequence[str]) -> set[str]:  # noqa: ANN401 - PEFT's
    """Return the targets of a config without those that PEFT takes for experts, which are one parameter of a layer.

    It takes the names of a model's first releases for experts, such as `gate_proj`, wherever they are.

    Raises:
        ConfigError: somebody asked for them by name, or nothing is left.
    """
    tried = copy.deepcopy(config)
    conversion = importlib.import_module("peft.utils.transformers_weight_conversion")
    conversion.convert_peft_config_for_transformers(tried, model=model, conversions=None)
    if not getattr(tried, "target_parameters", None):
        return set(config.target_modules)

    if wanted != (ALL_LINEAR,) or not tried.target_modules:
        experts = sorted(set(config.target_modules) - set(tried.target_modules))
        raise ConfigError(
            f"model.lora.targets: in {type(model).__name__} PEFT takes {experts[0]!r} for a part of the experts, which "
            "get no adapters here. Leave it out."
        )
    return set(tried.target_modules)


def _saved(model: PreTrainedModel, name: str) -> list[str]:
    """Return the modules of a name that are trained whole.

    Raises:
        ConfigError: there is none, or it is not inside of a unit.
    """
    found = _named(model, name, "modules_to_save")
    layers = {id(layer) for layer in decoder_layers(model)}
    for path in found:
        if any(id(module) in layers for module in model.get_submodule(path).modules()):
            raise ConfigError(
                f"model.lora.modules_to_save: {name!r} names {path}, which holds whole layers. Name modules inside of "
                "layers, or leave model.lora out and name what stays as it is in model.frozen."
            )
    return found


def _named(model: PreTrainedModel, name: str, setting: str) -> list[str]:
    """Return the modules that a name or a pattern stands for.

    Raises:
        ConfigError: there is none, or one has a weight that is tied.
    """
    is_pattern = bool(WILDCARDS & set(name))
    found = [
        path
        for path, module in model.named_modules()
        if (isinstance(module, ADAPTED) and _fits(path, name) if is_pattern else f".{path}".endswith(f".{name}"))
    ]
    if not found:
        ends = {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, ADAPTED)}
        near = get_close_matches(name, sorted(ends), n=3, cutoff=0.5) or sorted(ends)
        raise ConfigError(f"model.lora.{setting}: {name!r} names no module of this model. It has {', '.join(near)}.")
    if tied := sorted(set(found) & _tied_modules(model)):
        raise ConfigError(
            f"model.lora.{setting}: {name!r} names {tied[0]}, whose weight is both the embedding and the head: an "
            "adapter would change one of them alone. Leave it out."
        )
    return found


def _fits(path: str, pattern: str) -> bool:
    """Return whether a pattern names a module, or one above it, as those of `model.frozen` do."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def _tied_modules(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the embedding and the head if they share a weight."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weights = [getattr(module, "weight", None) for module in (embedding, head)]
    if weights[0] is None or weights[0] is not weights[1]:
        return frozenset()
    return frozenset(name for name, module in model.named_modules() if module is embedding or module is head)


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, PEFT says nothing of what it finds out by itself: that the matrices of GPT-2 lie transposed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        yield
