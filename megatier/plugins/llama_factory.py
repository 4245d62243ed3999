"""The launcher for LLaMA-Factory: `python -m megatier.plugins.llama_factory config.yaml`, with a section `megatier`.

LLaMA-Factory has no registry of trainers, and its launcher accepts no other commands. So this does what that launcher
does in the process that it starts, with two trainers replaced and the model loaded on meta while the run lasts.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from megatier.errors import ConfigError, MegatierError
from megatier.patch import patched
from megatier.plugins.program_trainer import Opening, over
from megatier.plugins.refusals import SECTION, check_llama_factory, read_plugin_section

_TRAINERS = {"sft": "CustomSeq2SeqTrainer", "pt": "CustomTrainer"}
"""The name of the trainer in each stage's workflow."""


def run(arguments: Mapping[str, Any] | None = None, callbacks: Sequence[Any] = ()) -> None:
    """Train as `llamafactory-cli train` does, with a streamed model.

    Args:
        arguments: LLaMA-Factory's, with a section `megatier` of arguments of `megatier.stream`; None: read from the
            command line, a file and `key=value`.
        callbacks: of the Trainer.

    Raises:
        ConfigError: LLaMA-Factory is missing, or one of the arguments cannot be followed.
    """
    tuner = _load("llamafactory.train.tuner")
    given = tuner.read_args(dict(arguments) if arguments is not None else None)
    if not isinstance(given, dict):
        raise ConfigError("name a file of arguments first: python -m megatier.plugins.llama_factory config.yaml")
    # Removed, since LLaMA-Factory refuses unknown keys.
    section = read_plugin_section(given.pop(SECTION, None))
    check_llama_factory(given)

    is_bf16 = given.get("bf16") or given.get("pure_bf16")
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    with ExitStack() as opened:
        opening = Opening(section, dtype, opened)
        reader = on_meta(tuner.get_train_args)
        opened.enter_context(patched(vars(tuner), get_train_args=reader))

        # In the workflow, which has imported the trainer by name.
        for stage, name in _TRAINERS.items():
            workflow = _load(f"llamafactory.train.{stage}.workflow")
            streamed = over(getattr(workflow, name), opening)
            opened.enter_context(patched(vars(workflow), **{name: streamed}))
        tuner.run_exp(given, list(callbacks))


def on_meta(read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap LLaMA-Factory's argument reader so that the model is loaded on meta."""

    @functools.wraps(read)
    def reading(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - LLaMA-Factory's
        arguments = read(*args, **kwargs)
        # The model's arguments come first. LLaMA-Factory sets their device while it reads them, so it is set
        # afterwards.
        model_args = arguments[0]
        model_args.device_map = {"": "meta"}
        return arguments

    return reading


def _load(name: str) -> Any:  # noqa: ANN401 - LLaMA-Factory has no types
    """Import a module of LLaMA-Factory's.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"LLaMA-Factory is needed ({error}): pip install llamafactory.") from error


if __name__ == "__main__":
    try:
        run()
    except MegatierError as error:
        sys.exit(f"megatier: error: {error}")
