"""Adapts trainers of programs that load a model themselves, which shows what to stream and from which folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, Trainer

from megatier.adapters.given_adapters import unwrap_peft
from megatier.errors import ConfigError
from megatier.foreign import note, one_version, printable
from megatier.integrations.loop_settings import read_tiers
from megatier.integrations.transformers_trainer import StreamedTraining
from megatier.models.location import MODEL_CONFIG_FILE, resolve

NEUTRAL = frozenset(
    {
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "max_position_embeddings",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Entries of a model's config that a program may change without affecting what the model computes in training."""


@dataclass(frozen=True)
class Opening:
    """How a program's model is opened.

    Attributes:
        section: the user's section, as `read_section` returns it.
        compute_dtype: type of weights and activations, torch.bfloat16 or torch.float32.
        opened: closes the streamed model when the program is done.
    """

    section: Mapping[str, Any]
    compute_dtype: torch.dtype
    opened: ExitStack


class ProgramTraining(StreamedTraining):
    """Mixin for a trainer that gets a model which its program has loaded, on meta if it can; see `StreamedTraining`.

    Only the model's structure is used: its folder, its config, what requires a gradient, and its adapters' config. Its
    `save_pretrained` then writes what was trained, since programs save the model that they loaded.
    """

    opening: ClassVar[Opening]

    @one_version()
    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the Trainer's
        """Open the folder from which a model was loaded, and use that instead.

        Args:
            model: a model of transformers that was loaded from a folder or the hub, or a `PeftModel` around one.
            *args: those of the Trainer.
            **kwargs: those of the Trainer.

        Raises:
            ConfigError: the model differs from its folder; or see `StreamedTraining`.
        """
        loaded, adapters = unwrap_peft(model)
        settings = self.given(model, *args, **kwargs)["args"]
        base: Any = loaded
        folder = resolve(base.name_or_path)

        # transformers opens the file itself, so its version is recorded here and checked when the weights are read.
        note(folder / MODEL_CONFIG_FILE)
        check_same_config(base.config, AutoConfig.from_pretrained(folder))
        # With adapters the whole base is frozen anyway.
        frozen: list[str] = []
        if not adapters:
            frozen = [name for name, parameter in loaded.named_parameters() if not parameter.requires_grad]

        # Programs enable it on the model, in the arguments, or both.
        is_asked_of_modules = any(getattr(module, "gradient_checkpointing", False) for module in loaded.modules())
        recomputes = is_asked_of_modules or settings.gradient_checkpointing

        chosen = {"seed": settings.seed, **self.opening.section}
        tiers = read_tiers(chosen.pop("tiers", None))
        # The program's own settings, which `read_plugin_section` does not accept in the section.
        chosen |= {
            "compute_dtype": self.opening.compute_dtype,
            "attention": base.config._attn_implementation,
            "activations": "recompute" if recomputes else "keep",
            "frozen": frozen,
            "peft_config": adapters,
        }
        super().__init__(base.name_or_path, *args, tiers=tiers, stream_kwargs=chosen, **kwargs)
        self.opening.opened.enter_context(self.streamed)

        # Programs save the model that they loaded, which is on meta.
        def save_pretrained(save_directory: str, **_: Any) -> None:  # noqa: ANN401 - what is saved is known here
            self.save_model(save_directory)

        model.save_pretrained = save_pretrained  # type: ignore[assignment]

    def _check_methods(self) -> None:
        """Accept the program's own trainer, since `refusals` checks the settings that its overrides serve."""


def over(trainer: type[Trainer], opening: Opening, mixin: type[ProgramTraining] = ProgramTraining) -> type[Trainer]:
    """Return a subclass of a trainer with the mixin in front."""
    return type(f"Streamed{trainer.__name__}", (mixin, trainer), {"opening": opening})


def check_same_config(used: PretrainedConfig, stored: PretrainedConfig) -> None:
    """Refuse a model that a program has changed compared with its folder.

    Args:
        used: the config of the model that the program loaded.
        stored: that of its folder.

    Raises:
        ConfigError: an entry differs. The message names the first.
    """
    of_used = _entries(used.to_dict())
    of_stored = _entries(stored.to_dict())
    for name in sorted(of_used.keys() | of_stored.keys()):
        mine = of_used.get(name)
        theirs = of_stored.get(name)
        if mine != theirs:
            raise ConfigError(
                f"the model's {name} is {printable(str(mine))} here and {printable(str(theirs))} in its folder, from "
                "which its weights are streamed. Leave out what changes it (added tokens change vocab_size), or save "
                "the changed model into a folder of its own."
            )


def _entries(config: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    """Return the entries of a config by their paths, nested ones included, except neutral ones."""
    entries: dict[str, Any] = {}
    for name, value in config.items():
        # Names with an underscore are transformers' own records, such as the model's path.
        if str(name).startswith("_") or name in NEUTRAL:
            continue
        path = f"{above}{name}"
        if isinstance(value, Mapping):
            entries |= _entries(value, f"{path}.")
        else:
            entries[path] = value
    return entries
