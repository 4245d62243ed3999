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
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size

from megatier.config.lora import ADAPTER_FILE
from megatier.config.schema import TiersConfig
from megatier.config.values import check_setting, clip_of
from megatier.data.samplers import WholeRounds, WholeSteps
from megatier.durable import discard
from megatier.errors import CheckpointError, ConfigError
from megatier.guards.trainer_arguments import (
    accumulation_of,
    check_accelerator,
    check_given,
    check_stream_kwargs,
    check_training_arguments,
    needs_logits,
    refuse_any,
)
from megatier.guards.trainer_fields import WATCHED
from megatier.guards.trainer_methods import COMPARED, check_overrides, overriding
from megatier.integrations.cut_step import CutStep
from megatier.integrations.stream import stream
from megatier.integrations.streamed import Streamed
from megatier.models.decoder import decays

STATE_FOLDER = "megatier"
"""Folder in a checkpoint of the Trainer, with masters and moments."""
OWN_OPTIMIZER = "a streamed model brings its optimizer; give none to the Trainer."
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
"""Names of the files that hold a model's weights, whole or in shards, and of their index."""

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
        fuses_loss: whether a folder is opened so that head and loss are one, unless something asks for logits.
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
        """Take a streamed model in the place of the Trainer's model, and all other arguments of the Trainer.

        Args:
            model: a streamed model; or a folder or hub id, which is opened with the accumulation of the arguments. Its
                block files are removed then by `self.streamed.close()`, or when the process ends.
            *args: those of the Trainer.
            tiers: budgets and mounts, for a folder or hub id.
            stream_kwargs: other arguments of `megatier.stream` for it, such as `{"optimizer": "muon"}`.
            **kwargs: those of the Trainer.

        Raises:
            ConfigError: an argument of the Trainer asks for something that a streamed model does not have.
        """
        given = self.given(model, *args, **kwargs)
        check_given(given)
        if not isinstance(model, Streamed):
            own: dict[str, Any] = {
                "tiers": tiers,
                "accumulation_steps": accumulation_of(given.get("args")),
                "fused_loss": self.fuses_loss and not needs_logits(given),
            }
            model = stream(model, **{**own, **check_stream_kwargs(stream_kwargs or {})})
        elif tiers is not None or stream_kwargs:
            raise ConfigError("tiers and stream_kwargs belong to megatier.stream, which has opened this model already.")
        self.streamed = model
        self._losses: list[Tensor] = []
        """Losses of the step's backwards of this rank."""

        # Two places: the Trainer then splits no batch over the GPUs that one process sees. accelerate would refuse them
        # under torchrun.
        model.model.hf_device_map = {"streamed": "disk", "bound": str(model.device)}  # type: ignore[assignment]
        shown = self.shown(kwargs)
        if args:
            super().__init__(shown, *args, **kwargs)
        else:  # by name, since other trainers take something else first
            super().__init__(model=shown, **kwargs)
        del model.model.hf_device_map
        self._watched: list[Any] = []
        """Arguments as they were when they were checked last."""
        self._follow_arguments()
        self._check_methods()

        for callback in self.callback_handler.callbacks:
            # It would save within a step. A moment later, after the step, it comes to save again.
            if type(callback).__name__ == "JITCheckpointCallback":
                vars(callback)["on_pre_optimizer_step"] = _do_nothing
        self.callback_handler.callbacks.insert(0, CutStep(model, self._losses))
        if model.num_ranks > 1:
            # By its outermost override, which need not call that of a class below.
            self.compute_loss = functools.partial(self._loss_of_rank, self.compute_loss)  # type: ignore[method-assign]

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401 - Python's
        """Refuse a class in which a trainer comes before the mixin, whose methods would never be called.

        Raises:
            ConfigError: it does.
        """
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        mixin = next(base for base in order[1:] if issubclass(base, StreamedTraining))
        for base in order[1 : order.index(mixin)]:
            if issubclass(base, Trainer):
                raise ConfigError(
                    f"{cls.__name__}: the mixin comes first, class {cls.__name__}({mixin.__name__}, {base.__name__})."
                )

    @classmethod
    def parameters(cls) -> list[str]:
        """Return the names of the arguments of the trainer's own constructor, after self."""
        # A subclass may hand all of them on by *args.
        order = cls.__mro__
        trainers = order[order.index(StreamedTraining) + 1 :]
        found = (list(inspect.signature(base.__init__).parameters) for base in trainers)  # type: ignore[misc]
        return next(names for names in found if "model" in names)[1:]

    @classmethod
    def given(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401 - the Trainer's
        """Return the arguments of the trainer's constructor by name."""
        return dict(zip(cls.parameters(), args, strict=False)) | kwargs

    def shown(self, given: dict[str, Any]) -> nn.Module:
        """Return what the trainer takes for the model; may change its other arguments, which are given by name."""
        return self.streamed.model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model alone: its weights come to the device by themselves."""

    def train(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the Trainer's
        """Train, with the arguments as they are now.

        Raises:
            ConfigError: they have changed to something that a streamed model cannot follow.
        """
        self._follow_arguments()
        self.streamed.abandon()  # of a run before, which an error or an interrupt ended; a restore wants no open step
        return super().train(*args, **kwargs)

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        """Refuse to search, for which the Trainer makes a model for each trial.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "hyperparameter_search makes a new model for each trial by model_init: open a streamed model and a trainer "
            "for each trial in a loop of your own, or in the objective that optuna calls."
        )

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:  # noqa: ANN401
        """Have accelerate prepare the forward (autocast), and wrap nothing around the model: ranks need no DDP."""
        self._follow_arguments()  # the first call of an evaluation, too
        wrapped = super()._wrap_model(model, training, dataloader)
        prepared: nn.Module = self.accelerator.prepare_model(wrapped, device_placement=False, evaluation_mode=True)
        return prepared

    def _loss_of_rank(self, compute_loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return the trainer's loss; in training, this rank's part of the mean over ranks, since a step adds up."""
        found = compute_loss(*args, **kwargs)
        if not torch.is_grad_enabled():
            return found
        if isinstance(found, tuple):
            return found[0] / self.streamed.num_ranks, *found[1:]
        return found / self.streamed.num_ranks

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - the Trainer's
        """Make a forward and backward, and return what it adds to the loss that is logged: that of all ranks.

        The Trainer adds up what this returns. So the losses of the other groups are added here, in the order in which
        one process would add them.

        Raises:
            ConfigError: a subclass has put another optimizer in the place of the streamed model's.
        """
        self._follow_arguments()
        if getattr(self.optimizer, "optimizer", self.optimizer) is not self.streamed.optimizer:
            raise ConfigError(OWN_OPTIMIZER)
        own: Tensor = super().training_step(*args, **kwargs)
        if self.streamed.num_ranks == 1:
            return own

        self._losses.append(own)
        if len(self._losses) < self.streamed.accumulation_steps:
            return torch.zeros_like(own)
        found = self.streamed.all_of(torch.stack(self._losses).cpu())
        self._losses.clear()
        losses = torch.stack(found, dim=1).flatten().to(own.device)

        # The Trainer looks at what is returned, and leaves a loss that is not finite out of its logs.
        if not losses.isfinite().all():
            return losses.sum()
        for loss in losses[:-1]:
            self._tr_loss += loss
        return losses[-1]

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Evaluate a batch as one process does: its loss is the mean over its own tokens, not those of other ranks.

        Raises:
            ConfigError: logits are asked for, which a fused loss does not make.
        """
        only_loss = args[0] if args else kwargs.get("prediction_loss_only")
        if not only_loss and not self.streamed.has_logits:
            raise ConfigError(
                "predictions are logits, which a model with a fused loss does not make: give the trainer "
                "megatier.stream(..., fused_loss=False), or set prediction_loss_only."
            )
        given = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            found = super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = given
        return self._filled_up(inputs, *found) if self.streamed.num_ranks > 1 else found

    def _filled_up(self, inputs: dict[str, Any], loss: Any, logits: Any, labels: Any) -> Any:  # noqa: ANN401
        """Give the logits and labels of a short batch as many rows as those of the other ranks have.

        The Trainer gathers tensors of one size, and cuts off the rows after the last one of the dataset.

        Raises:
            ConfigError: the rows of a batch are not those of its tensors.
        """
        state = self.accelerator.gradient_state
        size = self.args.eval_batch_size
        rows = state.remainder % size
        if not state.end_of_dataloader or state.remainder <= 0 or not rows or (logits is None and labels is None):
            return loss, logits, labels

        short, rank = state.remainder // size, self.streamed.rank
        found = self.streamed.all_of(find_batch_size(inputs))
        if found == [rows] * self.streamed.num_ranks and not short:
            return loss, logits, labels
        if found != [rows if number == short else size for number in range(self.streamed.num_ranks)]:
            raise ConfigError(
                f"the last batches of an evaluation have {found} rows on the ranks, and the dataset has {rows} for "
                f"that of rank {short}. Use a collator that keeps one row for each example, set prediction_loss_only, "
                f"or choose a number of rows that is a multiple of per_device_eval_batch_size times the ranks."
            )

        def fill(tensor: Tensor) -> Tensor:
            return tensor.repeat(-(-size // rows), *(tensor.dim() - 1) * [1])[: len(tensor) * size // rows]

        if rank == short:
            # The Trainer may gather this one as well.
            name = getattr(self.model, "main_input_name", "input_ids")
            inputs[name] = fill(inputs[name])
            logits, labels = recursively_apply(fill, (logits, labels))
        return loss, logits, labels

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the streamed model's own optimizer, with the settings of TrainingArguments."""
        if self.optimizer is None:
            args = self.args
            self.optimizer = self.streamed.optimizer

            # The second group are biases and norms, which do not decay.
            betas = (args.adam_beta1, args.adam_beta2)
            own = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
            for name, value in (*own.items(), ("weight_decay", args.weight_decay)):
                check_setting(name, value)
            for group, decay in zip(self.optimizer.param_groups, (args.weight_decay, 0.0), strict=True):
                group.update(own, weight_decay=decay)

            # Schedules with a least rate divide by the one that the optimizer was made with.
            self.optimizer.defaults.update(own, weight_decay=args.weight_decay)
        return self.optimizer

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's own loader, whose batches make whole steps.

        With `dataloader_drop_last` the rows after the last whole step are left out of each epoch.

        Raises:
            ConfigError: the last step of an epoch would have fewer backwards than the others, or rows twice.
        """
        loader = super().get_train_dataloader()
        try:
            rows = len(loader.dataset)  # type: ignore[arg-type]
            batches = len(loader)
        except TypeError:  # an iterable dataset does not say how many there are
            return loader

        # At the end of an epoch the Trainer calls `optimizer.step` after fewer backwards than the step needs.
        args = self.args
        batch = self._train_batch_size * self.streamed.num_ranks
        step = batch * args.gradient_accumulation_steps
        rest = rows % step
        shares = self.streamed.num_ranks == 1 or not rows % batch
        if not batches % args.gradient_accumulation_steps and (shares or args.dataloader_drop_last):
            return loader

        if rows < step or not args.dataloader_drop_last:
            remedy = (
                "Give more rows"
                if rows < step
                else f"Set dataloader_drop_last, which leaves {_counted(rest, 'row')} out of each epoch"
            )
            raise ConfigError(
                f"train_dataset has {_counted(rows, 'row')}, {_counted(batches, 'batch')} an epoch for each process, "
                f"and a step of a streamed model takes {_counted(step, 'row')} (per_device_train_batch_size times "
                f"gradient_accumulation_steps times the processes). {remedy}, or choose other numbers."
            )
        sampler: Any = loader.batch_sampler
        if isinstance(sampler, BatchSamplerShard):
            sampler = sampler.batch_sampler
        sampler.sampler = WholeSteps(sampler.sampler, rows - rest)
        return loader

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:  # noqa: ANN401 - the Trainer's
        """Return the Trainer's own loader, which gives each row to one rank alone; see `WholeRounds`.

        Raises:
            ConfigError: the rows cannot be dealt like that.
        """
        return self._dealt(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:  # noqa: ANN401 - the Trainer's
        """The same for rows whose predictions are asked for."""
        return self._dealt(super().get_test_dataloader(*args, **kwargs))

    def _dealt(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Deal the batches of one process over the ranks, where accelerate would give some rows twice.

        Raises:
            ConfigError: it is not known how many rows there are, or some would be left out.
        """
        size = self.streamed.num_ranks
        if size == 1:
            return loader

        shard = loader.batch_sampler
        if not isinstance(shard, BatchSamplerShard):
            raise ConfigError(
                "several ranks evaluate a dataset that says how many rows it has, since accelerate gives some rows of "
                "others twice. Evaluate a dataset with a length, without dispatch_batches."
            )
        if not isinstance(shard.batch_sampler, WholeRounds):
            if self.args.dataloader_drop_last and (rest := len(shard.batch_sampler) % size):
                raise ConfigError(
                    f"with dataloader_drop_last {size} ranks leave {rest} batches of the evaluation out, which one "
                    "process would count. Choose a number of rows that is a multiple of per_device_eval_batch_size "
                    "times the ranks, or leave dataloader_drop_last out."
                )
            shard.batch_sampler = WholeRounds(shard.batch_sampler, size)
            shard.even_batches = False
        return loader

    def _clip_grad_norm(self, model: nn.Module) -> float:
        """Return the exact norm, by which the update clips; no gradient is scaled here."""
        self._follow_arguments()
        return self.streamed.grad_norm()

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        """Return the norm that is logged. The Trainer asks for it in every step, before the update."""
        self._follow_arguments()
        return self.streamed.grad_norm() if grad_norm is None else grad_norm

    def _follow_arguments(self) -> None:
        """Check the arguments if some have changed, and clip the next update to the norm that they name now.

        Raises:
            ConfigError: they ask for something that a streamed model cannot follow; a callback may have set it.
        """
        watched = [getattr(self.args, name, None) for name in WATCHED]
        if watched != self._watched:
            self._check_arguments()
            self._watched = watched
        self.streamed.clip = clip_of(self.args.max_grad_norm)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model on all ranks, since each has a part of it. Older Trainers do so on the first alone."""
        if self.args.should_save:
            super().save_model(output_dir, _internal_call)
        else:
            self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the Trainer's files about the run, with an export as the weights."""
        folder = Path(output_dir or self.args.output_dir or ".")

        # An export wants an empty folder, and the Trainer's may hold files already. So the export gets a folder of
        # its own, and its files move from there.
        export = folder / ".export"
        if self.args.should_save:
            discard(export)  # left by a process that was killed
            refuse_any(
                (
                    (
                        (folder / ADAPTER_FILE).exists() and not self.streamed.has_adapters,
                        f"{folder} holds an adapter ({ADAPTER_FILE}), which from_pretrained would put over the "
                        "model. Save the model to another folder.",
                    ),
                )
            )
        self.streamed.export(export)
        if not self.args.should_save:
            return

        written = {file.name for file in export.iterdir()}
        for name in written:
            (export / name).replace(folder / name)
        export.rmdir()

        # Weights of an older save with another number of shards: from_pretrained would load them, and not the new ones.
        for file in folder.iterdir():
            if WEIGHTS.fullmatch(file.name) and file.name not in written and not self.streamed.has_adapters:
                file.unlink()
        tokenizer = self.processing_class
        if tokenizer is None:
            tokenizer = getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the Trainer's files for resuming, whose optimizer has settings alone, and masters and moments."""
        super()._save_optimizer_and_scheduler(output_dir)
        self.streamed.save(Path(output_dir) / STATE_FOLDER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load masters, moments and the number of the step; the Trainer loads the rest.

        Raises:
            CheckpointError: there are none.
            ConfigError: its steps had another number of groups, so the Trainer would go on at other rows.
        """
        folder = Path(resume_from_checkpoint) / STATE_FOLDER
        streamed = self.streamed
        if not folder.is_dir():
            raise CheckpointError(
                f"{resume_from_checkpoint} has no {folder.name}/ with the masters and moments of a streamed model: it "
                "is no checkpoint, was saved with save_only_model, or by another trainer. To begin with its weights "
                "alone, give its path to megatier.stream, and leave resume_from_checkpoint out."
            )
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
        """Load the best checkpoint's masters; moments stay those of the last step, as under the Trainer."""
        assert self.state.best_model_checkpoint is not None
        self.streamed.restore_weights(Path(self.state.best_model_checkpoint) / STATE_FOLDER)

    def _check_arguments(self) -> None:
        """Refuse arguments of the Trainer that a streamed model cannot follow.

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
        refuse_any(
            (
                (
                    optimizer not in (None, model.optimizer) or self.optimizer_cls_and_kwargs is not None,
                    OWN_OPTIMIZER,
                ),
                (
                    self.lr_scheduler is not None
                    and getattr(self.lr_scheduler, "optimizer", None) not in (model.optimizer, self.optimizer),
                    "optimizers has a scheduler of another optimizer: make it over streamed.optimizer.",
                ),
                (
                    self.compute_metrics is not None and not model.has_logits,
                    "compute_metrics needs logits: call megatier.stream with fused_loss=False.",
                ),
                (
                    self.compute_loss_func is not None and not model.has_logits,
                    "compute_loss_func needs logits: call megatier.stream with fused_loss=False.",
                ),
                (
                    self.args.label_smoothing_factor and not model.has_logits,
                    "label_smoothing_factor needs logits: call megatier.stream with fused_loss=False.",
                ),
            )
        )

    def _check_methods(self) -> None:
        """Refuse overrides of the Trainer's methods that a streamed model cannot follow.

        Raises:
            ConfigError: names the first one, and what to do instead.
        """
        check_overrides(type(self), StreamedTraining, self.streamed.num_ranks)
        if not overriding(type(self), StreamedTraining, COMPARED) or not self.args.weight_decay:
            return
        model = self.streamed.model
        own = decays(model)
        names = frozenset(self.get_decay_parameter_names(model))
        trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
        different = [name for name in trained if (name in names) != (name in own)]
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


def _counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 batch` and `7 batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
