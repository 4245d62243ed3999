"""The plugin for Axolotl: `plugins: [megatier.plugins.axolotl.MegatierPlugin]`, with a section `megatier` beside it.

Axolotl prepares data and arguments, builds its own trainer, and saves, as without the plugin. But it loads its model on
meta, and its trainer gets a streamed model instead.
"""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from transformers import Trainer

from megatier.plugins.program_trainer import Opening, ProgramTraining, over
from megatier.plugins.refusals import AXOLOTL_KERNELS, SECTION, check_axolotl, read_plugin_section


class MegatierArgs(BaseModel):
    """The keys that the plugin adds to a config of Axolotl's."""

    megatier: dict[str, Any] | None = None


class AxolotlTraining(ProgramTraining):
    """Mixin for Axolotl's trainer."""

    def train(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the Trainer's
        """Train as the Trainer does; an interrupt ends the run, and the last checkpoint stays.

        Axolotl would save the model in the signal handler, at any point of its threads.
        """
        # Axolotl has set its handler by now. Only the main thread can set one.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return super().train(*args, **kwargs)


class MegatierPlugin(BasePlugin):
    """Axolotl's hooks, in the order in which it calls them."""

    def __init__(self) -> None:
        """Begin without a model."""
        super().__init__()
        self._opened = ExitStack()

    def register(self, cfg: dict[str, Any]) -> None:
        """Refuse settings that a streamed model cannot follow, as the user wrote them.

        Raises:
            ConfigError: there is one. The message says what to do instead.
        """
        check_axolotl(cfg)
        read_plugin_section(cfg.get(SECTION))
        # Set explicitly, since Axolotl enables them unless they are off.
        for name in AXOLOTL_KERNELS:
            cfg[name] = False

    def get_input_args(self) -> str:
        """Return the name of the class that knows the plugin's keys."""
        return f"{__name__}.{MegatierArgs.__name__}"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:  # noqa: ANN401 - Axolotl's
        """Make Axolotl load the model on meta. Datasets are Axolotl's own.

        Before this hook Axolotl overrides the device, and the next hook comes after it was used.
        """
        cfg.device_map = {"": "meta"}

    def get_trainer_cls(self, cfg: Any) -> type[Trainer]:  # noqa: ANN401 - Axolotl's
        """Return Axolotl's trainer over a streamed model."""
        from axolotl.core.trainers import AxolotlTrainer

        is_bf16 = cfg.torch_dtype is torch.bfloat16
        dtype = torch.bfloat16 if is_bf16 else torch.float32
        section = read_plugin_section(cfg.get(SECTION))
        opening = Opening(section, dtype, self._opened)
        return over(AxolotlTrainer, opening, AxolotlTraining)

    def post_train_unload(self, cfg: Any) -> None:  # noqa: ANN401 - Axolotl's
        """Close the streamed model, which removes its block files."""
        self._opened.close()
