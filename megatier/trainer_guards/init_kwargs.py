"""`model_init_kwargs` of TRL, with which it would open a model: taken as arguments of `megatier.stream`, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatier.errors import ConfigError
from megatier.foreign import printable

COMPUTE_DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16"}
"""Names of dtypes, and the compute dtypes that they stand for."""
ASKS_NOTHING: Mapping[str, tuple[object, ...]] = {
    "dtype": ("auto",),
    "torch_dtype": ("auto",),
    "revision": ("main",),
    "subfolder": ("",),
    "trust_remote_code": (False,),
    "use_cache": (False, True),
    "low_cpu_mem_usage": (False, True),
    "device_map": ("auto",),
    "use_safetensors": (True,),
    "use_kernels": (False,),
    "local_files_only": (False,),
    "force_download": (False,),
    "output_loading_info": (False,),
    "ignore_mismatched_sizes": (False,),
}
"""Values that ask for what is so anyway, or has no effect on training. None does so for all arguments."""


def read_init_kwargs(given: Mapping[str, Any], stream_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `megatier.stream` that `model_init_kwargs` stand for.

    Args:
        given: the arguments that TRL would give `from_pretrained`.
        stream_kwargs: the arguments of `megatier.stream` that were given too.

    Raises:
        ConfigError: names the first one that cannot be taken, and what to do instead.
    """
    asked: dict[str, Any] = {}
    for name, value in given.items():
        # Either one of torch, or its name.
        dtype = COMPUTE_DTYPE_NAMES.get(str(value).removeprefix("torch.")) if name in ("dtype", "torch_dtype") else None
        if value is None or any(value is one or value == one for one in ASKS_NOTHING.get(name, ())):
            continue
        if dtype is not None:
            asked["compute_dtype"] = dtype
        elif name == "attn_implementation":
            asked["attention"] = value
        else:
            raise ConfigError(
                f"model_init_kwargs has {name} {printable(repr(value))}: megatier opens the model, and cannot follow "
                "it. Leave it out; arguments of megatier.stream go into stream_kwargs."
            )

    # The same value in both places is no contradiction.
    for name, value in asked.items():
        if stream_kwargs.get(name, value) not in (value, None):
            raise ConfigError(
                f"stream_kwargs has {name} {printable(repr(stream_kwargs[name]))}, and model_init_kwargs "
                f"{printable(repr(value))}. Give it once."
            )
    return asked
