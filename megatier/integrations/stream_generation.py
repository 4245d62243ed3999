"""Generation by a streamed model: all weights on the GPU, loaded once, in memory that training lends.

    with streamed.lent_memory(), streamed.held_weights():
        streamed.model.generate(...)  # as often as you like: no token moves a weight

Between two steps nothing of training is needed on the GPU: slots and gradients hold nothing, and state at home there
goes to RAM. Before that everything ends that is still under way: updates that are due, also speculative ones, their
write-backs, and weights that are being given out.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GenerationMixin

from megatier.errors import StreamedModelError, mib
from megatier.integrations.stream_steps import StreamedSteps
from megatier.patch import patched
from megatier.schedule.lent_room import LentRoom
from megatier.session.resident_weights import ResidentWeights
from megatier.session.session import Session

_LOG = logging.getLogger("megatier")


class StreamedGeneration(StreamedSteps):
    """What a streamed model does while it, or an engine beside it, generates text.

    Attributes:
        lends_memory: whether the model's `generate` and `generate_batch`, and TRL's colocated vLLM, lend the GPU memory
            of training while they run. It may be set at any time.
    """

    def __init__(self, session: Session, *, is_from_folder: bool, has_new_adapters: bool) -> None:
        """Take a session that is loaded; see `StreamedState`."""
        super().__init__(session, is_from_folder=is_from_folder, has_new_adapters=has_new_adapters)
        self.lends_memory = False
        self._resident = ResidentWeights(session, session.setup.config.tiers.gpu_limit)
        self._is_lending = False
        self._has_logged = False
        if isinstance(self.model, GenerationMixin):
            methods = vars(self.model)
            methods["generate"] = self._generating(self.model.generate)
            methods["generate_batch"] = self._generating_batch(self.model.generate_batch)

    @contextlib.contextmanager
    def lent_memory(self) -> Iterator[None]:
        """Lend the GPU memory of slots, gradients and state at home there to whoever generates inside.

        That state is in RAM meanwhile, beside the budgets; the room for it there is kept. Inside, the model runs only
        in `held_weights()`, and `weights()` feed an engine. Whatever ends the block takes the memory back, and all
        state is as it was. If others have the memory still, the next call of this object takes it back. Ranks open it
        together: all of them lend, or none does.

        Raises:
            StreamedModelError: a step is open.
            CapacityError: RAM has no room for the state, on this rank or another one; or, at the end, others have the
                memory still.
        """
        self._finish_updates("Lending memory", "lent_memory()")
        # Views of the arena are found by addresses, which may be those of other bytes later.
        self._engine.model.forget({unit.name for unit in self._session.own_units})

        loan = self._session.store.loan
        try:
            self._is_lending = True
            loan.lend(self._all_ranks.failing_together())
            self._all_ranks.lend_memory()
            yield
        finally:
            self._is_lending = False
            try:
                self._stop_weights()
            finally:
                loan.take_back()

    def lent_room(self) -> LentRoom:
        """Return what text in lent memory will have of this GPU, and what lending takes of RAM. Nothing is moved.

        Call it between two steps, as before a run: a text then fails no more for want of memory for weights.

        Raises:
            StreamedModelError: a step is open, or memory is lent.
            CapacityError: all weights at once do not fit the GPU, or RAM has no room for the state at home there.
        """
        self._check_between_steps("Counting lent memory")
        self._session.store.loan.check_ram()
        return self._resident.lent_room()

    @contextlib.contextmanager
    def held_weights(self) -> Iterator[None]:
        """Hold all weights on the GPU inside, in the compute dtype. They are loaded once, and no forward moves any.

        Only forwards without gradients are made inside. Within `lent_memory()` there is room where the state was, else
        beside it. Ranks open it together, and each makes the texts that it likes.

        Raises:
            StreamedModelError: a step is open, or no forward was made with tile_tokens.
            CapacityError: the weights do not fit.
        """
        if self._resident.is_loaded:
            yield
            return

        if self._is_lending:
            self._stop_weights()
            self._sync_ranks("held_weights()")
        else:
            self._finish_updates("Holding weights", "held_weights()")
        if not self._engine.model.knows_tiles:
            raise StreamedModelError(
                "held_weights() before the first forward of a model with tile_tokens, which finds out what runs in "
                "tiles. Make a forward under torch.no_grad() first."
            )
        with self._resident.loaded():
            self._log_held_weights()
            yield

    def _log_held_weights(self) -> None:
        """Say once what is held, and what training has lent for it. The first rank alone does."""
        if self._has_logged or self.rank > 0:
            return
        self._has_logged = True
        held = mib(self._resident.num_bytes)
        if self._is_lending:
            state = mib(self._session.store.loan.num_bytes)
            where = f"in memory that training lends. Its state there, {state}, lies in RAM meanwhile"
        else:
            where = "beside the memory of training"
        left = mib(self._resident.left_bytes)
        _LOG.info(
            "generation: all weights are held on the GPU, so a token moves none: %s %s. For keys and values, and for "
            "the forward itself, %s are left.",
            held,
            where,
            left,
        )

    def _check_open(self) -> None:
        """Refuse what needs the tiers while text is generated; see `StreamedSteps._check_open`."""
        super()._check_open()
        if self._is_lending or self._resident.is_loaded:
            raise StreamedModelError(
                "this needs the tiers, whose memory is lent, or whose weights are held, for generation. Inside of "
                "held_weights() make forwards without gradients alone, and inside of lent_memory() open held_weights() "
                "for them. Leave the block for everything else."
            )
        # Others may have had it when the block ended.
        self._session.store.loan.take_back()

    def _begin_weights(self) -> None:
        # All updates were over before the memory was lent, so an engine that has it may be fed there.
        if self._is_lending and not self._resident.is_loaded:
            self._stop_weights()
            self._sync_ranks("weights()")
        else:
            super()._begin_weights()

    def _held_forward(self) -> contextlib.AbstractContextManager[None]:
        """Run one forward with weights that are held inside."""
        self._session.owner.check()
        if torch.is_grad_enabled():
            raise StreamedModelError(
                "a forward with gradients inside of held_weights(), where no backward can follow. Make it under "
                "torch.no_grad(), or leave the block first."
            )
        return self._resident.running()

    @contextlib.contextmanager
    def _generation(self, *, holds: bool) -> Iterator[None]:
        """Generate inside, in memory that is lent if `lends_memory` says so.

        Args:
            holds: whether all weights have to be held, in memory that is not lent too.
        """
        with contextlib.ExitStack() as opened:
            if self.lends_memory and not (self._is_lending or self._resident.is_loaded):
                opened.enter_context(self.lent_memory())
            if holds or self._is_lending:
                opened.enter_context(self.held_weights())
            yield

    def _generating(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a model's `generate`."""

        @functools.wraps(generate)
        def generating(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's
            with self._generation(holds=False):
                return generate(*args, **kwargs)

        return generating

    def _generating_batch(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a model's `generate_batch`, transformers' continuous batching."""

        @functools.wraps(generate)
        def generating(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's
            if kwargs.get("persistent_manager"):
                raise StreamedModelError(
                    "generate_batch with persistent_manager: its graphs would read weights where they lie now, and "
                    "they are let go when it ends. Leave it out."
                )
            with self._generation(holds=True), _noting_managers(self.model) as managers:
                texts = generate(*args, **kwargs)
            inputs = args[0] if args else kwargs["inputs"]
            _check_texts(texts, len(inputs), managers)
            return texts

        return generating


@contextlib.contextmanager
def _noting_managers(model: Any) -> Iterator[list[Any]]:  # noqa: ANN401 - of transformers
    """Note the managers of continuous batching that a model opens inside, and end their threads after that.

    After an error transformers waits for a thread no longer than some seconds, and its forwards would find no weights.
    """
    managers: list[Any] = []
    opens = model.init_continuous_batching

    def noting(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of transformers
        managers.append(opens(*args, **kwargs))
        return managers[-1]

    with patched(vars(model), init_continuous_batching=noting):
        try:
            yield managers
        finally:
            for manager in managers:
                if manager.is_running():
                    # Older versions know no such stop, and end all texts first.
                    hard = "hard_stop" in inspect.signature(manager.stop).parameters
                    manager.stop(block=True, **({"hard_stop": True} if hard else {}))


def _check_texts(texts: dict[str, Any], num_asked: int, managers: list[Any]) -> None:
    """Raise the error that ended texts: transformers logs it, and returns what there is.

    Args:
        texts: what it returns.
        num_asked: the least number of texts that were asked for.
        managers: those that made them.

    Raises:
        StreamedModelError: some are missing, or there in part alone.
    """
    for manager in managers:
        # Of versions that keep it, the error itself.
        status = getattr(manager, "background_thread_status", None)
        if (error := getattr(status, "fatal_error", None)) is not None:
            raise error
    whole = [text for text in texts.values() if text.error is None]
    if len(whole) < max(num_asked, len(texts)):
        why = next(
            (text.error for text in texts.values() if text.error is not None), "see what transformers has logged"
        )
        raise StreamedModelError(f"generate_batch made {len(whole)} texts, and {num_asked} were asked for: {why}.")
