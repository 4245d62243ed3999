"""Deals rows to a trainer over a streamed model, so that steps are whole and ranks evaluate each row once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size

from megatier.errors import ConfigError
from megatier.integrations.samplers import WholeRounds, WholeSteps
from megatier.integrations.shared_batches import naming_shared_memory, sharing
from megatier.integrations.streamed import Streamed
from megatier.patch import patched

# These mixins precede a Trainer among a class's bases, and do not derive from one themselves.
if TYPE_CHECKING:
    Base = Trainer
else:
    Base = object


class TrainerRows(Base):
    """The part of `StreamedTraining` that deals rows to ranks and evaluates them."""

    streamed: Streamed

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's own loader, whose batches make whole steps.

        With `dataloader_drop_last` the rows after the last whole step are left out of each epoch.

        Raises:
            ConfigError: the last step of an epoch would have fewer backwards than the others, or repeated rows.
        """
        loader = sharing(super().get_train_dataloader())
        try:
            rows = len(loader.dataset)  # type: ignore[arg-type]
            batches = len(loader)
        except TypeError:  # an iterable dataset does not say how many there are
            return loader

        # At the end of an epoch the Trainer would call `optimizer.step` after fewer backwards than a step needs.
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
        """Return the Trainer's own loader, which gives each row to exactly one rank; see `WholeRounds`.

        Raises:
            ConfigError: the rows cannot be dealt like that.
        """
        return self._dealt(sharing(super().get_eval_dataloader(*args, **kwargs)))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:  # noqa: ANN401 - the Trainer's
        """Return the same kind of loader for predictions."""
        return self._dealt(sharing(super().get_test_dataloader(*args, **kwargs)))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the Trainer's
        """Evaluate, and report if shared memory is too small for the loader's workers.

        Raises:
            SharedMemoryError: /dev/shm is.
        """
        with naming_shared_memory():
            return super().evaluation_loop(*args, **kwargs)

    def _dealt(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Deal a single process's batches to the ranks, where accelerate would repeat some rows.

        Raises:
            ConfigError: the number of rows is unknown, or some would be left out.
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
        # With persistent workers the Trainer reuses an evaluation's loader, which is dealt already.
        if not isinstance(shard.batch_sampler, WholeRounds):
            if self.args.dataloader_drop_last and (rest := len(shard.batch_sampler) % size):
                raise ConfigError(
                    f"with dataloader_drop_last {size} ranks leave {rest} batches of the evaluation out, which one "
                    "process would count. Choose a number of rows that is a multiple of per_device_eval_batch_size "
                    "times the ranks, or leave dataloader_drop_last out."
                )
            shard.batch_sampler = WholeRounds(shard.batch_sampler, size)
            # Otherwise accelerate would repeat rows from the start until all ranks have equally many.
            shard.even_batches = False
        return loader

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Evaluate a batch as a single process does, with the mean over its own tokens as its loss.

        Raises:
            ConfigError: logits are asked for, which a fused loss does not make.
        """
        only_loss = args[0] if args else kwargs.get("prediction_loss_only")
        if not only_loss and not self.streamed.has_logits:
            raise ConfigError(
                "predictions are logits, which a model with a fused loss does not make: give the trainer "
                "megatier.stream(..., fused_loss=False), or set prediction_loss_only."
            )
        # Otherwise the Trainer would count the tokens of all ranks, and each loss would be only a part of the mean.
        with patched(vars(self.args), average_tokens_across_devices=False):
            prediction = super().prediction_step(model, inputs, *args, **kwargs)
        return self._filled_up(inputs, *prediction) if self.streamed.num_ranks > 1 else prediction

    def _filled_up(self, inputs: dict[str, Any], loss: Any, logits: Any, labels: Any) -> Any:  # noqa: ANN401
        """Pad the logits and labels of a short batch to as many rows as other ranks have.

        The Trainer gathers tensors of equal size, and cuts off rows beyond the dataset's last.

        Raises:
            ConfigError: the tensors do not have one row per example.
        """
        state = self.accelerator.gradient_state
        size = self.args.eval_batch_size
        rows = state.remainder % size
        if not state.end_of_dataloader or state.remainder <= 0 or not rows or (logits is None and labels is None):
            return loss, logits, labels

        short, rank = state.remainder // size, self.streamed.rank
        num_rows = self.streamed.all_of(find_batch_size(inputs))
        if num_rows == [rows] * self.streamed.num_ranks and not short:
            return loss, logits, labels
        if num_rows != [rows if number == short else size for number in range(self.streamed.num_ranks)]:
            raise ConfigError(
                f"the last batches of an evaluation have {num_rows} rows on the ranks, and the dataset has {rows} for "
                f"that of rank {short}. Use a collator that keeps one row for each example, set prediction_loss_only, "
                f"or choose a number of rows that is a multiple of per_device_eval_batch_size times the ranks."
            )

        # A tensor may have several entries per row, so it grows in proportion.
        def fill(tensor: Tensor) -> Tensor:
            times = -(-size // rows)
            once_each = (tensor.dim() - 1) * [1]
            repeated = tensor.repeat(times, *once_each)
            num_entries = len(tensor) * size // rows
            return repeated[:num_entries]

        if rank == short:
            # The Trainer may gather this one too.
            name = getattr(self.model, "main_input_name", "input_ids")
            inputs[name] = fill(inputs[name])
            logits, labels = recursively_apply(fill, (logits, labels))
        return loss, logits, labels


def _counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 batch` and `7 batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
