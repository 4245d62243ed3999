"""The steps of a streamed model in a user's loop: begun by a forward, ended by `optimizer.step`, or dropped.

Ranks end and drop steps together. Wherever they synchronise, each says which call it has reached.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import torch

from megatier.config.values import check_setting
from megatier.engine.step import StepResult
from megatier.errors import StepDroppedError, StreamedModelError
from megatier.integrations.open_step import OpenStep
from megatier.integrations.stream_state import StreamedState
from megatier.session.session import Session
from megatier.trace.events import TraceEvent, write_trace

FORWARD = "a forward with gradients"
OPTIMIZER_STEP = "optimizer.step()"
"""The calls at which ranks synchronise within a step."""
_TRACED_STEPS = 3
"""The number of steps that `Streamed.write_trace` writes."""


class StreamedSteps(StreamedState):
    """The part of a streamed model that runs steps: the open one, and the results of those before.

    Attributes:
        rank: this process's rank.
        num_ranks: the world size, 1 without `torchrun`.
        accumulation_steps: number of backwards per `optimizer.step` on this rank.
        last: result of the last step.
    """

    def __init__(self, session: Session, *, is_from_folder: bool, has_new_adapters: bool) -> None:
        """Take a session that is loaded; see `StreamedState`."""
        train = session.setup.config.train
        super().__init__(session, is_from_folder=is_from_folder, has_new_adapters=has_new_adapters)
        self._engine = session.engine
        self.rank = self._all_ranks.rank
        self.num_ranks = self._all_ranks.size
        self.accumulation_steps = train.groups // self.num_ranks
        self.clip = train.clip

        self.last: StepResult | None = None
        self._step = OpenStep()
        self._events: list[tuple[int, list[TraceEvent]]] = []
        """The events of the last steps, with their numbers."""

        self._is_closed = False
        self._has_left_step = False
        """Whether this rank has left a step half-way, while the others are still in it."""

    @property
    def clip(self) -> float | None:
        """Global gradient norm to clip to, above 0; None: off. `optimizer.step` reads it."""
        return self._clip

    @clip.setter
    def clip(self, norm: float | None) -> None:
        check_setting("clip", norm)
        self._clip = norm

    @property
    def is_in_step(self) -> bool:
        """Whether a step is open: a forward with gradients has run since the last step."""
        return self._step.num_groups > 0

    def grad_norm(self) -> float:
        """Return the exact global norm of the step's gradients before clipping.

        Call it after the last backward of the step. The host waits for the device.

        Raises:
            StreamedModelError: a backward is missing.
            TimelineError: the step used its units in another order than the first step.
            StepDroppedError: another rank has dropped the step.
        """
        # Trainers ask for the norm before `optimizer.step` does, but the pass can be ended only once.
        if self._step.norm is None:
            self._check_whole()
            if dropped := self._sync_ranks(OPTIMIZER_STEP):
                self._drop_step()
                raise StepDroppedError(self.steps + 1, dropped)

            # A step whose pass has ended cannot be measured again, so any failure here abandons the step.
            try:
                self._step.norm = self._engine.measure(self.steps + 1)
            except BaseException:
                self._leave_step()
                raise
        return self._step.norm

    def finish_step(self) -> StepResult:
        """Clip, and release the updates with the current settings. `optimizer.step` calls this.

        A step whose norm is not finite is skipped: it changes no weight.

        Raises:
            StreamedModelError: a backward is missing, or a setting cannot be taken.
            NonFiniteError: too many consecutive steps were not finite.
        """
        self._session.owner.check()
        norm = self.grad_norm()
        rate = self._take_settings()
        step = self.steps + 1

        # The step is closed here before the engine ends it. Its number counts even if the engine raises because too
        # many steps were skipped, and a second `optimizer.step` must not end it again. An interrupt in here would leave
        # a step that counts but updated nothing.
        with self._session.store.consistency.call:
            self.steps = step
            losses = self._step.losses
            self._step = OpenStep()

            # The loop may compute losses itself, so the guard gets a finite one and judges by the norm.
            result = self._engine.finish_step(step, rate, norm, 0.0)
        # The engine has read the norm, so the losses are ready too.
        loss = math.nan
        if len(losses) == self.accumulation_steps:
            loss = float(torch.stack(losses).sum())
        self.last = replace(result, loss=loss)
        self._events = [*self._events[1 - _TRACED_STEPS :], (step, self._session.player.take_events())]
        return self.last

    def abandon(self) -> None:
        """Drop the forwards and backwards since the last step. No weight changes.

        A rank that drops a step waits for the others, which may drop it too. Those that do not drop it go on until
        their `optimizer.step`, which raises a `StepDroppedError`. Several ranks cannot drop the first step, nor
        continue if only some of them drop one whose `grad_norm` is known.
        """
        self._session.owner.check()
        if not self.is_in_step:
            return
        if self.num_ranks == 1 or self._step.norm is not None:
            self._sync_ranks("abandon()")
            self._step = OpenStep()
            self._engine.abandon()
        elif self._engine.can_drop:
            self._sit_out(self._step.drop_cause or "it called abandon() or zero_grad().")
        else:
            self._leave_step()

    def _sit_out(self, cause: str) -> None:
        """Sit out the rest of the open step, and drop it with all other ranks at its end."""
        for group in range(self._step.num_groups - 1, self.accumulation_steps):
            if group >= self._step.num_groups:
                self._sync_ranks(FORWARD, cause)
            self._session.player.sit_out(group)
        self._sync_ranks(OPTIMIZER_STEP, cause)
        self._drop_step()

    def _drop_step(self) -> None:
        """Drop the open step together with all other ranks, at its end."""
        self._step = OpenStep()
        self._engine.drop_step()
        self._session.player.take_events()  # nobody asks what happened in it

    def _leave_step(self) -> None:
        """Leave the open step half-way. Several ranks cannot continue after that."""
        self._step = OpenStep()
        self._has_left_step = self.num_ranks > 1
        self._engine.abandon()

    def drop_gradients(self) -> None:
        """Abandon the step, unless its first forward still awaits its backward. `optimizer.zero_grad` calls this."""
        self._session.owner.check()
        if self._has_gradient():
            self.abandon()

    def _has_gradient(self) -> bool:
        """Return whether the open step has had a training backward."""
        # Loops also call zero_grad between the forward and the backward of a step, where there is no gradient yet. A
        # backward that failed, as from a lack of memory, has made some.
        is_waiting = self._engine.gradients.is_open and not self._engine.gradients.is_in_backward
        return self._step.num_groups > 1 or (self._step.num_groups == 1 and not is_waiting)

    def _take_settings(self) -> float:
        """Apply the optimizer's current settings, and return the learning rate."""
        rate, others = self.optimizer.settings()
        arithmetic = self._session.optimizer
        arithmetic.hyper = replace(arithmetic.hyper, clip=self.clip, **others)
        return rate

    def _check_whole(self) -> None:
        self._check_open()

        # The last forward counts only when its backward has ended, which an interrupt may have prevented.
        count = self._step.num_groups
        if self.is_in_step and self._engine.gradients.is_open:
            count -= 1
        if count < self.accumulation_steps:
            raise StreamedModelError(
                f"optimizer.step() after {count} of {self.accumulation_steps} backwards: each step needs as many as "
                "accumulation_steps of megatier.stream says. A step() or zero_grad() before took those that were made, "
                "and a backward for gradients of inputs alone is none. Make the missing ones, or drop the step with "
                "abandon()."
            )

    def _check_open(self) -> None:
        """Check that the model is open and owned by this process. Drop a step whose forward has failed."""
        self._session.owner.check()
        if self._is_closed:
            raise StreamedModelError("this streamed model is closed; open it anew with megatier.stream.")
        if self._has_left_step:
            raise StreamedModelError(
                "this rank has left a step half-way, in which the other ranks are still. Start all ranks again, from "
                "the last Streamed.save."
            )
        self._stop_weights()
        if self._step.drop_cause:
            self.abandon()

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the moves, updates, uses and stalls of the last three steps for Perfetto.

        Raises:
            TransferError: the drive is full or gone.
        """
        write_trace(Path(path), self._events)

    def _check_between_steps(self, subject: str) -> None:
        self._check_open()
        if self.is_in_step:
            raise StreamedModelError(
                f"{subject} in the middle of a step: end it with optimizer.step() first, or drop it with abandon()."
            )
