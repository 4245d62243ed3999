"""One training step, written once, and its evaluation.

for each group:  forward -> loss -> backward          gradients leave unit by unit
norm -> clip coefficient                              the one point where the host waits for the device
updates: before each unit's next forward (deferred), or inside the backward (immediate)

A deferred step whose loss or norm is not finite is left out: its gradients are never applied, so weights and moments
stay as they were, bit for bit. Its number counts all the same, for the learning rate and the bias correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from megatier.engine.experts import ExpertsNode, guard, join
from megatier.engine.gradient import Gradients, GradSink
from megatier.engine.head import IGNORED, can_fuse, check_calls_loss_function
from megatier.engine.lender import Lender
from megatier.engine.loss import FusedLoss, StepLoss
from megatier.engine.node import Node
from megatier.engine.stage import Stage, WeightSource, learning
from megatier.errors import NonFiniteError, UnsupportedModelError
from megatier.guards.crossing import OutputCheck
from megatier.guards.unbound import refused_outside
from megatier.models.decoder import Binding, Unit, bindings, check_rows_are_apart
from megatier.models.dtypes import kept_in_fp32, place_buffers
from megatier.numerics.compilation import Compilation
from megatier.numerics.matmul import Fp32Products
from megatier.numerics.optimizer import AdamW
from megatier.tier import Activations

Batch = Mapping[str, Tensor]
REMEDY = "Lower train.learning_rate, set train.clip, or look at the data of this step."
"""What helps against numbers that are not finite."""


class UnitPlayer(Protocol):
    """What plays the timeline under the engine."""

    @property
    def weights(self) -> WeightSource:
        """Brings weights, and takes activations."""

    @property
    def gradients(self) -> GradSink:
        """Takes gradients."""

    def begin(self, name: str) -> None:
        """Start a pass."""

    def end(self) -> None:
        """End it."""

    def cancel(self) -> None:
        """Leave it half-way."""

    def defer_updates(self, *, clipped: bool) -> None:
        """All gradients are final, and known to be clipped or not; update before the next use."""

    def drop_updates(self) -> None:
        """All gradients are final, and never to be applied."""

    def drain_gradients(self) -> None:
        """Wait until every gradient is summed and measured."""

    def drain(self) -> None:
        """Finish every update and write-back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step reports.

    Attributes:
        loss: mean loss per counted token of the step.
        grad_norm: global norm of the gradients, before clipping.
        clip_coefficient: factor on the gradients; 1 if nothing was clipped, 0 if the step was left out.
        skipped: of a step that was left out, what was not finite: a parameter whose gradient was not, else "loss".
    """

    loss: float
    grad_norm: float
    clip_coefficient: float
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Numeric choices and policies.

    Attributes:
        dtype: of the compute copy of weights.
        device: where the units compute.
        activations: policy per unit.
        groups: groups of a step.
        slices: slices that a group is cut into.
        fused_loss: take head and loss as one node, if the model allows it.
        loss_chunk: tokens whose logits the fused loss makes at once.
        compilation: how to compile the units and the loss; None: not at all.
        fp32_products: take bf16 products in fp32, for a CPU without bf16 instructions.
        max_skips: steps in a row that may be left out because they are not finite (deferred); one more is an error.
    """

    dtype: torch.dtype
    device: torch.device
    activations: Mapping[str, Activations]
    groups: int = 1
    slices: int = 1
    fused_loss: bool = True
    loss_chunk: int = 1024
    compilation: Compilation | None = None
    fp32_products: bool = False
    max_skips: int = 0


