"""Adds LoRA adapters of the `peft` library to a skeleton, around the modules that they adapt.

The adapters belong to the units of these modules. Everything but the adapters is frozen.
"""

from __future__ import annotations

import copy
import importlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from megatier.adapters.first_weights import base_name
from megatier.adapters.stored_adapters import PREFIX, read_settings
from megatier.compute.adapted_parameter import wrappers_in
from megatier.compute.quantised_linear import QuantisedLinear
from megatier.config.lora import ALL_LINEAR, LoraConfig
from megatier.errors import ConfigError
from megatier.foreign import reading
from megatier.models.decoder import decoder_layers, is_adapter, tied_modules
from megatier.models.frozen_parameters import is_named

ADAPTER = "default"
"""The name of an adapter in its model, as in PEFT."""
WILDCARDS = frozenset("*?[")
"""Characters that make a name a pattern."""
LINEAR = (nn.Linear, Conv1D)
"""Modules that `all-linear` stands for, as in PEFT."""
STACKED = 3
"""The number of dimensions of a parameter with a matrix for each expert. Patterns for parameters match only these."""
NUMBERED = re.compile(r"\.\d+\.")
"""The number of a layer in a name."""
ADAPTED = (*LINEAR, nn.Embedding)
"""Modules that a pattern may match. A name may match any module."""


def load_peft() -> Any:  # noqa: ANN401 - a module without types
    """Import and return the module peft.

    Raises:
        ConfigError: it is not installed.
    """
    # Imported here, since it is slow to import and most runs never need it.
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(f"model.lora needs peft ({error}): pip install 'megatier[lora]', or leave it out.") from error


def add_adapters(model: PreTrainedModel, settings: LoraConfig, base: str) -> None:
    """Let PEFT add its layers to a skeleton on meta, and freeze everything but the adapters.

    Args:
        model: the skeleton of the base.
        settings: the adapters.
        base: the folder or name of the base, which is noted in the adapter's config.

    Raises:
        ConfigError: peft is missing, or a target or a module to save matches nothing, is tied, or cannot have an
            adapter.
    """
    if settings.adapter is not None:
        given = read_settings(Path(settings.adapter).expanduser())
        is_by_name = True
    else:
        given = _chosen(model, settings)
        is_by_name = settings.targets != (ALL_LINEAR,)
    inject(model, given, base, is_by_name=is_by_name)


def inject(model: PreTrainedModel, given: Mapping[str, Any], base: str, *, is_by_name: bool = True) -> None:
    """Let PEFT add its layers to a skeleton, and freeze everything but the adapters.

    Args:
        model: the skeleton of the base.
        given: settings of PEFT's `LoraConfig`.
        base: the folder or name of the base, which is noted in the adapter's config.
        is_by_name: whether somebody has named the targets.

    Raises:
        ConfigError: see `add_adapters`.
    """
    peft = load_peft()

    # Found before PEFT changes the modules, since a module that it trains whole may hold the layers or be tied.
    layers = decoder_layers(model)
    tied = tied_modules(model)

    # PEFT would ignore a parameter that does not exist.
    for name in given.get("target_parameters") or ():
        _named_parameters(model, name, is_pattern=False)

    # Given settings come last, since they may name another task, such as that of a classifier.
    settings = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, **given}
    with reading(f"model.lora: PEFT {peft.__version__} makes no such adapters", ConfigError), _quiet():
        config = peft.LoraConfig(**settings)
        _leave_experts(config, model, is_by_name=is_by_name)

        # PEFT's "low memory" mode uses meta, where the skeleton's own parameters are.
        peft.inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    check_made(model, layers, tied)


def adapter_config(model: PreTrainedModel) -> Any | None:  # noqa: ANN401 - PEFT's, which has no types
    """Return PEFT's config of the adapters in a model; None if it has none."""
    configs = getattr(model, "peft_config", None)
    return None if configs is None else configs[ADAPTER]


def stored_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the parameters of a model's adapters, by their names in a PEFT folder."""
    # PEFT selects and renames tensors by name only, so empty stand-ins are enough.
    stand_ins = dict[str, Tensor]()
    for name, _ in model.named_parameters():
        stand_ins[name] = torch.empty(0, dtype=torch.float32, device="cpu")

    stored = load_peft().get_peft_model_state_dict(
        model,
        state_dict=stand_ins,
        adapter_name=ADAPTER,
        save_embedding_layers=False,
    )

    # By identity, since PEFT may give a tensor any name.
    name_of = {id(tensor): name for name, tensor in stand_ins.items()}
    return {f"{PREFIX}{key}": name_of[id(tensor)] for key, tensor in stored.items()}


def _chosen(model: PreTrainedModel, settings: LoraConfig) -> dict[str, Any]:
    """Return a run's settings as arguments of PEFT's `LoraConfig`.

    Raises:
        ConfigError: a target or a module to save matches nothing.
    """
    saved = [module for name in settings.modules_to_save for module in _named(model, name, "modules_to_save")]

    def named_parameters(name: str) -> list[str]:
        return _named_parameters(model, name, is_pattern=_is_pattern(name))

    parameters = _as_asked(settings.target_parameters, named_parameters)
    return {
        "r": settings.rank,
        "lora_alpha": settings.scaled_alpha,
        "lora_dropout": settings.dropout,
        "target_modules": _targets(model, settings.targets),
        "target_parameters": parameters or None,
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "modules_to_save": saved or None,
    }


def _targets(model: PreTrainedModel, wanted: Sequence[str]) -> list[str]:
    """Return the targets for PEFT: names of modules, and suffixes of names.

    Raises:
        ConfigError: one matches nothing.
    """
    if wanted != (ALL_LINEAR,):
        return _as_asked(wanted, lambda name: _named(model, name, "targets"))

    head = model.get_output_embeddings()
    names = list[str]()
    for name, module in model.named_modules():
        # As in PEFT, these do not include the head.
        if isinstance(module, LINEAR) and module is not head:
            names.append(name)
    return names


