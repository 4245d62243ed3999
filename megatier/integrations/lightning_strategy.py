"""MegatierStrategy: Lightning's Trainer over a streamed model.

    with megatier.stream("path", accumulation_steps=2) as streamed:
        Trainer(strategy=MegatierStrategy(streamed), accumulate_grad_batches=2).fit(Module(streamed), loader)

The LightningModule holds `streamed.model`, and its `configure_optimizers` gives `streamed.optimizer`. The strategy
needs the extra `lightning`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from megatier.config.values import clip_of
from megatier.durable import committing, discard, restore_replaced
from megatier.errors import ConfigError
from megatier.integrations.shared_batches import sharing
from megatier.integrations.streamed import Streamed
from megatier.patch import patched
from megatier.trainer_guards.arguments import other_accumulation, refuse_any

LIGHTNING_FILE = "lightning.ckpt"
"""The file in a checkpoint's folder with everything that Lightning itself stores."""


class ClippedByUpdate(Precision):
    """Lightning's plain precision without its clipping, since the update clips, and no gradient is left to scale."""

    def clip_gradients(self, *_: object, **__: object) -> None:
        """Do nothing."""


class MegatierStrategy(SingleDeviceStrategy):
    """Lightning's loop, data, schedules, callbacks and logs over megatier's step.

    Clipping and accumulation are set on the Trainer. A checkpoint is a folder with Lightning's file and `step-...`,
    which holds masters and moments. A checkpoint of weights alone has an export for `from_pretrained` instead, from
    which nothing resumes.

    Attributes:
        streamed: the streamed model.
        parallel_devices: the devices that the Trainer was told to use; the Trainer sets it.
        num_nodes: the number of nodes that the Trainer was told to use; the Trainer sets it.
    """

    parallel_devices: tuple[torch.device, ...] = ()
    num_nodes = 1

    def __init__(self, streamed: Streamed) -> None:
        """Take a streamed model, which stays open after the run.

        Raises:
            ConfigError: several ranks share the model. This strategy would give all of them the same batches.
        """
        if streamed.num_ranks > 1:
            raise ConfigError(
                f"MegatierStrategy runs in one process, and {streamed.num_ranks} ranks share this model. Start it "
                "without torchrun, or write the loop yourself over megatier.stream."
            )

        # Lightning needs the index of the GPU, which a streamed model's device does not have.
        is_cuda = streamed.device.type == "cuda"
        super().__init__(torch.device("cuda", torch.cuda.current_device()) if is_cuda else streamed.device)
        self.streamed = streamed

    def setup(self, trainer: Trainer) -> None:
        """Check the Trainer and the LightningModule, and drop an unfinished step of an earlier run.

        Raises:
            ConfigError: Trainer or LightningModule ask for something that a streamed model does not have.
        """
        module = self.lightning_module

        # `ClippedByUpdate` is left from an earlier run with this strategy.
        refuse_any(
            (
                tuple(self.parallel_devices) != (self.root_device,) or self.num_nodes > 1,
                f"the streamed model computes on {self.root_device} alone; give the Trainer devices=1 and num_nodes=1.",
            ),
            (
                type(self.precision_plugin) not in (Precision, ClippedByUpdate),
                "the precision of a streamed model is compute_dtype of megatier.stream; leave precision out.",
            ),
            (
                all(child is not self.streamed.model for child in module.children()),
                f"{type(module).__name__} does not hold the streamed model: make streamed.model an attribute of it.",
            ),
        )

        # A run that failed may have left a step open, in which nothing could be evaluated.
        self.streamed.abandon()
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Check what training needs beyond evaluation, and take over the Trainer's clipping.

        Raises:
            ConfigError: Trainer or LightningModule ask for something that a streamed model does not have.
        """
        module = self.lightning_module

        # Parameters of the module's own head or adapter would be in no optimizer.
        with self._without_model():
            others = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        refuse_any(
            (
                not module.automatic_optimization,
                "manual optimization is not for this strategy: leave automatic_optimization on, or write the loop "
                "yourself over megatier.stream.",
            ),
            other_accumulation(
                "accumulate_grad_batches", trainer.accumulate_grad_batches, self.streamed.accumulation_steps
            ),
            (
                trainer.gradient_clip_algorithm == "value" or is_overridden("configure_gradient_clipping", module),
                "a streamed model is clipped by its global norm: give the Trainer gradient_clip_val alone.",
            ),
            (others, f"{', '.join(others)}: only streamed parameters are trained; freeze all others."),
        )

        # The Trainer asks the precision plugin to clip after the backward, when the gradients are gone.
        self.streamed.clip = clip_of(trainer.gradient_clip_val)
        self.precision_plugin = ClippedByUpdate()
        super().setup_optimizers(trainer)

        # Known only now, since the call above creates the optimizers.
        refuse_any(
            (
                self.optimizers != [self.streamed.optimizer],
                "a streamed model brings its optimizer: configure_optimizers has to give streamed.optimizer.",
            )
        )

    def process_dataloader(self, dataloader: object) -> object:
        """Return Lightning's loader, whose workers report if shared memory is too small for their batches."""
        loader: object = super().process_dataloader(dataloader)
        return sharing(loader) if isinstance(loader, DataLoader) else loader

    def on_train_start(self) -> None:
        """Check that the batches make whole steps.

        Raises:
            ConfigError: an epoch, or the training between two validations, ends within a step.
        """
        trainer = self.lightning_module.trainer
        steps = self.streamed.accumulation_steps

        # At the end of an epoch Lightning would call `optimizer.step` after fewer backwards. A validation would find an
        # open step, in which weights cannot be read.
        counts = {"an epoch": trainer.num_training_batches}
        if trainer.enable_validation:
            counts["val_check_interval"] = trainer.val_check_batch
        for interval, count in counts.items():
            if isinstance(count, int) and count % steps:  # an iterable dataset does not say how many there are
                raise ConfigError(
                    f"{interval} has {count} batches, no multiple of accumulate_grad_batches ({steps}), and every step "
                    "of a streamed model has as many. Set limit_train_batches or val_check_interval to a multiple."
                )

    def on_validation_start(self) -> None:
        """Drop a step that was cut short, since a validation reads weights."""
        self._drop_cut_step()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, so that `setup` refuses what cannot be trained before state is loaded."""
        return True

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,  # noqa: ANN401 - Lightning's
    ) -> None:
        """Write a checkpoint folder. An older one of the same name stays whole until the new one is on the drive.

        Raises:
            StreamedModelError: a step is open.
            CapacityError, TransferError: see `Streamed.save` and `Streamed.export`.
        """
        self._drop_cut_step()
        target = Path(filepath)
        partial = target.with_name(f".{target.name}.partial")

        # With save_weights_only Lightning leaves out the optimizer's state, so moments are not needed.
        write = self.streamed.save if "optimizer_states" in checkpoint else self.streamed.export
        with committing(partial, target, "a checkpoint", replaces=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            restore_replaced(target)
            discard(partial)  # left by a process that was killed
            write(partial)
            super().save_checkpoint(checkpoint, partial / LIGHTNING_FILE, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load masters, moments and the step number, and return the contents of Lightning's file, which has the rest.

        Raises:
            CheckpointError: see `Streamed.restore`.
        """
        # A process that was killed between two renames has left the old folder under another name.
        restore_replaced(Path(checkpoint_path))
        self.streamed.restore(checkpoint_path)
        loaded: dict[str, Any] = super().load_checkpoint(Path(checkpoint_path) / LIGHTNING_FILE, weights_only)
        return loaded

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the LightningModule without the streamed model: metrics, frozen modules."""
        with self._without_model():
            state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state that `lightning_module_state_dict` returned."""
        with self._without_model():
            super().load_model_state_dict(checkpoint, strict)

    def model_to_device(self) -> None:
        """Move the LightningModule without the streamed model."""
        with self._without_model():
            super().model_to_device()

    def teardown(self) -> None:
        """Consistency down as Lightning does; the streamed model stays where it is."""
        with self._without_model():
            super().teardown()

    def _drop_cut_step(self) -> None:
        """Drop the open step if Lightning is stopping.

        It may stop between the backwards of a step (max_time, an exception) without updating. If it goes on, an open
        step is a mistake, which the streamed model refuses.
        """
        trainer = self.lightning_module.trainer
        if trainer.should_stop or trainer.interrupted:
            self.streamed.abandon()

    @contextlib.contextmanager
    def _without_model(self) -> Iterator[None]:
        """Remove the streamed model from the LightningModule inside, so that it is not moved or in the state dict."""
        module: LightningModule = self.lightning_module
        children = module._modules

        # A module may hold it under several names. All of them are restored, also after an error.
        names = [name for name, child in children.items() if child is self.streamed.model]
        nothing = dict.fromkeys(names)
        with patched(children, **nothing):
            yield