class Engine:
    """A Hugging Face skeleton whose units stream, with its optimizer.

    Attributes:
        model: the skeleton, on whose modules the nodes are installed.
        options: numeric choices and policies.
        fuses_loss: whether head and loss are one node. Then the model gives no logits.
        check_outputs: looks for lost gradients in the graphs of the first losses.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        units: Sequence[Unit],
        player: UnitPlayer,
        optimizer: AdamW,
        options: EngineOptions,
    ) -> None:
        """Install nodes on every module that uses a unit. Buffers move to the device, in the dtype they compute in.

        If the loss cannot be fused with this model's head, it is not, and a warning says so.

        Args:
            model: the skeleton, whose parameters lie on meta.
            units: all of the model's units.
            player: plays the timeline; brings weights and takes gradients.
            optimizer: measures gradients, clips, and holds the scalars of the step.
            options: numeric choices and policies.
        """
        self.model = model
        self._player = player
        self._optimizer = optimizer
        self.options = options
        gradients = Gradients(optimizer.layouts, options.dtype, player.gradients, optimizer, groups=options.groups)
        anchor = torch.zeros((), device=options.device, requires_grad=True)
        self._stage = Stage(
            source=player.weights,
            gradients=gradients,
            dtype=options.dtype,
            device=options.device,
            slices=options.slices,
            anchor=anchor,
            compilation=options.compilation,
            arithmetic=Fp32Products if options.fp32_products else nullcontext,
            in_fp32=kept_in_fp32(model, (name for name, _ in model.named_parameters())),
            model=model,
        )

        # The model's forward is asked while it is as it was loaded: no node is installed yet.
        self.fuses_loss = options.fused_loss and can_fuse(model, units)
        bound = [(unit, name, bindings(model, unit, name)) for unit in units for name in unit.module_names]
        place_buffers(model, options.device, options.dtype)

        nodes = [self._node(unit, name, places) for unit, name, places in bound]
        self._nodes = {node.module_name: node for node in nodes}
        join(nodes)

        # The order of the two is the order of wrapping: the step's loss divides what the fused one gives.
        if self.fuses_loss:
            FusedLoss(model, self._head(), options.loss_chunk)
        self._step_loss = StepLoss(model, self._stage)
        self._is_learnt = options.slices == 1
        self.check_outputs = OutputCheck(model)
        self._skips = 0
        """Steps in a row that were left out, up to now."""

    def train_step(self, step: int, rate: float, groups: Sequence[Batch]) -> StepResult:
        """Run forward, backward and update on one step's tokens. A deferred update runs ahead of the next forward.

        Args:
            step: 1, 2, ...
            rate: learning rate.
            groups: one batch (input_ids and labels [B, T], ...) per group, on any device. If it has position_ids,
                attention stops wherever they do not go on by 1.

        Raises:
            UnsupportedModelError: this model's attention would not stop there, groups would not share its loss, or its
                rows depend on one another and are cut.
            NonFiniteError: loss or gradient is NaN or infinite, once more in a row than may be left out; no update of
                this step was applied (deferred), or none after the named unit's (immediate).
        """
        if len(groups) > 1:
            check_calls_loss_function(self.model, "set train.groups to 1")
            check_rows_are_apart(self.model, "set train.groups to 1")

        # Before `begin_step`: it runs evaluations, which are passes of their own.
        self._learn(groups[0])
        if not self.model.training:  # walks over every module
            self.model.train()

        # Each group's loss is divided by what the whole step counts: tokens of unequal groups weigh as in one batch.
        counts = [_count(batch) for batch in groups]
        shares = [count / sum(counts) if sum(counts) else 1 / len(groups) for count in counts]
        divisor = max(1, sum(counts)) if len(groups) > 1 or not sum(counts) else None  # nothing to learn: 0, not 0/0
        groups = [self._on_device(batch) for batch in groups]  # ahead of the loads, which are long
        self.begin_step(step, rate)
        losses = [self._train_group(step, index, batch, divisor, shares[index]) for index, batch in enumerate(groups)]
        norm = self.measure(step)

        return self.finish_step(step, rate, norm, math.fsum(loss.item() for loss in losses), groups[0])

    # The parts of a step, for whoever calls forward and backward: `begin_step`; for each group `begin_group`, forward,
    # backward; `measure`; `finish_step`. Or `abandon`, at any time.

    def begin_step(self, step: int, rate: float) -> None:
        """Start a step, and the updates of the one before.

        Args:
            step: 1, 2, ...
            rate: learning rate.
        """
        # Users and trainers may switch it on at any time.
        _stop_checkpointing(self.model)

        # Updates of the step before start in `begin`. They read the scalars that `clip` noted, not those noted here.
        self._optimizer.begin_step(step, rate)
        self._player.begin("train")

    def begin_group(self, group: int) -> None:
        """Say that the forward of a group follows, then its backward: group 0, 1, ..."""
        self._stage.gradients.begin_group(group)

    def measure(self, step: int) -> float:
        """Return the gradients' global norm, after the last backward. The host waits for the device.

        Raises:
            TimelineError: units were used in a forward, and not in the backward that the recorded order has.
            NonFiniteError: a gradient is NaN or infinite, and updates do not wait for the norm (immediate mode).
        """
        self._player.end()

        # Sums of groups and their squares are made on other threads, so the norm has to wait for them.
        try:
            self._player.drain_gradients()
        except NonFiniteError as error:
            raise NonFiniteError(f"step {step}: {error}. {REMEDY}") from error
        return self._optimizer.norm()

    def finish_step(self, step: int, rate: float, norm: float, loss: float, batch: Batch | None = None) -> StepResult:
        """Clip, and make the updates due; or leave the step out.

        Args:
            step: as in `begin_step`.
            rate: learning rate. If it is not the one that the step began with, this one counts.
            norm: from `measure`.
            loss: of the step.
            batch: the rows to run again if loss or norm is not finite, to find the first unit that is not.

        Raises:
            NonFiniteError: one of them is not, once more in a row than may be left out.
        """
        if not (math.isfinite(norm) and math.isfinite(loss)):
            return self._skip(step, loss, norm, batch)
        self._skips = 0

        # `clip` makes final what `revise` notes. Only then may updates start, since they read it.
        is_revised = self._optimizer.revise(step, rate)
        coefficient = self._optimizer.clip(norm)

        # A unit that was updated in the backward, unclipped and with the scalars of then, is updated anew if either was
        # wrong.
        if self._optimizer.hyper.deferred:
            self._player.defer_updates(clipped=coefficient != 1.0 or is_revised)

        return StepResult(loss=loss, grad_norm=norm, clip_coefficient=coefficient)

    def abandon(self) -> None:
        """Leave a step half-way: none of its updates is made."""
        self._player.cancel()

    def close(self) -> None:
        """Let go of the tiers' memory. What the model's cycles hold would stay until they are collected."""
        for node in self._nodes.values():
            node.forget_leaves()

    def lent_head(self) -> AbstractContextManager[None]:
        """Inside, the head's weight is a tensor on the device, for forwards that multiply by it themselves."""
        return self._head().lent()

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward of this group still has all or a part of its backward before it."""
        return self._stage.gradients.is_open

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss per counted token, on the weights of the last whole step. Modules keep their mode."""
        # Updates of the last step are still due: in training they would run ahead of the next forward.
        self._player.drain()
        total = 0.0
        tokens = 0

        with torch.no_grad(), _eval_mode(self.model):
            for batch in batches:
                if not (count := _count(batch)):
                    continue
                with self.evaluation():
                    total += self._loss(batch, None).item() * count
                tokens += count

        return total / max(1, tokens)

    @contextmanager
    def evaluation(self, name: str = "evaluate") -> Iterator[None]:
        """Run one forward without gradients inside, in whatever mode. Drain the updates that are due before.

        Args:
            name: of the pass. All that have the same name use the units in the same order.
        """
        self._stage.gradients.group = 0  # the order of units is recorded with their group

        # Inference mode is left. Views of homes that are made in it stay cached, and no backward could use them later.
        with torch.inference_mode(mode=False), torch.no_grad():
            self._player.begin(name)
            # Whatever ends the forward early, an interrupt too: weights in use have to be given back.
            try:
                with refused_outside(self.model):
                    yield
            except BaseException:
                self._player.cancel()
                raise

            self._player.end()

    def _node(self, unit: Unit, name: str, places: Sequence[Binding]) -> Node:
        """Install the node of one module of a unit."""
        module = self.model.get_submodule(name)
        activations = self.options.activations[unit.name]
        if unit.experts is not None:
            return ExpertsNode(self._stage, unit.name, module, places, unit.experts, activations=activations)
        if unit.is_round:
            return Lender(self._stage, unit.name, name, module, places, activations=activations)
        node = Node(self._stage, unit.name, name, module, places, activations=activations)

        # Several modules of one layer: the layer's own forward calls them, and might take a weight of one by itself.
        if unit.is_layer and len(unit.module_names) > 1:
            guard(node)

        return node

    def _head(self) -> Node:
        """The node of the output embedding.

        Raises:
            UnsupportedModelError: it has none of its own.
        """
        head = self.model.get_output_embeddings()
        found = next((node for node in self._nodes.values() if node.module is head), None)
        if found is None:
            raise UnsupportedModelError(
                f"the output embedding of {type(self.model).__name__} is not a unit of its own; it cannot be lent."
            )

        return found

    def _train_group(self, step: int, group: int, batch: Batch, divisor: int | None, share: float) -> Tensor:
        """Run forward and backward of one group; returns its part of the step's loss, which the host does not read."""
        self.begin_group(group)
        loss = self._loss(batch, divisor, share)

        # Immediate updates run inside the backward, so a loss that is not finite has to stop the step before it. This
        # costs a wait for the device, which the deferred mode does without.
        if not self._optimizer.hyper.deferred and not math.isfinite(loss.item()):
            self._player.cancel()
            raise self._error(step, "loss", None, batch)

        self.check_outputs(loss)
        loss.backward()
        return loss.detach()

    def _skip(self, step: int, loss: float, norm: float, batch: Batch | None) -> StepResult:
        """Leave a step out. Nothing is clipped: the scalars of the step before stay, and no update will read them.

        Raises:
            NonFiniteError: more steps in a row than allowed were left out.
        """
        self._player.drop_updates()
        self._skips += 1
        parameter = self._optimizer.first_non_finite()
        if self._skips > self.options.max_skips:
            raise self._error(step, "gradient norm" if math.isfinite(loss) else "loss", parameter, batch)
        return StepResult(loss=loss, grad_norm=norm, clip_coefficient=0.0, skipped=parameter or "loss")

    def _loss(self, batch: Batch, counted: int | None, share: float = 1.0) -> Tensor:
        """Run one forward and return its loss.

        Args:
            batch: one group, or a batch to evaluate.
            counted: tokens that the whole step counts, if several groups make it; None: this batch's own.
            share: of these tokens, the share that this batch has.

        Raises:
            UnsupportedModelError: the model makes its masks without the batch's position_ids.
        """
        self._step_loss.divisor = counted
        is_packed = "position_ids" in batch
        answer = _document_numbers if is_packed else _is_in_order
        with _answering(answer) as asked, refused_outside(self.model):
            inputs = self._on_device(batch)
            loss = self._step_loss.weighed(lambda: self.model(**inputs, use_cache=False).loss, share)

        if is_packed and not asked:
            self._player.cancel()
            raise UnsupportedModelError(
                f"{type(self.model).__name__} makes its masks without position_ids, so that documents of one sequence "
                "see each other. Set data.cross_documents to true."
            )

        return loss

    def _on_device(self, batch: Batch) -> Batch:
        """Move a batch by way of pinned memory: the host would wait for any other copy, and for all that are queued."""
        if self.options.device.type != "cuda":
            return batch
        return {
            key: value if value.is_cuda else value.pin_memory().to(self.options.device, non_blocking=True)
            for key, value in batch.items()
        }

    def _learn(self, batch: Batch) -> None:
        """Find out, before the first step with slices, which arguments of each module are batched."""
        if self._is_learnt:
            return
        check_rows_are_apart(self.model, "set train.slices to 1")

        # If nothing is padded, Hugging Face gives its layers no mask. Later batches may be padded, so nodes have to
        # know whether a mask is cut: the last token is padded here.
        if "attention_mask" in batch:
            mask = batch["attention_mask"].clone()
            mask[:, -1] = 0
            batch = {**batch, "attention_mask": mask}

        # In eval mode no random number is drawn, so the step that follows has those of a run without slices.
        with torch.no_grad(), _eval_mode(self.model), learning(self._stage):
            for rows in (1, 2):
                with self.evaluation():
                    self._loss({key: value[:rows] for key, value in batch.items()}, None)

        self._is_learnt = True

    def _error(self, step: int, what: str, parameter: str | None, batch: Batch | None) -> NonFiniteError:
        """The error that ends the run. It names the parameter, and the first unit with a value that is not finite.

        To find that unit, the batch runs once more, with a check after each unit.
        """
        where = f"; first in the gradient of {parameter}" if parameter is not None else ""
        self._stage.checks_finite = True

        try:
            self.evaluate([] if batch is None else [batch])
        except NonFiniteError as error:
            where = f"{where}; {error}"

        row = f", and {self._skips - 1} steps before it were left out" if self._skips > 1 else ""
        return NonFiniteError(
            f"the {what} of step {step} is not finite{row}{where}. No update of this step was written. {REMEDY}"
        )