def _as_asked(wanted: Sequence[str], named: Callable[[str], Sequence[str]]) -> list[str]:
    """Return the wanted names for PEFT, with patterns replaced by the names that they match."""
    names: dict[str, None] = {}
    for asked in wanted:
        # Also for a plain name, which must match something.
        named_by_it = named(asked)

        # PEFT accepts suffixes of names, so its config stays as short as the request.
        names |= dict.fromkeys(named_by_it if _is_pattern(asked) else [asked])
    return list(names)


def _is_pattern(name: str) -> bool:
    return bool(WILDCARDS & set(name))


def _named_parameters(model: PreTrainedModel, name: str, *, is_pattern: bool) -> list[str]:
    """Return the parameters that a name or a pattern matches.

    Raises:
        ConfigError: there is none.
    """
    # Patterns match only stacks of experts, since a matrix gets its adapter through its module.
    stacks = [path for path, parameter in model.named_parameters() if parameter.dim() == STACKED]
    if is_pattern:
        named = [path for path in stacks if is_named(path, name)]
    else:
        named = [path for path, _ in model.named_parameters() if _ends_with(path, name)]

    if not named:
        ends = {NUMBERED.split(path)[-1] for path in stacks}
        has = ", ".join(sorted(ends)) or "no stacked ones"
        raise ConfigError(
            f"model.lora.target_parameters: {name!r} names no parameter of {type(model).__name__}, which has {has}."
        )
    return named


def _ends_with(path: str, name: str) -> bool:
    """Return whether a path ends with a name, in whole parts."""
    return f".{path}".endswith(f".{name}")


def _leave_experts(config: Any, model: PreTrainedModel, *, is_by_name: bool) -> None:  # noqa: ANN401 - PEFT's
    """Remove targets from a config that PEFT would treat as experts, which are a parameter of a layer.

    PEFT treats names from a model's first release, such as `gate_proj`, as experts wherever they occur.

    Args:
        config: PEFT's config, whose targets change.
        model: the skeleton.
        is_by_name: whether somebody has named the targets.

    Raises:
        ConfigError: the user has named such a target, or none is left.
    """
    try:
        conversion = importlib.import_module("peft.utils.transformers_weight_conversion")
    except ModuleNotFoundError:  # PEFT before 0.19 takes names for modules alone
        return

    # PEFT moves such targets to target_parameters. A copy shows which ones.
    tried = copy.deepcopy(config)
    conversion.convert_peft_config_for_transformers(tried, model=model, conversions=None)
    before = set(config.target_parameters or ())
    after = set(tried.target_parameters or ())
    if after == before:
        return

    if is_by_name or not tried.target_modules:
        wanted = config.target_modules
        experts = [wanted] if isinstance(wanted, str) else sorted(set(wanted) - set(tried.target_modules))
        raise ConfigError(
            f"model.lora.targets: in {type(model).__name__} PEFT takes {experts[0]!r} for a part of the experts, which "
            "are parameters. Leave it out, and name what is to have adapters in target_parameters, such as "
            "mlp.experts.down_proj."
        )
    config.target_modules = tried.target_modules


def _named(model: PreTrainedModel, name: str, setting: str) -> list[str]:
    """Return the modules that a name or a pattern matches.

    Raises:
        ConfigError: there is none.
    """
    adaptable = [path for path, module in model.named_modules() if isinstance(module, ADAPTED)]
    if _is_pattern(name):
        named = [path for path in adaptable if is_named(path, name)]
    else:
        named = [path for path, _ in model.named_modules() if _ends_with(path, name)]

    if not named:
        ends = sorted({path.rpartition(".")[2] for path in adaptable})
        near = get_close_matches(name, ends, n=3, cutoff=0.5) or ends
        raise ConfigError(f"model.lora.{setting}: {name!r} names no module of this model. It has {', '.join(near)}.")
    return named


def check_made(model: PreTrainedModel, layers: nn.ModuleList, tied: frozenset[str]) -> None:
    """Refuse adapters that would not do what their config says.

    Args:
        model: the skeleton with its adapters.
        layers: its decoder layers, found before the adapters were added.
        tied: the names of the embedding and the head, if they share a weight.

    Raises:
        ConfigError: there is one. The message names the module.
    """
    for name in sorted(tied):
        if is_adapter(model.get_submodule(name)):
            raise ConfigError(
                f"model.lora: the weight of {name} is both the embedding and the head, and an adapter would change one "
                "of them alone. Leave it out of targets and modules_to_save."
            )

    quantised = {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}
    if quantised and (adapted_parameter := next(iter(wrappers_in(model)), None)):
        raise ConfigError(
            f"model.lora.target_parameters: {base_name(adapted_parameter)} is of a quantised base, over which modules "
            "alone get adapters. Leave it out, or take a base in full precision."
        )

    for name, module in quantised.items():
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(
                f"model.lora.modules_to_save: the weight of {name} is quantised, so it cannot be trained whole. Leave "
                "it out, or take a base in full precision."
            )

    whole = {id(layer) for layer in layers}
    for name, module in model.named_modules():
        if is_adapter(module) and any(id(child) in whole for child in module.modules()):
            raise ConfigError(
                f"model.lora.modules_to_save: {name} holds whole layers. Name modules inside of layers, or leave "
                "model.lora out and name what stays as it is in model.frozen."
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence PEFT's warnings about what it handles itself (GPT-2's transposed matrices), or what is refused here.

    Before 0.21 it also warns of modules that own a parameter and are of a class that it does not know.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unsupported layer type")
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True` and a tied layer")
        yield
