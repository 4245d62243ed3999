"""MegatierTrainer: Hugging Face's Trainer over a streamed model.

    with megatier.stream("path", accumulation_steps=args.gradient_accumulation_steps) as streamed:
        MegatierTrainer(streamed, args, train_dataset=...).train()

`StreamedTraining` is the mixin for trainers that derive from it: `class Mine(StreamedTraining, SFTTrainer)`. Both need
the extra `trainer` (accelerate).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer

from megatier.durable import discard
from megatier.errors import ConfigError
from megatier.integrations.streamed import Streamed

STATE_FOLDER = "megatier"
"""Folder in a checkpoint of the Trainer, with masters and moments."""

# The mixin comes before some Trainer among the bases of a class, and is none itself.
if TYPE_CHECKING:
    Base = Trainer
else:
    Base = object


class StreamedTraining(Base):
    """Mixin: the Trainer's loop, data, schedules, callbacks and logs over megatier's step.

    Learning rate, schedule, betas, decay, clipping and accumulation are those of TrainingArguments. Checkpoints hold an
    export for `from_pretrained` and, for resuming, megatier's own with masters and moments. Both are streamed.

    Attributes:
        streamed: the streamed model.
    """

    def __init__(self, model: Streamed, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the Trainer's
        """Take a streamed model in the place of the Trainer's model, and all other arguments of the Trainer.

        Raises:
            ConfigError: an argument of the Trainer asks for something that a streamed model does not have.
        """
        self.streamed = model

        # Two places: the Trainer and accelerate then move nothing, and split no batch over several GPUs.
        model.model.hf_device_map = {"streamed": "disk", "bound": str(model.device)}  # type: ignore[assignment]
        super().__init__(model.model, *args, **kwargs)
        self._check_arguments()

        # The update clips by the exact norm. In TrainingArguments 0 means off.
        model.clip = self.args.max_grad_norm or None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the streamed model's own optimizer, with the settings of TrainingArguments."""
        if self.optimizer is None:
            args = self.args
            self.optimizer = self.streamed.optimizer

            # The second group are biases and norms, which do not decay.
            betas = (args.adam_beta1, args.adam_beta2)
            for group, decay in zip(self.optimizer.param_groups, (args.weight_decay, 0.0), strict=True):
                group.update(lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, weight_decay=decay)
        return self.optimizer

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's own loader, whose batches must make whole steps.

        Raises:
            ConfigError: the last step of an epoch would have fewer backwards than the others.
        """
        loader = super().get_train_dataloader()
        steps = self.args.gradient_accumulation_steps
        try:
            rest = len(loader) % steps
        except TypeError:  # an iterable dataset does not say how many there are
            rest = 0

        # At the end of an epoch the Trainer calls `optimizer.step` after fewer backwards than the step needs.
        if rest:
            raise ConfigError(
                f"an epoch has {len(loader)} batches, no multiple of gradient_accumulation_steps ({steps}), and every "
                f"step of a streamed model has as many. Leave {rest} batches of data out, for example by "
                "train_dataset.select(range(...)), or choose another per_device_train_batch_size."
            )
        return loader

    def _clip_grad_norm(self, model: nn.Module) -> float:
        """Return the exact norm, by which the update clips; no gradient is scaled here."""
        return self.streamed.grad_norm()

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        return self.streamed.grad_norm() if grad_norm is None else grad_norm

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the Trainer's files about the run, with an export as the weights."""
        folder = Path(output_dir or self.args.output_dir or ".")

        # An export wants an empty folder, and the Trainer's may hold files already. So the export gets a folder of
        # its own, and its files move from there.
        export = folder / ".export"
        discard(export)  # left by a process that was killed
        self.streamed.export(export)
        for file in export.iterdir():
            file.replace(folder / file.name)
        export.rmdir()

        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the Trainer's files for resuming, whose optimizer has settings alone, and masters and moments."""
        super()._save_optimizer_and_scheduler(output_dir)
        self.streamed.save(Path(output_dir) / STATE_FOLDER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load masters, moments and the number of the step; the Trainer loads the rest."""
        self.streamed.restore(Path(resume_from_checkpoint) / STATE_FOLDER)

    def _load_best_model(self) -> None:
        """Load the best checkpoint's masters, with its moments."""
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _check_arguments(self) -> None:
        """Refuse arguments of the Trainer that a streamed model cannot follow.

        Raises:
            ConfigError: names the first one, and what to set instead.
        """
        args = self.args
        declared = self.streamed.accumulation_steps
        given = args.gradient_accumulation_steps
        gives_optimizer = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        wants_logits = self.compute_metrics is not None and not self.streamed.has_logits
        refusals = (
            (
                given != declared,
                f"gradient_accumulation_steps is {given}, and megatier.stream was told accumulation_steps={declared}; "
                "name the same number in both.",
            ),
            (args.fp16, "fp16 scales the loss, and the norm with it; train in bf16 (compute_dtype) instead."),
            (args.torch_compile, "torch_compile does not know streamed weights; megatier.stream has compile."),
            (
                "adamw_torch" not in args.optim,
                f"optim is {args.optim}; a streamed model has AdamW: leave optim out.",
            ),
            (gives_optimizer, "a streamed model brings its optimizer; give none to the Trainer."),
            (wants_logits, "compute_metrics needs logits: call megatier.stream with fused_loss=False."),
            (
                args.load_best_model_at_end and args.save_only_model,
                "load_best_model_at_end needs the state that save_only_model leaves out.",
            ),
        )

        for holds, message in refusals:
            if holds:
                raise ConfigError(message)


class MegatierTrainer(StreamedTraining, Trainer):
    """Hugging Face's Trainer over a streamed model; see `StreamedTraining`."""
