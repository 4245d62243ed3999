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


class Stream(WeightSource, GradSink, Protocol):
    """What plays the timeline under the engine."""

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


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step reports."""

    loss: float
    grad_norm: float
    clip_coefficient: float
    skipped: str | None = None
    """Of a step that was left out, what was not finite: a parameter whose gradient was not, else "loss"."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Numeric choices and policies."""

    dtype: torch.dtype
    device: torch.device
    activations: Mapping[str, Activations]
    """Policy per unit."""
    groups: int = 1
    slices: int = 1
    fused_loss: bool = True
    loss_chunk: int = 1024
    compilation: Compilation | None = None
    """How to compile the units and the loss; None: not at all."""
    fp32_products: bool = False
    """Take bf16 products in fp32: for a CPU without bf16 instructions."""
    max_skips: int = 0
    """Steps in a row that may be left out because they are not finite (deferred); one more is an error."""


class Engine:
    """A Hugging Face skeleton whose units stream, with its optimizer."""

    def __init__(
        self, model: PreTrainedModel, units: Sequence[Unit], stream: Stream, optimizer: AdamW, options: EngineOptions
    ) -> None:
        """Install nodes on every module that uses a unit. Buffers move to the device, in the dtype they compute in.

        Where the loss cannot be fused with this model's head, it is not, with a warning.
        """
        self.model = model
        self._stream = stream
        self._optimizer = optimizer
        self.options = options
        gradients = Gradients(optimizer.layouts, options.dtype, stream, optimizer, groups=options.groups)
        anchor = torch.zeros((), device=options.device, requires_grad=True)
        self._stage = Stage(
            stream,
            gradients,
            options.dtype,
            options.device,
            options.slices,
            anchor,
            options.compilation,
            Fp32Products if options.fp32_products else nullcontext,
            in_fp32=kept_in_fp32(model, (name for name, _ in model.named_parameters())),
            model=model,
        )
        self.fuses_loss = options.fused_loss and can_fuse(model, units)
        """Whether head and loss are one node, and the model gives no logits."""
        bound = [(unit, name, bindings(model, unit, name)) for unit in units for name in unit.module_names]
        place_buffers(model, options.device, options.dtype)
        nodes = [self._node(unit, name, places) for unit, name, places in bound]
        self._nodes = {node.module_name: node for node in nodes}
        join(nodes)
        if self.fuses_loss:
            FusedLoss(model, self._head(), options.loss_chunk)
        self._step_loss = StepLoss(model, self._stage)
        self._is_learnt = options.slices == 1
        self.check_outputs = OutputCheck(model)
        self._skips = 0
        """Steps that were left out since the last one that was not."""

    def train_step(self, step: int, rate: float, groups: Sequence[Batch]) -> StepResult:
        """Forward, backward and update on one step's tokens; the deferred update runs ahead of the next forward.

        Args:
            step: 1, 2, ...
            rate: learning rate.
            groups: one batch (input_ids and labels [B, T], ...) per group, on any device. Where it has position_ids,
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

        self._learn(groups[0])
        if not self.model.training:  # walks over every module
            self.model.train()
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
        """Start a step, and the updates of the one before."""
        _stop_checkpointing(self.model)
        self._optimizer.begin_step(step, rate)
        self._stream.begin("train")

    def begin_group(self, group: int) -> None:
        """A forward follows, then its backward: group 0, 1, ..."""
        self._stage.gradients.begin_group(group)

    def measure(self, step: int) -> float:
        """After the last backward: the gradients' global norm. The host waits for the device.

        Raises:
            TimelineError: units were used in a forward, and not in the backward that the recorded order has.
            NonFiniteError: a gradient is NaN or infinite, where updates do not wait for the norm.
        """
        self._stream.end()
        try:
            self._stream.drain_gradients()
        except NonFiniteError as error:
            raise NonFiniteError(f"step {step}: {error}. {REMEDY}") from error
        return self._optimizer.norm()

    def finish_step(self, step: int, rate: float, norm: float, loss: float, batch: Batch | None = None) -> StepResult:
        """Clip, and make the updates due; or leave the step out.

        Args:
            step: as in `begin_step`.
            rate: learning rate, which counts where it is not the one that the step began with.
            norm: from `measure`.
            loss: of the step.
            batch: what to look at if loss or norm is not finite.

        Raises:
            NonFiniteError: one of them is not, once more in a row than may be left out.
        """
        if not (math.isfinite(norm) and math.isfinite(loss)):
            return self._skip(step, loss, norm, batch)
        self._skips = 0
        is_revised = self._optimizer.revise(step, rate)
        coefficient = self._optimizer.clip(norm)
        if self._optimizer.hyper.deferred:  # what was updated in the backward is void where it took other scalars
            self._stream.defer_updates(clipped=coefficient != 1.0 or is_revised)

        return StepResult(loss, norm, coefficient)

    def abandon(self) -> None:
        """Leave a step half-way: none of its updates is made."""
        self._stream.cancel()

    def close(self) -> None:
        """Let go of the tiers' memory. What the model's cycles hold would stay until they are collected."""
        for node in self._nodes.values():
            node.forget_leaves()

    def lent_head(self) -> AbstractContextManager[None]:
        """Inside, the head's weight is a tensor on the device: for forwards that multiply by it themselves."""
        return self._head().lent()

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward of this group has had no backward yet, or not all of it."""
        return self._stage.gradients.is_open

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss per counted token, on the weights of the last whole step; modules keep their mode."""
        self._stream.drain()
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
        """One forward without gradients inside, in whatever mode. Updates that are due have been drained.

        What is bound in inference mode and kept, such as a home's weights, could be in no backward: so it is left.

        Args:
            name: of all that use the units in this one's order.
        """
        self._stage.gradients.group = 0  # the order of units is recorded with their group
        with torch.inference_mode(mode=False), torch.no_grad():
            self._stream.begin(name)
            try:
                with refused_outside(self.model):
                    yield
            except BaseException:
                self._stream.cancel()
                raise

            self._stream.end()

    def _node(self, unit: Unit, name: str, places: Sequence[Binding]) -> Node:
        module = self.model.get_submodule(name)
        activations = self.options.activations[unit.name]
        if unit.experts is not None:
            return ExpertsNode(self._stage, unit.name, module, places, unit.experts, activations=activations)
        if unit.is_round:
            return Lender(self._stage, unit.name, name, module, places, activations=activations)
        node = Node(self._stage, unit.name, name, module, places, activations=activations)
        if unit.is_layer and len(unit.module_names) > 1:
            guard(node)

        return node

    def _head(self) -> Node:
        head = self.model.get_output_embeddings()
        found = next((node for node in self._nodes.values() if node.module is head), None)
        if found is None:
            raise UnsupportedModelError(
                f"the output embedding of {type(self.model).__name__} is not a unit of its own; it cannot be lent."
            )

        return found

    def _train_group(self, step: int, group: int, batch: Batch, divisor: int | None, share: float) -> Tensor:
        self.begin_group(group)
        loss = self._loss(batch, divisor, share)
        if not self._optimizer.hyper.deferred and not math.isfinite(loss.item()):
            self._stream.cancel()
            raise self._error(step, "loss", None, batch)

        self.check_outputs(loss)
        loss.backward()
        return loss.detach()

    def _skip(self, step: int, loss: float, norm: float, batch: Batch | None) -> StepResult:
        """Leave a step out; the scalars of the last one that was not have no reader left."""
        self._stream.drop_updates()
        self._skips += 1
        parameter = self._optimizer.first_non_finite()
        if self._skips > self.options.max_skips:
            raise self._error(step, "gradient norm" if math.isfinite(loss) else "loss", parameter, batch)
        return StepResult(loss, norm, 0.0, parameter or "loss")

    def _loss(self, batch: Batch, counted: int | None, share: float = 1.0) -> Tensor:
        """Of one forward; where several groups make a step, of what they all count and with what share of that."""
        self._step_loss.divisor = counted
        is_packed = "position_ids" in batch
        answer = _document_numbers if is_packed else _is_in_order
        with _answering(answer) as asked, refused_outside(self.model):
            inputs = self._on_device(batch)
            loss = self._step_loss.weighed(lambda: self.model(**inputs, use_cache=False).loss, share)

        if is_packed and not asked:
            self._stream.cancel()
            raise UnsupportedModelError(
                f"{type(self.model).__name__} makes its masks without position_ids, so that documents of one sequence "
                "see each other. Set data.cross_documents to true."
            )

        return loss

    def _on_device(self, batch: Batch) -> Batch:
        """From pinned memory: the host would wait for any other copy, behind those that are on their way."""
        if self.options.device.type != "cuda":
            return batch
        return {
            key: value if value.is_cuda else value.pin_memory().to(self.options.device, non_blocking=True)
            for key, value in batch.items()
        }

    def _learn(self, batch: Batch) -> None:
        """Before the first step with slices: which arguments of each module are batched."""
        if self._is_learnt:
            return
        check_rows_are_apart(self.model, "set train.slices to 1")
        if "attention_mask" in batch:  # without padding, Hugging Face leaves masks out
            mask = batch["attention_mask"].clone()
            mask[:, -1] = 0
            batch = {**batch, "attention_mask": mask}

        with torch.no_grad(), _eval_mode(self.model), learning(self._stage):  # draws no random numbers
            for rows in (1, 2):
                with self.evaluation():
                    self._loss({key: value[:rows] for key, value in batch.items()}, None)

        self._is_learnt = True

    def _error(self, step: int, what: str, parameter: str | None, batch: Batch | None) -> NonFiniteError:
        """What ends the run: names the parameter, and the first unit with a value that is not finite."""
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
    """Inside, no module is in training mode; then each is in its own again, which may be another than the model's."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()

    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _count(batch: Batch) -> int:
    """Tokens whose prediction counts."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


@contextmanager
def _answering(answer: Callable[[Tensor], Tensor | None]) -> Iterator[list[Tensor]]:
    """Spare Hugging Face the question whether position ids restart within a row; yields what it was asked about.

    The host would wait for the answer, behind everything that the device was given to do and to copy.
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
    """Hugging Face's answer for rows that hold one sequence each."""
    return None


def _document_numbers(position_ids: Tensor) -> Tensor:
    """Its answer for rows that hold several: which of them each token belongs to, counted from 0."""
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def _stop_checkpointing(model: PreTrainedModel) -> None:
    """Hugging Face's own recompute would call a node again in the backward; `activations` is the setting for it."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
