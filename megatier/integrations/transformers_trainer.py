"""MegatierTrainer: Hugging Face's Trainer over a streamed model.

    with megatier.stream("path", accumulation_steps=args.gradient_accumulation_steps) as streamed:
        MegatierTrainer(streamed, args, train_dataset=...).train()

`StreamedTraining` is the mixin for trainers that derive from it: `class Mine(StreamedTraining, SFTTrainer)`. Both need
the extra `trainer` (accelerate).
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import Trainer

from megatier.config.schema import TiersConfig
from megatier.config.values import check_setting, clip_of
from megatier.errors import ConfigError
from megatier.integrations.cut_step_callback import CutStepCallback
from megatier.integrations.shared_batches import naming_shared_memory
from megatier.integrations.stream import stream
from megatier.integrations.streamed import Streamed
from megatier.integrations.trainer_files import TrainerFiles
from megatier.integrations.trainer_rows import TrainerRows
from megatier.models.decoder import decay_parameter_names
from megatier.trainer_guards.arguments import (
    accumulation_of,
    check_accelerator,
    check_given,
    check_stream_kwargs,
    check_training_arguments,
    needs_logits,
    refuse_any,
)
from megatier.trainer_guards.fields import WATCHED
from megatier.trainer_guards.overrides import COMPARED, check_overrides, overriding

OWN_OPTIMIZER = "a streamed model brings its optimizer; give none to the Trainer."


class StreamedTraining(TrainerFiles, TrainerRows):
    """Mixin for the Trainer's loop, data, schedules, callbacks and logs over megatier's step.

    Learning rate, schedule, betas, decay, clipping and accumulation come from TrainingArguments. Checkpoints hold an
    export for `from_pretrained` and, for resuming, megatier's own with masters and moments. Both are streamed.

    Attributes:
        streamed: the streamed model.
        fuses_loss: whether head and loss are fused when a folder is opened, unless something needs logits.
    """

    fuses_loss = True

    def __init__(
        self,
        model: Streamed | str | os.PathLike[str],
        *args: Any,  # noqa: ANN401 - the Trainer's
        tiers: TiersConfig | None = None,
        stream_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Take a streamed model instead of the Trainer's model, and all other arguments of the Trainer.

        Args:
            model: a streamed model; or a folder or hub id, which is opened with the accumulation steps of the
                arguments. Then `self.streamed.close()`, or the end of the process, removes its block files.
            *args: those of the Trainer.
            tiers: budgets and mounts, for a folder or hub id.
            stream_kwargs: other arguments of `megatier.stream` for it, such as `{"optimizer": "muon"}`.
            **kwargs: those of the Trainer.

        Raises:
            ConfigError: an argument of the Trainer needs something that a streamed model does not have.
        """
        given = self.given(model, *args, **kwargs)
        check_given(given, feeds_vllm=self.feeds_vllm())
        if not isinstance(model, Streamed):
            from_args: dict[str, Any] = {
                "tiers": tiers,
                "accumulation_steps": accumulation_of(given.get("args")),
                "fused_loss": self.fuses_loss and not needs_logits(given),
            }
            model = stream(model, **{**from_args, **check_stream_kwargs(stream_kwargs or {})})
        elif tiers is not None or stream_kwargs:
            raise ConfigError("tiers and stream_kwargs belong to megatier.stream, which has opened this model already.")
        self.streamed = model
        self._losses: list[Tensor] = []
        """This rank's losses of the step's backwards."""

        # With two devices here, the Trainer does not split batches over the GPUs that a process sees. accelerate would
        # refuse this under torchrun, so it is removed again.
        model.model.hf_device_map = {"streamed": "disk", "bound": str(model.device)}  # type: ignore[assignment]
        trained = self.model_for_trainer(kwargs)
        if args:
            super().__init__(trained, *args, **kwargs)
        else:  # by name, since other trainers take something else first
            super().__init__(model=trained, **kwargs)
        del model.model.hf_device_map
        self._watched: list[Any] = []
        """The arguments as last checked."""
        self._follow_arguments()
        self._check_methods()

        for callback in self.callback_handler.callbacks:
            # This callback would save within a step. It comes again to save after the step.
            if type(callback).__name__ == "JITCheckpointCallback":
                vars(callback)["on_pre_optimizer_step"] = _do_nothing
        # Before all others, which may save or evaluate at the end of an epoch, where no step may be open.
        self.callback_handler.callbacks.insert(0, CutStepCallback(model, self._losses))
        if model.num_ranks > 1:
            # The outermost override, which need not call those of base classes.
            self.compute_loss = functools.partial(self._loss_of_rank, self.compute_loss)  # type: ignore[method-assign]

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401 - Python's
        """Refuse a class whose trainer comes before the mixin, since the mixin's methods would never be called.

        Raises:
            ConfigError: it does.
        """
        super().__init_subclass__(**kwargs)
        # Its instances would train a plain model without any error.
        order = cls.__mro__
        mixin = next(base for base in order[1:] if issubclass(base, StreamedTraining))
        for base in order[1 : order.index(mixin)]:
            if issubclass(base, Trainer):
                raise ConfigError(
                    f"{cls.__name__}: the mixin comes first, class {cls.__name__}({mixin.__name__}, {base.__name__})."
                )

    @classmethod
    def parameters(cls) -> list[str]:
        """Return the parameter names of the trainer's own constructor, without self."""
        # A subclass may pass them on as *args.
        order = cls.__mro__
        for base in order[order.index(StreamedTraining) + 1 :]:
            names = list(inspect.signature(base.__init__).parameters)  # type: ignore[misc]
            if "model" in names:
                return names[1:]
        raise AssertionError("the mixin comes before a Trainer")

    @classmethod
    def given(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401 - the Trainer's
        """Return the arguments of the trainer's constructor by name."""
        return dict(zip(cls.parameters(), args, strict=False)) | kwargs

    def feeds_vllm(self) -> bool:
        """Return whether vLLM, started by the trainer, gets the streamed model's weights."""
        return False

    def model_for_trainer(self, given: dict[str, Any]) -> nn.Module:
        """Return the module to show to the trainer as its model. This may change the trainer's other arguments."""
        return self.streamed.model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing, since the model's weights are loaded to the device as needed."""

    def train(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the Trainer's
        """Train, with the arguments as they are now.

        Raises:
            ConfigError: they were changed to something that a streamed model does not support.
            SharedMemoryError: /dev/shm is too small for the workers of a loader.
        """
        self._follow_arguments()
        self.streamed.abandon()  # of a run before, which an error or an interrupt ended; a restore wants no open step
        with naming_shared_memory():
            return super().train(*args, **kwargs)

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        """Refuse to search, since the Trainer would make a model for each trial.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "hyperparameter_search makes a new model for each trial by model_init: open a streamed model and a trainer "
            "for each trial in a loop of your own, or in the objective that optuna calls."
        )

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:  # noqa: ANN401
        """Let accelerate prepare the forward (autocast), without DDP around the model."""
        self._follow_arguments()  # the first call of an evaluation, too
        wrapped = super()._wrap_model(model, training, dataloader)
        # In evaluation mode accelerate adds no DDP. The step itself adds up the gradients of all ranks.
        prepared: nn.Module = self.accelerator.prepare_model(wrapped, device_placement=False, evaluation_mode=True)
        return prepared

    def _loss_of_rank(self, compute_loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return the trainer's loss, in training this rank's part of the mean over ranks, since a step adds up."""
        loss = compute_loss(*args, **kwargs)
        if not torch.is_grad_enabled():
            return loss
        if isinstance(loss, tuple):
            return loss[0] / self.streamed.num_ranks, *loss[1:]
        return loss / self.streamed.num_ranks

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - the Trainer's
        """Run a forward and backward, and return its contribution to the logged loss of all ranks.

        The Trainer adds up the returned values. The losses of other groups are added here, in the order in which a
        single process would add them.

        Raises:
            ConfigError: a subclass has replaced the streamed model's optimizer.
        """
        self._follow_arguments()
        # accelerate wraps the optimizer, which is then this attribute.
        if getattr(self.optimizer, "optimizer", self.optimizer) is not self.streamed.optimizer:
            raise ConfigError(OWN_OPTIMIZER)
        own_loss: Tensor = super().training_step(*args, **kwargs)
        if self.streamed.num_ranks == 1:
            return own_loss

        # The ranks synchronise once a step, instead of for each loss.
        self._losses.append(own_loss)
        if len(self._losses) < self.streamed.accumulation_steps:
            return torch.zeros_like(own_loss)
        by_rank = self.streamed.all_of(torch.stack(self._losses).cpu())
        self._losses.clear()
        # Group by group, each with the losses of all ranks, as a single process would have them.
        losses = torch.stack(by_rank, dim=1).flatten().to(own_loss.device)

        # The Trainer leaves a returned loss that is not finite out of its logs.
        if not losses.isfinite().all():
            return losses.sum()
        for loss in losses[:-1]:
            self._tr_loss += loss
        return losses[-1]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the streamed model's own optimizer, with the settings of TrainingArguments."""
        if self.optimizer is None:
            args = self.args
            self.optimizer = self.streamed.optimizer

            # The second group has biases and norms, which do not decay.
            betas = (args.adam_beta1, args.adam_beta2)
            settings = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
            for name, value in (*settings.items(), ("weight_decay", args.weight_decay)):
                check_setting(name, value)
            for group, decay in zip(self.optimizer.param_groups, (args.weight_decay, 0.0), strict=True):
                group.update(settings, weight_decay=decay)

            # Schedules with a minimum rate divide by the optimizer's initial one.
            self.optimizer.defaults.update(settings, weight_decay=args.weight_decay)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> float:
        """Return the exact norm. The update itself clips by it, so no gradient is scaled here."""
        self._follow_arguments()
        return self.streamed.grad_norm()

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        """Return the norm for the log. The Trainer asks for it in every step, before the update."""
        self._follow_arguments()
        return self.streamed.grad_norm() if grad_norm is None else grad_norm

    def _follow_arguments(self) -> None:
        """Check the arguments if any has changed, and use their present clipping norm for the next update.

        Raises:
            ConfigError: they need something that a streamed model does not support, perhaps set by a callback.
        """
        # This runs several times a step, so checks are made only if an argument has changed.
        watched = [getattr(self.args, name, None) for name in WATCHED]
        if watched != self._watched:
            self._check_arguments()
            self._watched = watched
        self.streamed.clip = clip_of(self.args.max_grad_norm)

    def _check_arguments(self) -> None:
        """Refuse arguments of the Trainer that a streamed model does not support.

        Raises:
            ConfigError: names the first one, and what to set instead.
        """
        model = self.streamed
        check_training_arguments(
            self.args,
            accumulation_steps=model.accumulation_steps,
            ranks=model.num_ranks,
            device=model.device,
            dtype=model.model.dtype,
        )
        check_accelerator(self.accelerator)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        asking = {
            "compute_metrics": self.compute_metrics,
            "compute_loss_func": self.compute_loss_func,
            "label_smoothing_factor": self.args.label_smoothing_factor,
        }
        refuse_any(
            (
                optimizer not in (None, model.optimizer) or self.optimizer_cls_and_kwargs is not None,
                OWN_OPTIMIZER,
            ),
            (
                self.lr_scheduler is not None
                and getattr(self.lr_scheduler, "optimizer", None) not in (model.optimizer, self.optimizer),
                "optimizers has a scheduler of another optimizer: make it over streamed.optimizer.",
            ),
            *(
                (value and not model.has_logits, f"{name} needs logits: call megatier.stream with fused_loss=False.")
                for name, value in asking.items()
            ),
        )

    def _check_methods(self) -> None:
        """Refuse overrides of the Trainer's methods that a streamed model does not support.

        Raises:
            ConfigError: names the first one, and what to do instead.
        """
        check_overrides(type(self), StreamedTraining, self.streamed.num_ranks)
        if not overriding(type(self), StreamedTraining, COMPARED) or not self.args.weight_decay:
            return
        model = self.streamed.model
        decaying = decay_parameter_names(model)
        names = frozenset(self.get_decay_parameter_names(model))
        trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
        different = [name for name in trained if (name in names) != (name in decaying)]
        if different:
            raise ConfigError(
                f"get_decay_parameter_names of {type(self).__name__}: {different[0]} "
                f"{'decays' if different[0] in names else 'does not decay'} by it, and not so in a streamed model, in "
                "which all parameters decay but biases and norms. Leave it out, or set weight_decay to 0."
            )


class MegatierTrainer(StreamedTraining, Trainer):
    """Hugging Face's Trainer over a streamed model; see `StreamedTraining`."""


def _do_nothing(*_: object, **__: object) -> None:
    """Stand in for a callback's method."""
