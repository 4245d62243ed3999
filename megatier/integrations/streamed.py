"""A streamed model in a user's loop: forward, `loss.backward()`, `optimizer.step()`.

    with megatier.stream("path/or/hub-id", tiers=TiersConfig(...), accumulation_steps=2) as streamed:
        loss = streamed.model(input_ids=..., labels=...).loss
        loss.backward()                       # twice: each backward is one group
        streamed.optimizer.step()

The step is that of `engine.step`, cut at the user's calls. The first forward begins it, and `optimizer.step` ends it. A
group is all forwards up to a backward. Updates run ahead of the next forward, and everything else that reads weights
waits for them.

Under `torchrun` the ranks share the state. Each runs forwards and backwards of its own rows, and `optimizer.step` adds
up the gradients of all ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
from transformers.utils.generic import ModelOutput

from megatier.adapters.peft_methods import guard_adapters
from megatier.compute.modality import evaluation_name, is_text
from megatier.engine.loss import without_logits
from megatier.errors import StreamedModelError
from megatier.finalizer import ClosedWhenDropped
from megatier.guards.model_methods import forward_through, guard_methods
from megatier.guards.prefix import refuse_given
from megatier.guards.tokens import naming_tokens
from megatier.guards.unbound_weights import mark_streamed
from megatier.integrations.stream_generation import StreamedGeneration
from megatier.integrations.stream_optimizer import StreamedOptimizer
from megatier.integrations.stream_steps import FORWARD
from megatier.ranks.peer_monitor import cause_of
from megatier.session.session import Session


class Streamed(ClosedWhenDropped, StreamedGeneration):
    """A model whose weights, gradients and state stream, for any loop. Use it from one thread.

    All ranks make the same calls in the same order. A missing call is a `StreamedModelError` on all of them, and an
    error that ends one rank is a `PeerError` on the others.

    Attributes:
        model: the Hugging Face model, for forwards; its parameters lie on meta. Forwards with gradients, one or more,
            and the backward after them are one group of a step. A forward under `torch.no_grad` is an evaluation.
        optimizer: the optimizer for schedulers, trainers and loops.
        accumulation_steps: number of backwards per `optimizer.step` on this rank.
        groups: number of backwards per `optimizer.step` on all ranks together, whose gradients are added.
        rank: this process's rank.
        num_ranks: the world size, 1 without `torchrun`.
        steps: number of steps that `optimizer.step` has ended, including skipped ones.
        last: result of the last step: its norm, its clip coefficient, whether it was skipped, and its loss. The loss is
            the mean over this rank's forwards of the step, or their sum if they were called with `num_items_in_batch`;
            NaN if the loop computes losses itself. None before the first step.
    """

    def __init__(
        self,
        session: Session,
        opened: contextlib.ExitStack,
        *,
        is_from_folder: bool = False,
        has_new_adapters: bool = False,
    ) -> None:
        """Take over a loaded session. `stream` calls this.

        Args:
            session: the session.
            opened: ends the session and the connection to other ranks; `close` closes it.
            is_from_folder: whether the weights are those of the folder that the model's config names.
            has_new_adapters: whether the model has newly initialised adapters.
        """
        train = session.setup.config.train
        super().__init__(session, is_from_folder=is_from_folder, has_new_adapters=has_new_adapters)
        self._opened = opened
        self.optimizer = StreamedOptimizer(self, train)
        self._arguments = tuple(inspect.signature(self.model.forward).parameters)
        """The parameter names of the model's forward, in order."""

        # A function rather than a method, which accelerate would bind to the model.
        self.model.forward = forward_through(self._forward, self.model.forward)
        guard_methods(self.model, self.device, self._engine.options.dtype)
        if self.has_adapters:
            guard_adapters(self.model)
        vars(self.model)["zero_grad"] = self.optimizer.zero_grad
        mark_streamed(self.model.parameters(), self._has_gradient)
        # An evaluation takes all ranks, and a single rank that calls a module by itself would hang.
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
            # Not by `close`, for which all ranks would have to synchronise. They are told of the error instead.
            self._is_closed = True
            self._disown()
            self._stop_weights(after_error=True)
            self._opened.__exit__(kind, error, trace)

    def close(self) -> None:
        """Free the memory and remove the block files, and the weights with them. Closing twice is safe.

        In a forked child this does nothing, since everything belongs to the parent.

        Ranks close together. After an error, let it leave the `with` block, so that the others learn of it.

        Raises:
            StreamedModelError: other ranks still need this one.
        """
        if self._is_closed or not self._session.owner.is_here:
            return

        # An error in here is reported to the other ranks, and everything is closed nevertheless.
        with self._opened:
            self._stop_weights()
            if self.num_ranks > 1:
                self._check_between_steps("Closing")
            self._is_closed = True
            self._disown()
            self._sync_ranks("close()")

    def _close_dropped(self) -> None:
        # Not `close`, for which ranks synchronise. Whoever keeps the model or the optimizer keeps this object too.
        self._opened.close()

    def one_forward(self, evaluation: str = "evaluate") -> contextlib.AbstractContextManager[None]:
        """Run one forward inside, as a part of a step or as an evaluation. The model's own forward does this too.

        Args:
            evaluation: a name for all evaluations that use the units in the same order.
        """
        # Anything that is called inside may use pixels.
        return self._one_forward(evaluation, is_text=False)

    @contextlib.contextmanager
    def _one_forward(self, evaluation: str, *, is_text: bool) -> Iterator[None]:
        """Run one forward inside, which may be known to use no pixels."""
        # A trainer may open this and call the model's forward inside, which opens it again for the same group.
        if self._inside:
            self._check_thread()
            yield
            return

        run = self._held_forward() if self._resident.is_loaded else self._run_of(evaluation, is_text=is_text)

        # A failed or interrupted forward can have no backward, and its group cannot be repeated by itself.
        try:
            self._inside = threading.get_ident()
            with run:
                yield
            # Events of evaluations are never written, so they would pile up.
            if not (self.is_in_step or self._resident.is_loaded):
                self._session.player.take_events()
        except BaseException as error:
            self._fail_forward(error)
            raise
        finally:
            self._inside = 0

    def _run_of(self, evaluation: str, *, is_text: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context of one forward, as a part of a step or as an evaluation of that name."""
        self._check_open()
        if torch.is_grad_enabled():
            return self._begin_forward(is_text=is_text)
        if self.is_in_step and self._engine.gradients.can_evaluate:
            # The weights are those of the step's forwards, so it belongs to the step.
            return self._engine.evaluation_in_step()

        # An evaluation reads the weights of the last step, whose updates may still be pending.
        self._finish_updates("An evaluation", "a forward without gradients")
        return self._engine.evaluation(self._held.begin(evaluation))

    def _check_thread(self) -> None:
        """Check that no other thread has a forward under way, since this call would count as a part of it.

        Raises:
            StreamedModelError: another thread has one.
        """
        if self._inside != threading.get_ident():
            raise StreamedModelError(
                "another thread is in a forward of this streamed model. One thread at a time uses it: evaluate between "
                "two steps, or let the threads wait for each other."
            )

    def _fail_forward(self, error: BaseException) -> None:
        """Drop the step of a forward that failed."""
        # Dropping it takes the other ranks. If nobody catches this error, they must learn of it first.
        if self.is_in_step and self.num_ranks > 1 and self._engine.can_drop:
            self._step.drop_cause = cause_of(error)
        elif self.is_in_step:
            self._leave_step()

    def lent_head(self) -> contextlib.AbstractContextManager[None]:
        """Bind a copy of the head's weight on the device, inside a forward and until its backward."""
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

        one_forward = self._one_forward(evaluation_name(given), is_text=is_text(given))
        with one_forward, naming_tokens(given, self.model):
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
        """Record a forward's contribution to the loss of its step."""
        if not isinstance(outputs, ModelOutput):
            return
        loss = outputs.get("loss")
        if torch.is_tensor(loss):
            # Detached, so that it holds no graph. Reading it would make the host wait for the device.
            loss = loss.detach()
            self._step.losses.append(loss if is_sum else loss / self.accumulation_steps)

    def _begin_forward(self, *, is_text: bool) -> contextlib.AbstractContextManager[None]:
        """Begin a forward with gradients: another one of the open group, or the first of a new group."""
        self._held.drop_all()  # if somebody trains while a text is generated
        if self.is_in_step and self._engine.gradients.is_open:
            # Only the loop knows what it makes of several losses.
            self._step.losses.append(torch.tensor(math.nan, dtype=torch.float32, device="cpu"))
            return self._engine.begin_forward()

        # A unit is updated with its gradient of the last group, so the engine must know which group is the last.
        if self._step.num_groups == self.accumulation_steps:
            raise StreamedModelError(
                f"accumulation_steps is {self.accumulation_steps}, and that many backwards were made. Call "
                "optimizer.step(), or give megatier.stream the right number."
            )

        self._sync_ranks(FORWARD)

        # Speculative updates use the current settings. `finish_step` voids them if the settings have changed.
        if not self.is_in_step:
            # Nothing is known of later groups yet.
            text_groups = [0] if is_text else []
            self._engine.begin_step(self.steps + 1, self._take_settings(), text_groups)
        self._engine.begin_group(self._step.num_groups)
        self._step.num_groups += 1
        return self._engine.model.running()


def _without_labels() -> StreamedModelError:
    """Return the error about a forward that has neither a loss nor logits."""
    return StreamedModelError(
        "the model was opened with fused_loss and gives no logits: pass labels, or call megatier.stream with "
        "fused_loss=False."
    )
