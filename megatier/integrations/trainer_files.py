"""Saves and loads the files of a trainer over a streamed model: exports as weights, and masters with moments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatier.config.lora import ADAPTER_FILE
from megatier.durable import discard
from megatier.errors import CheckpointError, ConfigError
from megatier.integrations.streamed import Streamed
from megatier.integrations.trainer_rows import Base
from megatier.trainer_guards.arguments import refuse_any

STREAMED_FOLDER = "megatier"
"""The folder in a Trainer's checkpoint with masters and moments."""
_WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
"""The names of a model's weight files, whole or in shards, and of their index."""


class TrainerFiles(Base):
    """The part of `StreamedTraining` that writes and reads files."""

    streamed: Streamed
    _has_saved: bool
    """Whether the trainer's `save_model` has called `_save`."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model on all ranks, since each has shards of it. Older Trainers save on the first rank alone."""
        self._has_saved = False
        super().save_model(output_dir, _internal_call)
        if not self._has_saved and not self.args.should_save:
            self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the Trainer's files, with an export as the weights."""
        self._has_saved = True
        folder = Path(output_dir or self.args.output_dir or ".")

        # An export needs an empty folder, and the Trainer's may hold files. So the export is written to a temporary
        # folder, from which its files are moved.
        export = folder / ".export"
        if self.args.should_save:
            discard(export)  # left by a process that was killed
            refuse_any(
                (
                    (folder / ADAPTER_FILE).exists() and not self.streamed.has_adapters,
                    f"{folder} holds an adapter ({ADAPTER_FILE}), which from_pretrained would put over the "
                    "model. Save the model to another folder.",
                )
            )
        # On all ranks, since each has shards. The first one writes.
        self.streamed.export(export)
        if not self.args.should_save:
            return

        written = {file.name for file in export.iterdir()}
        for name in written:
            (export / name).replace(folder / name)
        export.rmdir()

        # An older save with another number of shards: from_pretrained would load it instead of the new weights.
        for file in folder.iterdir():
            if _WEIGHT_FILES.fullmatch(file.name) and file.name not in written and not self.streamed.has_adapters:
                file.unlink()
        # As in the Trainer's `_save`: without its own tokenizer it saves the collator's.
        tokenizer = self.processing_class
        if tokenizer is None:
            tokenizer = getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the Trainer's files for resuming (the optimizer's file has only settings), and masters and moments."""
        super()._save_optimizer_and_scheduler(output_dir)
        self.streamed.save(Path(output_dir) / STREAMED_FOLDER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load masters, moments and the step number. The Trainer loads the rest.

        Raises:
            CheckpointError: there are none.
            ConfigError: its steps had another number of groups, so the Trainer would continue at other rows.
        """
        folder = Path(resume_from_checkpoint) / STREAMED_FOLDER
        streamed = self.streamed
        if not folder.is_dir():
            raise CheckpointError(
                f"{resume_from_checkpoint} has no {folder.name}/ with the masters and moments of a streamed model: it "
                "is no checkpoint, was saved with save_only_model, or by another trainer. To begin with its weights "
                "alone, give its path to megatier.stream, and leave resume_from_checkpoint out."
            )
        # The Trainer counts rows by steps, and skips the rows of earlier steps.
        before = streamed.saved_groups(folder)
        if before not in (None, streamed.groups) and not self.args.ignore_data_skip:
            assert before is not None
            each, rest = divmod(before, streamed.num_ranks)
            remedy = (
                f"Start a number of ranks that divides {before}"
                if rest
                else f"Set gradient_accumulation_steps and accumulation_steps to {each}"
            )
            raise ConfigError(
                f"{resume_from_checkpoint}: its steps had {before} backwards of all ranks, and those of this run have "
                f"{streamed.groups}, so the Trainer would go on at other rows. {remedy}, or set ignore_data_skip to "
                "begin with the first rows again."
            )
        streamed.restore(folder)

    def _load_best_model(self) -> None:
        """Load the best checkpoint's masters. Moments stay as they are, as in the Trainer."""
        assert self.state.best_model_checkpoint is not None
        self.streamed.restore_weights(Path(self.state.best_model_checkpoint) / STREAMED_FOLDER)
