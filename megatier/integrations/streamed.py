"""A streamed model in somebody else's loop: forward, `loss.backward()`, `optimizer.step()`.

    with megatier.stream("path/or/hub-id", tiers=TiersConfig(...), accumulation_steps=2) as streamed:
        loss = streamed.model(input_ids=..., labels=...).loss
        loss.backward()                       # twice: each backward is one group
        streamed.optimizer.step()

The step is that of `engine.step`, cut at the user's calls. The first forward begins it, and `optimizer.step` ends it.
A group is all forwards up to a backward. Updates run ahead of the next forward; whatever else reads weights waits.

Under `torchrun` the processes are ranks, which share the state. Each makes forwards and backwards of its own rows, and
`optimizer.step` adds up the gradients of all of them.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers.utils.generic import ModelOutput

from megatier.adapters.methods import guard_adapters
from megatier.config.values import check_setting
from megatier.dropped import ClosedWhenDropped
from megatier.engine.loss import without_logits
from megatier.engine.step import StepResult
from megatier.errors import StepDroppedError, StreamedModelError
from megatier.guards.methods import forward_through, guard_methods
from megatier.guards.prefix import refuse_given
from megatier.guards.tokens import naming_tokens
from megatier.guards.unbound import mark_streamed
from megatier.integrations.open_step import OpenStep
from megatier.integrations.stream_optimizer import StreamedOptimizer
from megatier.integrations.stream_state import StreamedState
from megatier.ranks.peers import cause_of
from megatier.session.session import Session
from megatier.trace.events import TraceEvent, write_trace

FORWARD = "a forward with gradients"
STEP = "optimizer.step()"
"""What ranks have come to, where they meet within a step."""
TRACED_STEPS = 3
"""The number of last steps that `Streamed.write_trace` writes."""


class Streamed(ClosedWhenDropped, StreamedState):
    """A model whose weights, gradients and state stream, for any loop. Use it from one thread.

    Ranks make the same calls in the same order. A call that one of them leaves out is a `StreamedModelError` on all of
    them, and an error that ends one of them is a `PeerError` on the others.

    Attributes:
        model: the Hugging Face model, for forwards; its parameters lie on meta. Forwards with gradients, one or more,
            and the backward after them are one group of a step. A forward under `torch.no_grad` is an evaluation.
        optimizer: the optimizer that schedulers, trainers and loops take.
        accumulation_steps: number of backwards per `optimizer.step` that this process makes.
        groups: number of backwards per `optimizer.step` that all ranks make together, whose gradients are added.
        rank: number of this process among the ranks, from 0.
        num_ranks: number of ranks, 1 without `torchrun`.
        steps: number of steps that `optimizer.step` has ended, those that were left out included.
        last: result of the last step: its norm, its clip coefficient, whether it was left out, and its loss. The loss
            is the mean of those that the model gave in the step's forwards of this rank, or their sum if they were
            called with `num_items_in_batch`; NaN if the loop computes losses itself. None before the first step.
    """

    def __init__(
        self,
        session: Session,
        opened: contextlib.ExitStack,
        *,
        is_from_folder: bool = False,
        has_new_adapters: bool = False,
    ) -> None:
        """Take over a loaded session; `stream` makes one.

        Args:
            session: the session.
            opened: ends the session, and the connection to other ranks; `close` does so.
            is_from_folder: whether the weights are those of the folder that the model's config names.
            has_new_adapters: whether the model has adapters that begin now.
        """
        train = session.setup.config.train
        super().__init__(session, is_from_folder=is_from_folder, has_new_adapters=has_new_adapters)
        self._opened = opened
        self._engine = session.engine
        self.rank = self._crew.rank
        self.num_ranks = self._crew.size
        self.accumulation_steps = train.groups // self.num_ranks
        self.clip = train.clip
        self.optimizer = StreamedOptimizer(self, train)

        self.last: StepResult | None = None
        self._step = OpenStep()
        self._events: list[tuple[int, list[TraceEvent]]] = []
        """The last steps by number, with what happened in them."""

        self._is_closed = False
        self._has_parted = False
        """Whether this rank has left a step half-way, in which the others are still."""

        self._arguments = tuple(inspect.signature(self.model.forward).parameters)
        """The names of the arguments of the model's forward, in order."""

        # A function, no method: accelerate would bind a method to the model.
        self.model.forward = forward_through(self._forward, self.model.forward)
        guard_methods(self.model, self.device, self._engine.options.dtype)
        if self.has_adapters:
            guard_adapters(self.model)
        vars(self.model)["zero_grad"] = self.optimizer.zero_grad
        mark_streamed(self.model.parameters(), self._has_gradient)
        # Ranks come to an evaluation together, of which one that calls a module knows nothing.
        if self.num_ranks == 1:
            self._engine.model.stage.alone = self.one_forward
        self._own()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not self._session.owner.is_here:
            self.close()
        else:
            # Past `close`, for which all ranks would have to meet: they are told of the error instead.
            self._is_closed = True
            self._disown()
            self._stop_giving(after_error=True)
            self._opened.__exit__(kind, error, trace)

    def close(self) -> None:
        """Free the memory and remove the block files. The weights go with them. Closing twice is safe.

        In a forked child this does nothing: all of it is the parent's.

        Ranks close together. After an error leave the `with` block by it instead, so that the others know.

        Raises:
            StreamedModelError: other ranks need this one still.
        """
        if self._is_closed or not self._session.owner.is_here:
            return

        # An error in here is told to the other ranks, and then all is closed nevertheless.
        with self._opened:
            self._stop_giving()
            if self.num_ranks > 1:
                self._check_between_steps("Closing")
            self._is_closed = True
            self._disown()
            self._meet("close()")

    def _close_dropped(self) -> None:
        # Not `close`, for which ranks meet. Whoever keeps the model or the optimizer keeps this too.
        self._opened.close()

    # ------------------------------------------------------------------ a step

    @property
    def clip(self) -> float | None:
        """Global gradient norm to clip to, above 0, read by `optimizer.step`; None: off."""
        return self._clip

    @clip.setter
    def clip(self, norm: float | None) -> None:
        check_setting("clip", norm)
        self._clip = norm

    @property
    def is_in_step(self) -> bool:
        """Whether a step is open: a forward with gradients was made since the last step."""
        return self._step.num_groups > 0

    def grad_norm(self) -> float:
        """Return the exact global norm of the step's gradients, before they are clipped.

        Call it after the last backward of the step. The host waits for the device.

        Raises:
            StreamedModelError: a backward is missing.
            TimelineError: the step used its units in another order than the first one.
            StepDroppedError: another rank has dropped the step.
        """
        # Trainers ask for the norm before `optimizer.step` asks again. The pass can be ended only once.
        if self._step.norm is None:
            self._check_whole()
            if dropped := self._meet(STEP):
                self._drop_step()
                raise StepDroppedError(self.steps + 1, dropped)

            # A step whose pass has ended cannot be measured again, so whatever fails here gives the step up.
            try:
                self._step.norm = self._engine.measure(self.steps + 1)
            except BaseException:
                self._part()
                raise
        return self._step.norm

    def finish_step(self) -> StepResult:
        """Clip, and make the updates due with the settings of this moment; `optimizer.step` calls this.

        A step whose norm is not finite is left out: it changes no weight.

        Raises:
            StreamedModelError: a backward is missing, or a setting cannot be taken.
            NonFiniteError: too many steps in a row were not finite.
        """
        self._session.owner.check()
        norm = self.grad_norm()
        rate = self._take_settings()
        step = self.steps + 1

        # The step is over for this object before the engine ends it: its number counts also if the engine raises
        # because too many steps were left out, and a second `optimizer.step` must not end the same step again. An
        # interrupt in here would leave a step that counts and of which no weight knows.
        with self._session.store.tear.call:
            self.steps = step
            losses = self._step.losses
            self._step = OpenStep()

            # The loop may compute losses itself, so the guard gets one that is finite and judges by the norm.
            result = self._engine.finish_step(step, rate, norm, 0.0)
        # The engine has read the norm, so the device is through with the losses.
        loss = math.nan
        if len(losses) == self.accumulation_steps:
            loss = float(torch.stack(losses).sum())
        self.last = replace(result, loss=loss)
        self._events = [*self._events[1 - TRACED_STEPS :], (step, self._session.player.take_events())]
        return self.last

    def abandon(self) -> None:
        """Forget the forwards and backwards since the last step. No weight changes.

        A rank that drops a step waits for the others, which may drop it too. Those that do not go on until their
        `optimizer.step`, where they get a `StepDroppedError`. Several ranks cannot drop the first step, nor go on if
        only some of them drop one whose `grad_norm` is known.
        """
        self._session.owner.check()
        if not self.is_in_step:
            return
        if self.num_ranks == 1 or self._step.norm is not None:
            self._meet("abandon()")
            self._step = OpenStep()
            self._engine.abandon()
        elif self._engine.can_drop:
            self._sit_out(self._step.drop_cause or "it called abandon() or zero_grad().")
        else:
            self._part()

    def _sit_out(self, cause: str) -> None:
        """Take no part any more in the open step, and drop it with all other ranks, once they have come to its end."""
        for group in range(self._step.num_groups - 1, self.accumulation_steps):
            if group >= self._step.num_groups:
                self._meet(FORWARD, cause)
            self._session.player.sit_out(group)
        self._meet(STEP, cause)
        self._drop_step()

    def _drop_step(self) -> None:
        """Drop the open step together with all other ranks, which have come to its end."""
        self._step = OpenStep()
        self._engine.drop_step()
        self._session.player.take_events()  # nobody asks what happened in it

    def _part(self) -> None:
        """Leave the open step half-way. Several ranks cannot go on after that."""
        self._step = OpenStep()
        self._has_parted = self.num_ranks > 1
        self._engine.abandon()

    def drop_gradients(self) -> None:
        """Abandon the step, unless its first forward still waits for its backward; `optimizer.zero_grad` calls this."""
        self._session.owner.check()
        if self._has_gradient():
            self.abandon()

    def _has_gradient(self) -> bool:
        """Return whether the open step has had a backward that trains."""
        # Loops call zero_grad also between the forward and the backward of a step, where there is no gradient yet. A
        # backward that was broken off, as by a want of memory, has made some.
        is_waiting = self._engine.gradients.is_open and not self._engine.gradients.is_in_backward
        return self._step.num_groups > 1 or (self._step.num_groups == 1 and not is_waiting)

    @contextlib.contextmanager
    def one_forward(self, evaluation: str = "evaluate") -> Iterator[None]:
        """Run one forward inside, as a part of a step or as an evaluation. The model's own forward does so too.

        Args:
            evaluation: the name that all evaluations share which use the units in the same order.
        """
        # A trainer that opens this calls the model's forward in it, which opens it once more for the same group.
        if self._inside:
            self._check_thread()
            yield
            return

        self._check_open()
        if torch.is_grad_enabled():
            run = self._begin_forward()
        elif self.is_in_step and self._engine.gradients.takes_aside and self.num_ranks == 1:
            # The weights are those of the step's forwards, so it is a part of the step.
            run = self._engine.aside()
        else:
            # An evaluation reads the weights of the last step, whose updates may still wait for the next forward.
            self._settle("An evaluation", "a forward without gradients")
            run = self._engine.evaluation(self._held.begin(evaluation))

        # A forward that failed or was interrupted can have no backward, and its group cannot be repeated by itself.
        try:
            self._inside = threading.get_ident()
            with run:
                yield
            # Nobody asks for a trace of evaluations, so their events would pile up.
            if not self.is_in_step:
                self._session.player.take_events()
        except BaseException as error:
            self._fail_forward(error)
            raise
        finally:
            self._inside = 0

    def _check_thread(self) -> None:
        """Refuse another thread than the one whose forward is under way: it would be taken for a part of that.

        Raises:
            StreamedModelError: it is another one.
        """
        if self._inside != threading.get_ident():
            raise StreamedModelError(
                "another thread is in a forward of this streamed model. One thread at a time uses it: evaluate between "
                "two steps, or let the threads wait for each other."
            )

    def _fail_forward(self, error: BaseException) -> None:
        """Drop the step of a forward that failed."""
        # To drop it takes the other ranks. If nobody catches this error, they have to know of it first.
        if self.is_in_step and self.num_ranks > 1 and self._engine.can_drop:
            self._step.drop_cause = cause_of(error)
        elif self.is_in_step:
            self._part()

    def lent_head(self) -> contextlib.AbstractContextManager[None]:
        """Make the head's weight a tensor on the device, inside a forward and until its backward."""
        return self._engine.model.head().lent()

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the model's own forward as a part of a step, or as an evaluation."""
        given = dict(zip(self._arguments, args, strict=False))
        given.update(kwargs)
        if torch.is_grad_enabled():
            refuse_given(given)
        if not self.has_logits and given.get("labels") is None and given.get("shift_labels") is None:
            raise _without_labels()

        self.try_tiles(forward, *args, **kwargs)

        # With images an evaluation uses other units than without them, so each kind has an order of its own.
        sees = sorted(name for name, value in given.items() if name.startswith("pixel_values") and value is not None)
        with self.one_forward(" ".join(["evaluate", *sees])), naming_tokens(given, self.model):
            outputs = forward(*args, **kwargs)
            if torch.is_grad_enabled():
                self._engine.model.check_outputs(outputs)
                self._note_loss(outputs, is_sum=given.get("num_items_in_batch") is not None)
            if self.has_logits:
                return outputs
            if isinstance(outputs, ModelOutput) and outputs.get("loss") is None:
                raise _without_labels()
            return without_logits(outputs)

    def _note_loss(self, outputs: Any, *, is_sum: bool) -> None:  # noqa: ANN401
        """Keep what a forward adds to the loss of its step."""
        if not isinstance(outputs, ModelOutput):
            return
        loss = outputs.get("loss")
        if torch.is_tensor(loss):
            # Detached, so that it holds no graph. It is not read here: the host would wait for the device.
            loss = loss.detach()
            self._step.losses.append(loss if is_sum else loss / self.accumulation_steps)

    def _begin_forward(self) -> contextlib.AbstractContextManager[None]:
        """Begin a forward with gradients, inside: a further one of the open group, or the first of a new one."""
        self._held.let_go()  # if somebody trains while a text is generated
        if self.is_in_step and self._engine.gradients.is_open:
            if self.num_ranks > 1:
                raise StreamedModelError(
                    "the last forward has had no backward, and ranks take one forward for each. Call loss.backward() "
                    "before the next forward, or drop the step with abandon()."
                )
            # What the loop makes of several losses, it alone knows.
            self._step.losses.append(torch.tensor(math.nan, dtype=torch.float32, device="cpu"))
            return self._engine.begin_forward()

        # A unit is updated by its gradient of the last group, so the engine has to know which one that is.
        if self._step.num_groups == self.accumulation_steps:
            raise StreamedModelError(
                f"accumulation_steps is {self.accumulation_steps}, and that many backwards were made. Call "
                "optimizer.step(), or give megatier.stream the right number."
            )

        self._meet(FORWARD)

        # The settings that stand now count for speculative updates; `finish_step` voids those if they have changed.
        if not self.is_in_step:
            self._engine.begin_step(self.steps + 1, self._take_settings())
        self._engine.begin_group(self._step.num_groups)
        self._step.num_groups += 1
        return self._engine.model.running()

    def _take_settings(self) -> float:
        """Hand the optimizer's settings of this moment to the arithmetic, and return the learning rate."""
        rate, others = self.optimizer.settings()
        arithmetic = self._session.optimizer
        arithmetic.hyper = replace(arithmetic.hyper, clip=self.clip, **others)
        return rate

    def _check_whole(self) -> None:
        self._check_open()

        # The last forward counts only when all of its backward is done, which an interrupt may have cut short.
        made = self._step.num_groups
        if self.is_in_step and self._engine.gradients.is_open:
            made -= 1
        if made < self.accumulation_steps:
            raise StreamedModelError(
                f"optimizer.step() after {made} of {self.accumulation_steps} backwards: each step needs as many as "
                "accumulation_steps of megatier.stream says. A step() or zero_grad() before took those that were made, "
                "and a backward for gradients of inputs alone is none. Make the missing ones, or drop the step with "
                "abandon()."
            )

    def _check_open(self) -> None:
        """Refuse a model that takes no calls any more, or not here, and drop a step whose forward has failed."""
        self._session.owner.check()
        if self._is_closed:
            raise StreamedModelError("this streamed model is closed; open it anew with megatier.stream.")
        if self._has_parted:
            raise StreamedModelError(
                "this rank has left a step half-way, in which the other ranks are still. Start all ranks again, from "
                "the last Streamed.save."
            )
        self._stop_giving()
        if self._step.drop_cause:
            self.abandon()

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write moves, updates, uses and stalls of the last three steps, for Perfetto.

        Raises:
            TransferError: the drive is full or gone.
        """
        write_trace(Path(path), self._events)

    def _check_between_steps(self, what: str) -> None:
        self._check_open()
        if self.is_in_step:
            raise StreamedModelError(
                f"{what} in the middle of a step: end it with optimizer.step() first, or drop it with abandon()."
            )


def _without_labels() -> StreamedModelError:
    """Make the error of a forward that has neither a loss nor logits."""
    return StreamedModelError(
        "the model was opened with fused_loss and gives no logits: pass labels, or call megatier.stream with "
        "fused_loss=False."
    )