@contextmanager
def _eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Inside, no module is in training mode. Then each is in its own again, which may be another than the model's."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()

    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _count(batch: Batch) -> int:
    """The number of tokens whose prediction counts. The first token of a row is predicted by none."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


@contextmanager
def _answering(answer: Callable[[Tensor], Tensor | None]) -> Iterator[list[Tensor]]:
    """Answer for Hugging Face whether position ids restart within a row; yields the position ids it asked about.

    Hugging Face would read them from the device. The host would wait for that, and for all work and copies queued
    before.
    """
    asks = masking_utils.find_packed_sequence_indices
    asked = list[Tensor]()

    def known(position_ids: Tensor) -> Tensor | None:
        asked.append(position_ids)
        return answer(position_ids)

    masking_utils.find_packed_sequence_indices = known
    try:
        yield asked
    finally:
        masking_utils.find_packed_sequence_indices = asks


def _is_in_order(position_ids: Tensor) -> Tensor | None:
    """Give Hugging Face's answer for rows that hold one sequence each."""
    return None


def _document_numbers(position_ids: Tensor) -> Tensor:
    """Give its answer for rows that hold several: the one that each token belongs to, counted from 0."""
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def _stop_checkpointing(model: PreTrainedModel) -> None:
    """Switch off Hugging Face's own recompute, which would call nodes again in the backward; see `activations`."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
