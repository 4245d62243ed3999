"""The state of a streamed model between two steps: its masters as tensors, exports and checkpoints.

The ranks share the state, so all of them make each of these calls. If one rank makes another call, all of them raise an
error.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from megatier.adapters.adapter_folder import export_trained
from megatier.adapters.given_adapters import without_adapters
from megatier.adapters.lora import adapter_config
from megatier.checkpoint.restore import restore
from megatier.checkpoint.run_directory import parse_step
from megatier.checkpoint.run_state import read_tiles
from megatier.errors import BlockNotFoundError, CapacityError, StreamedModelError
from megatier.guards.token_rows import few_tokens
from megatier.hardware import ram_available_bytes
from megatier.integrations.saved_stream import SavedStream
from megatier.integrations.stream_checkpoints import StreamCheckpoints
from megatier.integrations.stream_optimizer import StreamedOptimizer
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit
from megatier.models.expert_units import places_of
from megatier.models.weights import chunks
from megatier.saving.model_folder import SHARD_BYTES
from megatier.session.generation import hold_in_generation
from megatier.session.hub_weights import HubWeights
from megatier.session.session import Session
from megatier.setup.workload import COMPUTE_DTYPES

if TYPE_CHECKING:
    from _typeshed import StrPath

T = TypeVar("T")

OF_ENGINES = {
    "backward": "loss.backward()",
    "step": "its .optimizer.step()",
    "module": "its .model",
    "save_checkpoint": "its .save(folder)",
    "load_checkpoint": "its .restore(folder)",
    "save_16bit_model": "its .export(folder)",
    "save_pretrained": "its .export(folder)",
    "get_global_grad_norm": "its .grad_norm()",
    "global_steps": "its .steps",
}
"""Attributes of DeepSpeed's engine, or of a model, and what to use instead."""


