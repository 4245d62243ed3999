"""Runs training steps and evaluations. This is the only place that has the order of a step.

for each group:  forward -> loss -> backward          gradients leave unit by unit
norm -> clip coefficient                              the one point where the host waits for the device
updates: before each unit's next forward (deferred), or inside the backward (immediate)

A deferred step is skipped if its loss or norm is not finite: its gradients are never applied, so weights and moments
stay as they were, bit for bit. Its number still counts for the learning rate and the bias correction.

`train.loop` calls `train_step`. A loop that runs forward and backward by itself (`integrations.streamed`) calls the
parts of a step:

- One process calls `begin_step`; for each group `begin_group`, forward and backward; then `measure` and `finish_step`.
  Another forward of a group, before its backward, runs inside `begin_forward`. `abandon` ends a step at any time.
- Several ranks call the same, but none may abandon a step alone. One that cannot go on calls `sit_out` of the player
  for what is left, and then all call `drop_step`.
- An evaluation within a step, before a backward, is one forward inside `evaluation_in_step`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatier.compute.compile_clock import CLOCK
from megatier.compute.modality import evaluation_name, is_text
from megatier.compute.seeds import group_seed, seed_generators
from megatier.engine.evaluation import evaluating
from megatier.engine.head import check_calls_loss_function
from megatier.engine.stage import UnitPlayer
from megatier.engine.trials import Trials
from megatier.engine.unit_model import Batch, UnitModel, num_counted
from megatier.errors import GpuMemoryError, NonFiniteError, UnsupportedModelError
from megatier.guards.no_gradient import FirstNorms
from megatier.models.decoder import check_rows_are_apart
from megatier.optim.optimizer import RunOptimizer
from megatier.ranks.channel import SingleRank
from megatier.ranks.ranks import Ranks
from megatier.readback import on_host
from megatier.tier import Leg

NON_FINITE_REMEDY = "Lower the learning rate, clip gradients to a norm, or look at the data of this step."
"""The remedy in messages about numbers that are not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The figures of one step."""

    loss: float
    """The mean loss per counted token."""
    grad_norm: float
    """The global norm of the gradients, before clipping."""
    clip_coefficient: float
    """The factor on the gradients: 1 if nothing was clipped, 0 if the step was skipped."""
    skipped: str | None = None
    """If the step was skipped, a parameter whose gradient was not finite; "loss" if only the loss was not."""
    compile_seconds: float = 0.0
    """Seconds of the step in which torch's compiler was working."""
    own_seconds: tuple[float, ...] = ()
    """Seconds that each rank took itself, in the order of ranks, without waiting for others."""


