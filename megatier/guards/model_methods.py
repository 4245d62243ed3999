"""Methods of a streamed model that do something else than its own: what moves, gives or takes weights names the way."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from megatier.errors import StreamedModelError

CAST_METHODS: Mapping[str, torch.dtype | torch.device] = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
    "cuda": torch.device("cuda"),
    "cpu": torch.device("cpu"),
}
"""Methods that ask for a dtype or a device as `to` does."""
CHECKPOINTING = ("gradient_checkpointing_enable", "activation_checkpointing_enable")
"""Methods that ask for what megatier decides, by the names of transformers."""
TRAINING_PROGRAMS = ("transformers", "trl", "accelerate", "peft", "axolotl")
"""Programs that call these methods by an argument of their own, about which their guards speak."""


def guard_methods(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Let a model whose weights lie on tiers refuse `to`, `state_dict`, and what takes weights in or out.

    Args:
        model: the model.
        device: the device on which it computes, and where `to` leaves it.
        dtype: the dtype in which it computes.
    """
    model.register_state_dict_pre_hook(_refuse_state_dict)
    model.register_load_state_dict_pre_hook(_refuse_load)

    # On the instance, since its class is transformers' own, of which other models are not streamed.
    methods = vars(model)
    methods["to"] = functools.partial(_stay, model, device, dtype)
    for name in CAST_METHODS:
        methods[name] = functools.partial(_stay_here, model, device, dtype, name)
    for name in CHECKPOINTING:
        methods[name] = _ignore_checkpointing
    methods["push_to_hub"] = _refuse_push
    methods["save_pretrained"] = functools.partial(_save, model)


def forward_through(enter: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that goes through `enter` and keeps its own signature, at which trainers look."""

    @functools.wraps(forward)
    def entering(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return enter(forward, *args, **kwargs)

    # Who compiles the whole model means its layers, which are compiled by themselves.
    plain: Callable[..., Any] = torch.compiler.disable(entering)
    return plain


def _stay(model: nn.Module, here: torch.device, computes: torch.dtype, *args: Any, **kwargs: Any) -> nn.Module:  # noqa: ANN401
    """Stand in for `Module.to`: the model stays where it computes, and is asked for nothing else.

    Raises:
        StreamedModelError: another device or dtype is asked for.
    """
    # Typed by torch as if a device and a dtype were always given.
    asked: tuple[torch.device | None, torch.dtype | None] = torch._C._nn._parse_to(*args, **kwargs)[:2]
    return _stay_at(model, here, computes, "to", *asked)


def _stay_here(model: nn.Module, here: torch.device, computes: torch.dtype, name: str, *where: Any) -> nn.Module:  # noqa: ANN401
    """Stand in for a method of `CAST_METHODS`; `cuda` may be given a device."""
    asked = CAST_METHODS[name]
    if isinstance(asked, torch.dtype):
        return _stay_at(model, here, computes, name, None, asked)
    device = torch.device(asked.type, *where) if where else asked
    return _stay_at(model, here, computes, name, device, None)


def _stay_at(
    model: nn.Module,
    here: torch.device,
    computes: torch.dtype,
    name: str,
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> nn.Module:
    """Return the model, which stays where it is.

    Raises:
        StreamedModelError: another device or dtype is asked for, by the method of this name.
    """
    is_here = device is None or (device.type == here.type and device.index in (None, here.index or 0))
    if is_here and dtype in (None, computes):
        return model
    asked = " and ".join(str(part) for part in (device, dtype) if part is not None)
    raise StreamedModelError(
        f"the model was to move to {asked}, but its weights stay on megatier's tiers and compute on {here} in "
        f"{computes}. Leave out .{name}(), or call Accelerator.prepare without the model; tiers.device and "
        "compute_dtype of megatier.stream choose another place."
    )


def _ignore_checkpointing(*_: object, **__: object) -> None:
    if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] not in TRAINING_PROGRAMS:
        warnings.warn(
            "gradient checkpointing is not switched on: the argument activations of megatier.stream decides whether "
            'activations are kept or computed again. Open the model with activations="recompute".',
            stacklevel=2,
        )


def _refuse_state_dict(_: nn.Module, __: str, keep_vars: bool) -> None:
    # A caller that asks with keep_vars wants names and places, as `Streamed.state_dict` does, not the weights.
    if not keep_vars:
        raise StreamedModelError(
            "the weights lie on megatier's tiers, not in the model: take them from Streamed.state_dict(), or write "
            "them with Streamed.export(folder)."
        )


def _refuse_load(*_: object) -> NoReturn:
    raise StreamedModelError(
        "load_state_dict cannot reach the weights on megatier's tiers: take back a saved state with "
        "Streamed.restore(folder), or give the weights to megatier.stream as a folder or a model in RAM."
    )


def _save(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Stand in for `PreTrainedModel.save_pretrained`, which writes a config before it asks for weights.

    Raises:
        StreamedModelError: no weights are given with it.
    """
    # By place they are its third argument.
    if len(args) < 3 and kwargs.get("state_dict") is None:
        raise StreamedModelError(
            "save_pretrained cannot reach the weights on megatier's tiers: write a folder that from_pretrained loads "
            "with Streamed.export(folder), or give it state_dict=Streamed.state_dict()."
        )
    return type(model).save_pretrained(model, *args, **kwargs)


def _refuse_push(*_: object, **__: object) -> NoReturn:
    # transformers makes the repository before it asks for weights, and would leave it empty.
    raise StreamedModelError(
        "push_to_hub cannot reach the weights on megatier's tiers: write a folder with Streamed.export(folder), and "
        "push the model that from_pretrained loads from it, or upload the folder itself with `hf upload`."
    )