class StreamedState(ABC):
    """The part of a streamed model that reads, writes and restores its state, between two steps.

    Attributes:
        model: the Hugging Face model.
        optimizer: the optimizer, whose settings are saved too.
        steps: number of steps so far.
        groups: number of backwards of a step, of all ranks together.
    """

    optimizer: StreamedOptimizer

    def __init__(self, session: Session, *, is_from_folder: bool, has_new_adapters: bool) -> None:
        """Take a loaded session.

        Args:
            session: the session.
            is_from_folder: whether the weights are those of the folder that the model's config names.
            has_new_adapters: whether the model has newly initialised adapters.
        """
        config = session.setup.config
        self._session = session
        self._held = hold_in_generation(session, config.tiers.gpu_limit)
        self._checkpoints = StreamCheckpoints(session)
        self._all_ranks = session.all_ranks
        self._is_from_folder = is_from_folder
        self._begins_adapters = has_new_adapters
        self.model = session.model
        self.groups = config.train.groups
        self.steps = 0
        self._inside = 0
        """The id of the thread that runs a forward; 0: none does."""
        self._hub_weights: HubWeights | None = None

    @abstractmethod
    def _check_between_steps(self, subject: str) -> None:
        """Refuse a call while a step is open.

        Args:
            subject: the subject of the message.
        """

    @property
    def device(self) -> torch.device:
        """The device on which the model computes, where batches belong."""
        return self._session.engine.options.device

    @property
    def has_logits(self) -> bool:
        """Whether the model returns logits besides the loss."""
        return not self._session.engine.model.fuses_loss

    @property
    def is_as_in_its_folder(self) -> bool:
        """Whether the weights are still those of the folder that the model's config names."""
        return self._is_from_folder and not self.steps

    @property
    def has_adapters(self) -> bool:
        """Whether the model has adapters."""
        return adapter_config(self.model) is not None

    @property
    def has_new_adapters(self) -> bool:
        """Whether the model has new adapters and no step was made, so that it still computes what its base does."""
        return self._begins_adapters and not self.steps

    def __call__(self, *_: Never, **__: Never) -> NoReturn:
        """Refuse the call, and say what to call instead.

        Raises:
            StreamedModelError: always.
        """
        raise StreamedModelError("this object is not the model: call its .model, as in streamed.model(**batch).")

    def __getattr__(self, name: str) -> NoReturn:
        """Say what to use instead, to users who take this for a model or for DeepSpeed's engine."""
        if name in OF_ENGINES:
            raise AttributeError(f"'Streamed' object has no attribute {name!r}. Use {OF_ENGINES[name]} instead.")
        raise AttributeError(
            f"'Streamed' object has no attribute {name!r}. Hugging Face's model is its .model. To train it by a "
            "trainer, put the mixin before the trainer: class Mine(StreamedTrl, SFTTrainer) for TRL's (from "
            "megatier.integrations.trl_trainer), else class Mine(StreamedTraining, Trainer)."
        )

    def try_tiles(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Find out, before the first forward with tiles of tokens, which modules run in them. All ranks call this.

        Args:
            forward: the coming forward.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        if self._session.engine.model.knows_tiles or self._inside:
            return

        self._finish_updates("The first forward", "a first forward")
        few = few_tokens([*args, *kwargs.values()])
        named = dict(zip(kwargs, few[len(args) :], strict=True))

        # With this set, the model's forward counts as a part of this one and begins none of its own.
        self._inside = threading.get_ident()
        try:
            self._session.engine.try_tiles(lambda: forward(*few[: len(args)], **named), "try tiles")
        finally:
            self._inside = 0

        # Dropped, or the events of this pass would count for the first step.
        self._session.player.take_events()

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Disable the adapters inside, so that forwards are those of the base. Use it under `torch.no_grad`."""
        return without_adapters(self.model)

    def all_of(self, value: T) -> list[T]:
        """Gather one object from each rank, in the order of ranks, such as losses to add up."""
        self._sync_ranks("all_of()")
        return self._all_ranks.all_gather_object(value)

    def read(self, name: str) -> Tensor:
        """Return a copy of a parameter's fp32 master on the CPU, after all steps so far, on all ranks.

        Args:
            name: the parameter's name in the model; a tied one has its first name.

        Raises:
            BlockNotFoundError: the model has no parameter of that name.
            StreamedModelError: a step is open.
        """
        self._finish_updates("Reading weights", f"read({name!r})")
        places = places_of(self._session.whole_units)
        if name not in places:
            raise BlockNotFoundError(
                f"{type(self.model).__name__} has no parameter {name!r}; a tied one has its first name"
            )
        return self._read(places[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all fp32 masters by name, a tied one once, and of persistent buffers, on the CPU.

        Every rank gets all of them.

        Raises:
            CapacityError: they do not fit RAM; `export` and `save` stream.
            StreamedModelError: a step is open.
        """
        self._finish_updates("Reading weights", "state_dict()")
        places = places_of(self._session.whole_units)

        # Checked before the first copy, since a process that runs out of RAM is killed without a message.
        with self._all_ranks.failing_together():
            num_elements = sum(tensor.num_elements for parts in places.values() for _, tensor in parts)
            # In fp32, for each rank of this host.
            needed = 4 * num_elements * self._all_ranks.local_size
            free = ram_available_bytes()
            if needed > free:
                raise CapacityError(
                    "ram", needed, free, "Write the weights to files with export(folder): that streams."
                )

        state = self.model.state_dict(keep_vars=True)
        buffers = {name: tensor.cpu() for name, tensor in state.items() if not isinstance(tensor, nn.Parameter)}
        return {name: self._read(parts) for name, parts in places.items()} | buffers

    def weights(self) -> HubWeights:
        """Return the weights of the next forward, by their names in the model's folder, for an inference engine.

        Iterate over it between two steps, as often as you like. Tensors come one by one, so they are never all in
        memory.

        Raises:
            UnsupportedModelError: no layout of the model's folder is known that loads back.
        """
        # Cached, since only the numbers change, not the set of tensors.
        if self._hub_weights is None:
            self._hub_weights = HubWeights(self._session, self._begin_weights)
        return self._hub_weights

    def _begin_weights(self) -> None:
        self._finish_updates("Giving weights out", "weights()")

    def _stop_weights(self, *, after_error: bool = False) -> None:
        """Stop an iteration over weights, because the model is used in another way or closes."""
        if self._hub_weights is not None and after_error:
            self._hub_weights.drop()
        elif self._hub_weights is not None:
            self._hub_weights.stop()

    def export(
        self,
        folder: StrPath,
        *,
        dtype: Literal["bf16", "fp32"] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Write a folder for `from_pretrained`, or one for `PeftModel` if the model has adapters.

        The first rank writes the weights, piece by piece.

        Args:
            folder: a new or empty folder.
            dtype: type of the written weights; fp32 writes the masters, None takes the compute dtype.
            tokenizer: a tokenizer to write into the folder too.

        Raises:
            ConfigError, CapacityError, TransferError: see `models.export.export`.
        """
        self._finish_updates("An export", "export()")
        session = self._session
        written = session.engine.options.dtype if dtype is None else COMPUTE_DTYPES[dtype]
        with self._all_ranks.failing_together(), session.reading_masters() as read:
            # Only the first rank has a reader. The others send it their shards inside.
            if read is not None:
                export_trained(
                    Path(folder),
                    self.model,
                    session.whole_units,
                    read,
                    written,
                    SHARD_BYTES,
                    tokenizer,
                )

    def save(self, folder: StrPath) -> Path:
        """Write a checkpoint `step-...` into the folder: weights and moments in fp32, settings, and the step number.

        It replaces a checkpoint of the same step, which stays whole until the new one is on the drive. All ranks write
        it together, so all of them must see the same folder.

        Returns:
            The path of the checkpoint.

        Raises:
            CapacityError, TransferError: see `CheckpointWriter.wait`.
        """
        self._finish_updates("A checkpoint", "save()")
        return self._checkpoints.write(Path(folder), self.steps, self.optimizer.saved_settings())

    def saved_groups(self, folder: StrPath) -> int | None:
        """Return the number of groups in the steps of a folder's last checkpoint. All ranks call it.

        Returns:
            The number of backwards of all ranks together; None: an older version wrote the checkpoint.

        Raises:
            CheckpointError: see `restore`.
        """
        return self._all_ranks.broadcast(lambda: SavedStream.find(Path(folder)).groups)

    def restore(self, folder: StrPath) -> None:
        """Restore the last checkpoint of a folder, bit by bit. It may come from other tiers or another number of ranks.

        This also repairs a model whose state was interrupted while it changed (`TornStateError`).

        Raises:
            CheckpointError: there is no checkpoint, or it is of another model or optimizer, or of moments of another
                type, or it is damaged.

        Warns:
            UserWarning: layers are compiled in another way, or libraries, devices or their settings are others.
        """
        # Not `_finish_updates`, since a torn state cannot be drained. `loading` drains a whole one, and resets a torn
        # one.
        self._check_between_steps("Restoring a checkpoint")
        self._sync_ranks("restore()")
        saved = self._checkpoints.find_last(Path(folder))
        tiles = read_tiles(saved.state)  # read before anything is changed, as it may be damaged
        # Weights that are held for generation would be old ones.
        self._held.drop_all()

        def take_rest() -> None:
            self.optimizer.take_saved_settings(saved.state["streamed"])
            self._session.engine.model.take_tiles(tiles)
            self.steps = parse_step(saved.path)

        # Settings and the step number belong to the state, so if one of them cannot be restored, the state is torn.
        restore(self._session, saved.path, take_rest=take_rest)

    def restore_weights(self, folder: StrPath) -> None:
        """Restore only the masters of a folder's last checkpoint. Moments, settings and steps stay as they are.

        Raises:
            CheckpointError: see `restore`.
            TornStateError: the state was interrupted while it changed, so `restore` has to repair it.
        """
        self._finish_updates("Restoring weights", "restore_weights()")
        saved = self._checkpoints.find_last(Path(folder))
        self._held.drop_all()
        restore(self._session, saved.path, weights_only=True)

    def _finish_updates(self, subject: str, call: str) -> None:
        """Finish all pending updates, so that weights can be read.

        Args:
            subject: the subject of the message if a step is open.
            call: the call that all ranks must make.
        """
        self._check_between_steps(subject)
        self._sync_ranks(call)
        self._session.player.drain()

    def _sync_ranks(self, call: str, dropped: str = "") -> list[tuple[int, str]]:
        """Synchronise all ranks, and check that they make the same call, since each needs the others' shards for it.

        Args:
            call: this rank's call.
            dropped: why this rank has dropped the open step; empty: it has not.

        Returns:
            The ranks that have dropped it, each with its reason.

        Raises:
            StreamedModelError: another rank makes another call.
        """
        # A rank that makes another call synchronises here too, so all ranks report it and none hangs.
        told = self._all_ranks.all_gather_object((call, dropped))
        for rank, (other, _) in enumerate(told):
            if other != call:
                raise StreamedModelError(
                    f"rank {self._all_ranks.rank} has come to {call}, and rank {rank} to {other}. All ranks of a "
                    "streamed model make the same calls in the same order: read, save and export outside of "
                    "`if rank == 0`."
                )
        return [(rank, cause) for rank, (_, cause) in enumerate(told) if cause]

    def _read(self, parts: Sequence[tuple[Unit, TensorSlice]]) -> Tensor:
        """Read a whole parameter, whose parts may lie in several units (split experts)."""
        num_elements = sum(tensor.num_elements for _, tensor in parts)
        master = torch.empty(num_elements, dtype=torch.float32, device="cpu")
        first = 0
        for unit, tensor in parts:
            for start, stop in chunks(tensor.num_elements):
                elements = self._session.read_whole(unit, tensor.start + start, tensor.start + stop)
                master[first + start : first + stop] = elements
            first += tensor.num_elements
        _, first_tensor = parts[0]
        return master.view(first_tensor.parameter_shape)