class Engine:
    """Runs the steps of a model whose weights are loaded unit by unit, with its optimizer."""

    def __init__(
        self, model: UnitModel, player: UnitPlayer, optimizer: RunOptimizer, all_ranks: Ranks | SingleRank
    ) -> None:
        """Begin before the first step.

        Args:
            model: the model, whose nodes are installed.
            player: plays the timeline, loads weights and takes gradients.
            optimizer: measures gradients, clips, and holds the scalars of the step.
            all_ranks: the ranks that compute the groups of a step, or the process that computes all of them.
        """
        self.options = model.options
        """Numeric choices and policies."""
        self.model = model
        """The skeleton with its nodes and its loss."""
        self.gradients = self.model.stage.gradients
        """Collects the gradients of the open step, and tracks its backwards."""
        self._player = player
        self._optimizer = optimizer
        self._all_ranks = all_ranks
        self._trials = Trials(model, player, all_ranks)
        self._step = 0
        """The number of the last step that was begun."""
        self._compile_seconds_before = 0.0
        """Seconds that the compiler had used when that step began."""
        self._skips = 0
        """The number of consecutive steps that were skipped, up to now."""
        self._first_norms = FirstNorms()

    def train_step(self, step: int, rate: float, groups: Sequence[Batch]) -> StepResult:
        """Run forward, backward and update for one step. A deferred update runs ahead of the next forward.

        Args:
            step: 1, 2, ...
            rate: learning rate.
            groups: one batch (input_ids and labels [B, T], ...) per group, on any device. With position_ids, attention
                stops wherever they do not increase by 1. Every rank is given all groups, and computes its own.

        Raises:
            UnsupportedModelError: this model's attention would not stop there, groups cannot share its loss, or its
                rows depend on each other and are cut.
            GpuMemoryError: the step took more GPU memory than there is.
            NonFiniteError: loss or gradient is NaN or infinite, in one more consecutive step than may be skipped. No
                update of this step was applied (deferred), or none after the named unit's (immediate).
        """
        try:
            return self._train_step(step, rate, groups)
        except torch.OutOfMemoryError as error:
            said = str(error).partition(". ")[0]

        # Outside the handler, since the error holds everything that the step had allocated, and saving the run needs
        # memory.
        if self.options.device.type == "cuda":
            torch.cuda.empty_cache()
        raise GpuMemoryError(step, said)

    def _train_step(self, step: int, rate: float, groups: Sequence[Batch]) -> StepResult:
        skeleton = self.model.skeleton
        if len(groups) > 1:
            check_calls_loss_function(skeleton, "set train.groups to 1")
            check_rows_are_apart(skeleton, "set train.groups to 1")

        # Before `begin_step`, since trials are evaluations, which are passes of their own.
        self._trials.run(groups[0])

        if not skeleton.training:  # asked first, since `train` walks over every module
            skeleton.train()

        # Each group's loss is divided by the tokens that the whole step counts, so tokens of unequal groups weigh as in
        # one batch.
        counts = [num_counted(batch) for batch in groups]
        total = sum(counts)
        shares = [count / total if total else 1 / len(groups) for count in counts]

        # A single group divides by its own count. If no token counts, the loss is 0 instead of 0/0.
        divisor = max(1, total) if len(groups) > 1 or not total else None

        # Batches are copied before the loads, which are long: copies run in the order in which they were enqueued.
        own_groups = self._all_ranks.own_groups(len(groups))
        batches = [self.model.on_device(groups[index]) for index in own_groups]
        self.begin_step(step, rate, [number for number, batch in enumerate(batches) if is_text(batch)])
        losses = []
        for number, index in enumerate(own_groups):
            loss = self._train_group(step, number, batches[number], divisor, shares[index])
            losses.append(loss)
        norm = self.measure(step)

        # Read after the norm, for which the host has already waited.
        own_losses = [on_host(loss).item() for loss in losses]
        own_seconds = self._player.own_seconds()
        with self._player.waiting("ranks"):
            of_ranks = self._all_ranks.all_gather_object((own_losses, own_seconds))

        # The sum is exact and rounded once, so the order of the losses does not matter.
        step_loss = math.fsum(loss for rank_losses, _ in of_ranks for loss in rank_losses)
        result = self.finish_step(step, rate, norm, step_loss, groups[0])
        return replace(result, own_seconds=tuple(seconds for _, seconds in of_ranks))

    def rehearse(self, groups: Sequence[Batch]) -> None:
        """Run a step before the first one and drop its gradients, so that later steps may use all its units.

        The first step of a process records the order of units, and later steps may only use units of that record. The
        rehearsal has no other effect: no weight changes, and each group of a step seeds its own random numbers.

        Args:
            groups: one batch for each group, on any device.

        Raises:
            UnsupportedModelError: as `train_step`.
        """
        assert self._optimizer.hyper.deferred, "updates that do not wait cannot be dropped"
        self.model.skeleton.train()
        own_groups = self._all_ranks.own_groups(len(groups))
        batches = [self.model.on_device(groups[index]) for index in own_groups]
        self.begin_step(1, 0.0)
        for number, batch in enumerate(batches):
            self._train_group(1, number, batch, None, 1.0)
        self.drop_step()

    def begin_step(self, step: int, rate: float, text_groups: Collection[int] = ()) -> None:
        """Begin a step, and start the updates of the last one.

        Args:
            step: 1, 2, ...
            rate: its learning rate.
            text_groups: this rank's groups that are known to have no pixels. Units that such groups have left out
                before are not loaded for them.
        """
        self._step = step
        self._compile_seconds_before = CLOCK.seconds
        self.model.begin_step()

        # The updates of the last step start in `begin`. They read the scalars that `clip` fixed, not those set here.
        self._optimizer.begin_step(step, rate)
        self._player.begin("train", text_groups)

    def begin_group(self, group: int) -> None:
        """Begin group 0, 1, ...: its forward follows, then its backward."""
        self._seed_group(group)
        self._player.weights.begin_leg(Leg.FORWARD)
        self.gradients.begin_group(group)

    def begin_forward(self) -> AbstractContextManager[None]:
        """Run one more forward of the group inside. One backward then goes over all its forwards."""
        self.gradients.begin_forward()
        return self._running_leg(Leg.FURTHER)

    def evaluation_in_step(self) -> AbstractContextManager[None]:
        """Run one forward without gradients inside, in the middle of a step and before a backward."""
        self.gradients.begin_evaluation()
        return self._running_leg(Leg.ASIDE)

    @contextmanager
    def _running_leg(self, leg: Leg) -> Iterator[None]:
        self._player.weights.begin_leg(leg)
        running = self.model.running()
        with torch.inference_mode(mode=False), torch.set_grad_enabled(leg is Leg.FURTHER), running:
            yield

    def measure(self, step: int) -> float:
        """Return the global norm of the gradients, after the last backward. The host waits for the device.

        Raises:
            TimelineError: a unit was used in a forward, but not in the backward that the recorded order has.
            NonFiniteError: a gradient is NaN or infinite, and updates do not wait for the norm (immediate mode).
        """
        self._player.end()

        # Groups and squares are summed on other threads, which the norm has to wait for.
        try:
            self._player.drain_gradients()
        except NonFiniteError as error:
            raise NonFiniteError(f"step {step}: {error}. {NON_FINITE_REMEDY}", error.updated) from error
        return self._optimizer.sums.norm()

    def finish_step(self, step: int, rate: float, norm: float, loss: float, batch: Batch | None = None) -> StepResult:
        """Clip and release the updates, or skip the step.

        Args:
            step: as in `begin_step`.
            rate: the learning rate. It replaces the one that the step began with.
            norm: from `measure`.
            loss: of the step.
            batch: the rows to run again if loss or norm is not finite, to find the first unit that is not.

        Raises:
            NonFiniteError: one of them is not, in one more consecutive step than may be skipped.
        """
        if self._all_ranks.rank == 0:
            self._first_norms.add(norm)
        coefficient = 0.0
        skipped = None
        if math.isfinite(norm) and math.isfinite(loss):
            coefficient = self._clip(step, rate, norm)
        else:
            skipped = self._skip(step, loss, norm, batch)
        return StepResult(
            loss=loss,
            grad_norm=norm,
            clip_coefficient=coefficient,
            skipped=skipped,
            compile_seconds=CLOCK.seconds - self._compile_seconds_before,
        )

    def _clip(self, step: int, rate: float, norm: float) -> float:
        """Release the updates of a step, and return its clip coefficient."""
        self._skips = 0

        # `clip` fixes the scalars that `revise` sets. Updates read them, so they start after that.
        is_revised = self._optimizer.revise(step, rate)
        coefficient = self._optimizer.clip(norm)

        # A speculative update assumed no clipping and the scalars of the step's beginning. If either was wrong, the
        # unit is updated again.
        if self._optimizer.hyper.deferred:
            is_scaled = coefficient != 1.0
            self._player.defer_updates(clipped=is_scaled or is_revised)
        return coefficient

    def abandon(self) -> None:
        """Abandon a step half-way: none of its updates is applied."""
        self._player.cancel()
        self.gradients.drop()

    @property
    def can_drop(self) -> bool:
        """Whether several ranks can drop the open step. The first one is recorded, so it must be complete."""
        return self._optimizer.hyper.deferred and self._player.can_sit_out

    def drop_step(self) -> None:
        """End a step that a rank has sat out, after the last group, without its updates. All ranks call it."""
        self._player.end()
        self._player.drain_gradients()
        self._player.drop_updates()

    def evaluate(self, batches: Iterable[Batch]) -> float | None:
        """Return the mean loss per counted token, with the weights of the last whole step. Modules keep their mode.

        Args:
            batches: the same on all ranks, which compute them in rounds of one each. A round's batches are taken when
                it comes, and freed after it.

        Returns:
            The loss; None if no token of the batches counts.
        """
        # Updates of the last step are still pending: in training they would run ahead of the next forward.
        self._player.drain()
        counted = ((batch, count) for batch in batches if (count := num_counted(batch)))
        rank = self._all_ranks.rank
        losses = []
        num_tokens = 0

        with self.model.in_eval_mode():
            while turn := list(itertools.islice(counted, self._all_ranks.size)):
                # A gather takes all ranks. One that has no batch in the last round runs that of another, uncounted.
                is_own = rank < len(turn)
                batch, count = turn[rank if is_own else 0]
                name = evaluation_name(*(batch for batch, _ in turn))
                with self.evaluation(name):
                    loss = on_host(self.model.loss(batch, None)).item()
                if is_own:
                    losses.append(loss * count)
                num_tokens += sum(count for _, count in turn)

        total = math.fsum(loss for rank_losses in self._all_ranks.all_gather_object(losses) for loss in rank_losses)

        # None, since a loss of 0.0 would count as the best of all.
        return total / num_tokens if num_tokens else None

    def evaluation(self, name: str = "evaluate") -> AbstractContextManager[None]:
        """Run one forward without gradients inside; see `evaluating`. Pending updates must be drained before."""
        return evaluating(self.model, self._player, name)

    def try_tiles(self, run: Callable[[], object], name: str = "evaluate") -> None:
        """Find out which modules can run in tiles of tokens; see `Trials.try_tiles`."""
        self._trials.try_tiles(run, name)

    def _train_group(self, step: int, group: int, batch: Batch, divisor: int | None, share: float) -> Tensor:
        """Run forward and backward of one group. Return its part of the step's loss, which stays on the device."""
        self.begin_group(group)
        try:
            loss = self.model.loss(batch, divisor, share)
        except UnsupportedModelError:
            self._player.cancel()
            raise

        # Immediate updates run inside the backward, so a loss that is not finite must stop the step before it. The host
        # waits for the device here, which the deferred mode avoids.
        if not self._optimizer.hyper.deferred and not math.isfinite(on_host(loss.detach()).item()):
            self._player.cancel()
            raise self._diagnose_non_finite(step, "loss", None, batch)

        self.model.check_outputs(loss)
        loss.backward()
        return loss.detach()

    def _seed_group(self, group: int) -> None:
        """Seed a group's random numbers, which do not depend on the rank that computes it."""
        if self.options.seed is None:
            return
        number = self._all_ranks.own_groups(self.options.groups)[group]
        seed_generators(group_seed(self.options.seed, self._step, number), self.options.device)

    def _skip(self, step: int, loss: float, norm: float, batch: Batch | None) -> str:
        """Skip a step. Return a parameter whose gradient is not finite, or "loss".

        The scalars of the last step stay, and no update will read them.

        Raises:
            DataError: a label of the step is outside of the vocabulary.
            NonFiniteError: more consecutive steps were skipped than allowed.
        """
        self._player.drop_updates()

        # Unknown labels would make further steps fail too, so they end the run.
        self.model.check_labels()
        self._skips += 1
        parameter = self._optimizer.sums.first_non_finite()
        if self._skips > self.options.max_skips:
            what = "gradient norm" if math.isfinite(loss) else "loss"
            raise self._diagnose_non_finite(step, what, parameter, batch)
        return parameter or "loss"

    def _diagnose_non_finite(self, step: int, what: str, parameter: str | None, batch: Batch | None) -> NonFiniteError:
        """Return the error that ends the run, naming the first unit that is not finite, or the parameter.

        To find that unit, the batch runs once more with a check after each unit. Gradients would not tell: those of all
        units below a bad value are not finite either.
        """
        self.model.check_labels()
        where = f"; first in the gradient of {parameter}" if parameter is not None else ""

        # Without a batch nothing can be run again. The caller may go on after this error, without the checks.
        if batch is not None:
            self.model.stage.checks_finite = True
            try:
                self.evaluate([batch])
            except NonFiniteError as error:
                where = f"; {error}"
            finally:
                self.model.stage.checks_finite = False

        num_before = self._skips - 1
        in_a_row = f", and {num_before} steps before it were skipped" if num_before > 0 else ""
        return NonFiniteError(
            f"the {what} of step {step} is not finite{in_a_row}{where}. No update of this step was written. "
            f"{NON_FINITE_REMEDY}"
        )
