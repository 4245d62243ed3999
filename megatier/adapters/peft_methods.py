"""Lists which of PEFT's methods work on a streamed model, and what to do instead of the others.

PEFT's methods change modules and weights in place, while the weights of a streamed model lie elsewhere. So a method
works if it only reads or computes, and is refused by name otherwise. Unknown methods are refused too.
"""

from __future__ import annotations

import functools
from typing import NoReturn

from torch import nn

from megatier.adapters.lora import ADAPTER
from megatier.errors import StreamedModelError
from megatier.models.decoder import is_adapter

_ALLOWED = ""
"""The method works as in PEFT, or as the streamed model's own class defines."""
BEFORE = (
    "Call it on the PeftModel before megatier.stream takes that, or write the adapters with Streamed.export(folder) "
    "and call it on what PeftModel.from_pretrained(base, folder) loads."
)
MERGED = (
    "Write the adapters with Streamed.export(folder); then `megatier export folder merged --merge` merges them piece "
    "by piece, or PeftModel.from_pretrained(base, folder) takes this call."
)
WRITTEN = "Write the adapters with Streamed.export(folder), or with save_model(folder) of the trainer."
SWITCHED = (
    "Adapters are on, except inside of `with streamed.disable_adapter():` (or disable_adapter() of the trainer's "
    "model), under torch.no_grad()."
)
TRAINED = f"Which parameters are trained was settled by megatier.stream. {BEFORE}"
PROMPTS = "It belongs to prompts that are trained, and a streamed model has adapters of LoRA alone."

METHODS: dict[str, str] = {
    # What looks at the model, or computes with it.
    "active_adapter": _ALLOWED,
    "active_adapters": _ALLOWED,
    "active_peft_config": _ALLOWED,
    "base_model_torch_dtype": _ALLOWED,
    "create_or_update_model_card": _ALLOWED,
    "disable_adapter": _ALLOWED,
    "generate": _ALLOWED,
    "get_base_model": _ALLOWED,
    "get_layer_status": _ALLOWED,
    "get_model_config": _ALLOWED,
    "get_model_status": _ALLOWED,
    "get_nb_trainable_parameters": _ALLOWED,
    "has_active_enabled_adapter": _ALLOWED,
    "modules_to_save": _ALLOWED,
    "peft_config": _ALLOWED,
    "prefix": _ALLOWED,
    "print_trainable_parameters": _ALLOWED,
    "supports_lora_conversion": _ALLOWED,
    "target_module_mapping": _ALLOWED,
    "tuner_layer_cls": _ALLOWED,
    "uses_shared_state": _ALLOWED,
    # Nothing is ever merged.
    "unmerge_adapter": _ALLOWED,
    # Of the one adapter that there is they do nothing, and refuse another.
    "set_adapter": _ALLOWED,
    # What makes an adapter, takes it away, or changes it.
    "add_adapter": BEFORE,
    "add_weighted_adapter": BEFORE,
    "delete_adapter": BEFORE,
    "enable_peft_hotswap": BEFORE,
    "from_pretrained": "PeftModel.from_pretrained(base, folder, is_trainable=True) gives what megatier.stream takes.",
    "inject_adapter": BEFORE,
    "load_adapter": BEFORE,
    "subtract_mutated_init": BEFORE,
    "unload": "Streamed.disable_adapter() gives the forwards of the base, and the base's folder its weights.",
    # What changes how it is trained.
    "enable_input_require_grads": _ALLOWED,
    "prepare_model_for_gradient_checkpointing": 'megatier.stream(..., activations="recompute") is the way to do that.',
    "set_requires_grad": TRAINED,
    "disable_adapter_layers": SWITCHED,
    "disable_adapters": SWITCHED,
    "enable_adapter_layers": SWITCHED,
    "enable_adapters": SWITCHED,
    # What takes weights out.
    "get_adapter_state_dict": "Streamed.state_dict() has them, and Streamed.export(folder) writes them.",
    "get_prompt": PROMPTS,
    "get_prompt_embedding_to_save": PROMPTS,
    "merge_adapter": MERGED,
    "merge_and_unload": MERGED,
    "push_to_hub": WRITTEN,
    "save_pretrained": WRITTEN,
}
"""The public methods and properties of PEFT's models, and of transformers' models for adapters, with what to do
instead."""

_LAYER_METHODS: dict[str, str] = {
    "delete_adapter": BEFORE,
    "enable_adapters": SWITCHED,
    "merge": MERGED,
    "reset_lora_parameters": BEFORE,
    "set_adapter": BEFORE,
    "set_base_weight": BEFORE,
    "set_requires_grad": TRAINED,
    "unload_and_optionally_merge_module": MERGED,
    "update": BEFORE,
    "update_layer": BEFORE,
    **dict.fromkeys(("corda_init", "loftq_init", "lora_ga_init", "mica_init", "olora_init"), BEFORE),
    **dict.fromkeys(("orthogonal_init", "pissa_init", "init_modules"), BEFORE),
}
"""Refused methods of PEFT's layers. The layers' forwards call some of the other methods, with bound weights."""

_MODEL_METHODS = (
    *("add_adapter", "delete_adapter", "load_adapter", "set_adapter"),
    *("disable_adapters", "enable_adapters", "enable_peft_hotswap", "get_adapter_state_dict"),
)
"""Methods of transformers' models that change adapters or take them out."""


def refuse_unknown(kind: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of a PEFT class refuse all of its public methods that are not known to work."""
    kept = {*dir(nn.Module), *vars(kind)}
    for name in dir(kind):
        is_public = not name.startswith("_")
        if not is_public or name in kept or not callable(getattr(kind, name)):
            continue

        # A method of a newer release is refused like one that makes an adapter, until it has been reviewed.
        remedy = METHODS.get(name, BEFORE)
        if remedy is not _ALLOWED:
            # A static method also refuses calls on the class.
            refusing = functools.partial(refuse, name, remedy)
            setattr(kind, name, staticmethod(refusing))
    return kind


def guard_adapters(model: nn.Module) -> None:
    """Make a streamed model and PEFT's layers in it refuse methods that would change or remove adapters."""
    # `set_adapter` of PEFT's models does nothing here, but that of transformers changes modules.
    of_model = {name: METHODS[name] or BEFORE for name in _MODEL_METHODS}
    _guard(model, of_model)
    vars(model)["active_adapters"] = functools.partial(list, [ADAPTER])
    for module in model.modules():
        if is_adapter(module):
            _guard(module, _LAYER_METHODS)


def _guard(module: nn.Module, refused: dict[str, str]) -> None:
    kind = type(module)
    for name, remedy in refused.items():
        # On the instance, since the class is PEFT's, and other models use it too.
        if callable(getattr(kind, name, None)):
            vars(module)[name] = functools.partial(refuse, name, remedy)


def refuse(name: str, remedy: str, *_: object, **__: object) -> NoReturn:
    """Refuse a method of PEFT's.

    Raises:
        StreamedModelError: always.
    """
    raise StreamedModelError(
        f"{name} would change adapters of a streamed model, or take them out of it, and their weights lie on "
        f"megatier's tiers. {remedy}"
    )
