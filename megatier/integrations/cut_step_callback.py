"""Handles a Trainer's step that a callback, or the end of a stream, has cut short between two of its backwards."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from megatier.errors import ConfigError
from megatier.integrations.streamed import Streamed

_STOPPED = (
    "a callback has set should_epoch_stop in on_substep_end, so an epoch ended within a step. The Trainer adds those "
    "gradients to the next step, and a streamed model cannot. Set it in on_step_end."
)
_ENDED = (
    "train_dataset does not say how many rows it has, and ended within a step. The Trainer adds those gradients to the "
    "next step, and a streamed model cannot. Give rows that make whole steps (per_device_train_batch_size times "
    "gradient_accumulation_steps), or max_steps that end with the epoch."
)


class CutStepCallback(TrainerCallback):
    """A callback that drops a step in which training was stopped. Its gradients change no weight, as in the Trainer.

    It runs before all other callbacks, which may save or evaluate at the end of the epoch.
    """

    def __init__(self, streamed: Streamed, losses: list[Tensor]) -> None:
        """Take the streamed model, and the losses of its open step."""
        self._streamed = streamed
        self._losses = losses
        self._cause = ""
        """Why the last epoch ended within a step; empty: it did not."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - the Trainer's
        """Drop an open step, such as one in which memory ran out before the Trainer tried a smaller batch."""
        self._streamed.abandon()
        self._losses.clear()
        self._cause = ""

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,  # noqa: ANN401
    ) -> None:
        """Drop the step that is still open."""
        if self._streamed.is_in_step:
            self._streamed.abandon()
            self._losses.clear()
            is_stopped = control.should_epoch_stop or control.should_training_stop
            self._cause = _STOPPED if is_stopped else _ENDED

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Refuse to go on where the Trainer would add the gradients of the cut step to those of the next one.

        Raises:
            ConfigError: the last epoch ended within a step.
        """
        # Refused only here, since after the last epoch there is no next step to which gradients could be added.
        if self._cause:
            raise ConfigError(self._cause)
