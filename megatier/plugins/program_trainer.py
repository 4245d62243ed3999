"""Trainers of programs that load a model themselves: what they loaded says what to stream, and from which folder."""

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
from megatier.foreign import note, one_version, shown
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
"""Entries of a model's config that a program may change without a change to what the model computes in training."""


@dataclass(frozen=True)
class Opening:
    """The way in which a program's model is opened.

    Attributes:
        section: the user's section, as `read_section` returns it.
        compute_dtype: type of weights and activations, torch.bfloat16 or torch.float32.
        opened: closes the streamed model when the program is done with it.
    """

    section: Mapping[str, Any]
    compute_dtype: torch.dtype
    opened: ExitStack


class ProgramTraining(StreamedTraining):
    """Mixin for a trainer that a program hands a model which it loaded, on meta if it can; see `StreamedTraining`.

    Only the structure of that model is used: its folder, its config, what requires a gradient, and the config of its
    adapters. `save_pretrained` of it then writes what was trained, since programs save the model that they loaded.
    """

    opening: ClassVar[Opening]

    @one_version()
    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the Trainer's
        """Open the folder that a model was loaded from, in its place.

        Args:
            model: a model of transformers that was loaded from a folder or the hub, or a `PeftModel` around one.
            *args: those of the Trainer.
            **kwargs: those of the Trainer.

        Raises:
            ConfigError: the model is another one than its folder holds; or see `StreamedTraining`.
        """
        loaded, adapters = unwrap_peft(model)
        settings = self.given(model, *args, **kwargs)["args"]
        base: Any = loaded
        folder = resolve(base.name_or_path)

        # transformers opens the file past us, so it is noted here, and compared when the weights are read.
        note(folder / MODEL_CONFIG_FILE)
        check_same_config(base.config, AutoConfig.from_pretrained(folder))
        # With adapters all of the base is frozen anyway.
        frozen: list[str] = []
        if not adapters:
            frozen = [name for name, parameter in loaded.named_parameters() if not parameter.requires_grad]

        # Programs ask for it on the model, by the arguments, or by both.
        is_asked_of_modules = any(getattr(module, "gradient_checkpointing", False) for module in loaded.modules())
        recomputes = is_asked_of_modules or settings.gradient_checkpointing

        chosen = {"seed": settings.seed, **self.opening.section}
        tiers = read_tiers(chosen.pop("tiers", None))
        # Settings of the program's own. The section has none of them: `read_section` refuses these names.
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
        """Take a program's own trainer as it is: what its overrides are for are settings, which `refusals` knows."""


def over(trainer: type[Trainer], opening: Opening, mixin: type[ProgramTraining] = ProgramTraining) -> type[Trainer]:
    """Return a trainer's class with the mixin in front."""
    return type(f"Streamed{trainer.__name__}", (mixin, trainer), {"opening": opening})


def check_same_config(used: PretrainedConfig, stored: PretrainedConfig) -> None:
    """Refuse a model that a program has made into another one than its folder holds.

    Args:
        used: the config of the model that the program loaded.
        stored: that of its folder.

    Raises:
        ConfigError: names the first entry that differs.
    """
    of_used = _entries(used.to_dict())
    of_stored = _entries(stored.to_dict())
    for name in sorted(of_used.keys() | of_stored.keys()):
        mine = of_used.get(name)
        theirs = of_stored.get(name)
        if mine != theirs:
            raise ConfigError(
                f"the model's {name} is {shown(str(mine))} here and {shown(str(theirs))} in its folder, from which its "
                "weights are streamed. Leave out what changes it (added tokens change vocab_size), or save the changed "
                "model into a folder of its own."
            )


def _entries(config: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    """Return the entries of a config, and of those inside it, by their paths, but for those that are neutral."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        # Names with an underscore are transformers' own notes, such as the path that a model was loaded from.
        if str(name).startswith("_") or name in NEUTRAL:
            continue
        path = f"{above}{name}"
        if isinstance(value, Mapping):
            found |= _entries(value, f"{path}.")
        else:
            found[path] = value
    return found
