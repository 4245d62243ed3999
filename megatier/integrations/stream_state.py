"""The state of a streamed model between two steps: its masters as tensors, exports and checkpoints.

Ranks share the state, so all of this is for all ranks to call alike. A call that one of them leaves out is an error on
all of them.
"""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from megatier.adapters.adapter_folder import export_trained
from megatier.adapters.base import noted_identity
from megatier.adapters.given_adapters import without_adapters
from megatier.adapters.lora import adapter_config
from megatier.checkpoint.checkpoint import settle_replaced
from megatier.checkpoint.checkpoint_writer import CheckpointWriter
from megatier.checkpoint.environment import read_environment
from megatier.checkpoint.restore import restore
from megatier.checkpoint.run_directory import parse_step
from megatier.checkpoint.run_state import read_tiles
from megatier.errors import BlockNotFoundError, CapacityError, StreamedModelError
from megatier.guards.token_rows import few_tokens
from megatier.hardware import ram_available_bytes
from megatier.integrations.saved_stream import SavedStream
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
"""What DeepSpeed's engine, or a model, has, and what a streamed model has for it."""


class StreamedState(ABC):
    """The state of a streamed model between two steps: it can be read, written and restored.

    Attributes:
        model: the Hugging Face model.
        optimizer: the optimizer, whose settings are saved too.
        steps: number of steps so far.
        groups: number of backwards of a step, of all ranks together.
    """

    optimizer: StreamedOptimizer

    def __init__(self, session: Session, *, is_from_folder: bool, has_new_adapters: bool) -> None:
        """Take a session that is loaded.

        Args:
            session: the session.
            is_from_folder: whether the weights are those of the folder that the model's config names.
            has_new_adapters: whether the model has adapters that begin now.
        """
        config = session.setup.config
        self._session = session
        self._held = hold_in_generation(session, config.tiers.gpu_limit)
        self._kept = {"optimizer": config.train.optimizer, "moments": config.train.moments}
        self._all_ranks = session.all_ranks
        self._is_from_folder = is_from_folder
        self._begins_adapters = has_new_adapters
        self.model = session.model
        self.groups = config.train.groups
        self.steps = 0
        self._inside = 0
        """The thread whose forward is running; 0: none is."""
        self._hub_weights: HubWeights | None = None

    @abstractmethod
    def _check_between_steps(self, what: str) -> None:
        """Refuse what cannot be done while a step is open.

        Args:
            what: the subject of the refusal.
        """

    @property
    def device(self) -> torch.device:
        """Device on which the model computes, and to which batches belong."""
        return self._session.engine.options.device

    @property
    def has_logits(self) -> bool:
        """Whether the model gives logits as well as the loss."""
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
        """Whether the model has adapters with which it computes what its base does, since no step was made."""
        return self._begins_adapters and not self.steps

    def __call__(self, *_: Never, **__: Never) -> NoReturn:
        """Say what is called instead.

        Raises:
            StreamedModelError: always.
        """
        raise StreamedModelError("a Streamed is no model itself: call its .model, as in streamed.model(**batch).")

    def __getattr__(self, name: str) -> NoReturn:
        """Say what to give to those who take this for a model, or for DeepSpeed's engine."""
        if name in OF_ENGINES:
            raise AttributeError(f"'Streamed' object has no attribute {name!r}. Use {OF_ENGINES[name]} instead.")
        raise AttributeError(
            f"'Streamed' object has no attribute {name!r}. Hugging Face's model is its .model. To train it by a "
            "trainer, put the mixin before the trainer: class Mine(StreamedTrl, SFTTrainer) for TRL's (from "
            "megatier.integrations.trl_trainer), else class Mine(StreamedTraining, Trainer)."
        )

    def try_tiles(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Find out, before the first forward with tiles of tokens, which modules run in them. All ranks come here.

        Args:
            forward: the forward that is to come.
            args: what it is given.
            kwargs: the same, by name.
        """
        if self._session.engine.model.knows_tiles or self._inside:
            return

        self._finish_updates("The first forward", "a first forward")
        few = few_tokens([*args, *kwargs.values()])
        named = dict(zip(kwargs, few[len(args) :], strict=True))

        # The model's own forward takes itself for a part of this one then, and begins none of its own.
        self._inside = threading.get_ident()
        try:
            self._session.engine.try_tiles(lambda: forward(*few[: len(args)], **named), "try tiles")
        finally:
            self._inside = 0

        # Nobody asks for the events of this pass, which would count for the first step.
        self._session.player.take_events()

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Let forwards be those of the base without its adapters for a while. Use it under `torch.no_grad`."""
        return without_adapters(self.model)

    def all_of(self, value: T) -> list[T]:
        """Return the objects of all ranks in their order, such as losses to add up. Any object will do."""
        self._sync_ranks("all_of()")
        return self._all_ranks.all_gather_object(value)

    def read(self, name: str) -> Tensor:
        """Return the fp32 master of a parameter after all steps so far, as a copy on the CPU. All ranks get it.

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
        """Return all fp32 masters by name, a tied one once, and persistent buffers, as copies on the CPU.

        All ranks get all of them.

        Raises:
            CapacityError: they do not fit RAM; `export` and `save` stream.
            StreamedModelError: a step is open.
        """
        self._finish_updates("Reading weights", "state_dict()")
        places = places_of(self._session.whole_units)

        # Checked before the first copy: a process that runs out of RAM half way is killed, and says nothing.
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
        """Return the weights that the next forward uses by the names of the model's folder, for an engine.

        Iterate over it as often as you like, between two steps: each tensor comes by itself, and none of all is whole.

        Raises:
            UnsupportedModelError: no layout of the model's folder is known that loads back.
        """
        # Kept from call to call: which tensors there are does not change, only their numbers do.
        if self._hub_weights is None:
            self._hub_weights = HubWeights(self._session, self._begin_weights)
        return self._hub_weights

    def _begin_weights(self) -> None:
        self._finish_updates("Giving weights out", "weights()")

    def _stop_weights(self, *, after_error: bool = False) -> None:
        """Give no more weights to whoever takes them: the model is used in another way, or closes."""
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
        """Write a folder that `from_pretrained` loads, or that of `PeftModel` if the model has adapters.

        The weights are written piece by piece, by the first rank.

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
            # The first rank alone has what reads: the others send it their shards inside.
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
        """Write a checkpoint, `step-...` in the folder: weights and moments in fp32, settings, the number of the step.

        It takes the place of a checkpoint of the same step, which stays whole until the new one is on the drive. All
        ranks write it together, so the folder has to be the same for all of them.

        Returns:
            The path of the checkpoint.

        Raises:
            CapacityError, TransferError: see `CheckpointWriter.wait`.
        """
        self._finish_updates("A checkpoint", "save()")
        path = Path(folder)

        # By the first rank, before any of them writes there.
        self._all_ranks.broadcast(lambda: _make_ready(path))
        tiles = self._session.engine.model.tiles
        state = {
            # By this key `restore` tells such a checkpoint from one of `megatier train`.
            "streamed": self.optimizer.saved_settings(),
            "environment": read_environment(self.device),
            "groups": self.groups,
            "tiles": {module: asdict(decision) for module, decision in tiles.items()},
            "base": noted_identity(self.model),
            "compiled": self._compiled,
            "fp8_products": list(self._session.engine.options.fp8_products),
            **self._kept,
        }
        writer = CheckpointWriter(self._session, path, self.steps, state)
        return writer.wait()

    def saved_groups(self, folder: StrPath) -> int | None:
        """Return how many groups the steps of the last checkpoint of a folder had. All ranks call it alike.

        Returns:
            The number of backwards of all ranks together; None: an older version wrote the checkpoint.

        Raises:
            CheckpointError: see `restore`.
        """
        return self._all_ranks.broadcast(lambda: SavedStream.find(Path(folder)).groups)

    def restore(self, folder: StrPath) -> None:
        """Take the state of the last checkpoint of a folder, bit by bit. The tiers may be others than those it is from.

        So may the number of ranks. This also mends a model that was interrupted while state was changed
        (`TornStateError`).

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
        saved = self._saved(Path(folder))
        tiles = read_tiles(saved.state)  # read before anything is changed, as it may be damaged
        # Weights that are held for a text that is generated would be those of before.
        self._held.drop_all()

        def take_rest() -> None:
            self.optimizer.take_saved_settings(saved.state["streamed"])
            self._session.engine.model.take_tiles(tiles)
            self.steps = parse_step(saved.path)

        # Settings and the number of the step belong to the state: if one of them cannot be taken, the state is torn.
        restore(self._session, saved.path, take_rest=take_rest)

    def restore_weights(self, folder: StrPath) -> None:
        """Take the masters of the last checkpoint of a folder alone: moments, settings and steps stay as they are.

        Raises:
            CheckpointError: see `restore`.
            TornStateError: something was interrupted while state was changed, so `restore` has to mend it.
        """
        self._finish_updates("Restoring weights", "restore_weights()")
        saved = self._saved(Path(folder))
        self._held.drop_all()
        restore(self._session, saved.path, weights_only=True)

    def _saved(self, folder: Path) -> SavedStream:
        """Return the last checkpoint of a folder, which is refused if it is of another optimizer or base.

        A warning says what rounds steps in other ways from it on.
        """

        def find() -> SavedStream:
            saved = SavedStream.find(folder)
            saved.check(self._kept, noted_identity(self.model))
            fp8 = self._session.engine.options.fp8_products
            for remark in saved.remarks(self._compiled, fp8, read_environment(self.device)):
                warnings.warn(remark, stacklevel=5)  # the line that called `restore` or `restore_weights`
            return saved

        return self._all_ranks.broadcast(find)

    @property
    def _compiled(self) -> str:
        """How layers and loss are compiled, which decides in which order they add up."""
        compilation = self._session.engine.options.compilation
        if compilation is None:
            return "not at all"
        return "for batches of any size" if compilation.any_shape else "for batches of one size"

    def _finish_updates(self, what: str, call: str) -> None:
        """Finish all updates that are due, so that weights may be read.

        Args:
            what: the subject of the refusal, if a step is open.
            call: what all ranks have to call.
        """
        self._check_between_steps(what)
        self._sync_ranks(call)
        self._session.player.drain()

    def _sync_ranks(self, call: str, dropped: str = "") -> list[tuple[int, str]]:
        """Wait until all ranks have come to the same call: they share the state, so each needs the others for it.

        Args:
            call: what this rank has come to.
            dropped: why it has dropped the open step; empty if it has not.

        Returns:
            The ranks that have dropped it, each with its cause.

        Raises:
            StreamedModelError: another rank has come to another call.
        """
        # A rank that makes another call meets the others here as well, so that all of them name it, and none hangs.
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
        """Read a whole parameter, whose parts may lie in several units (experts that were cut)."""
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


def _make_ready(folder: Path) -> None:
    """Make a folder of checkpoints, and put back what a killed process has left half replaced."""
    folder.mkdir(parents=True, exist_ok=True)

    # A process that was killed between the two renames of a switch has left the old checkpoint under another name.
    settle_replaced(folder)
