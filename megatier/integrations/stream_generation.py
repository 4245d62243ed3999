"""Text generation with a streamed model: all weights on the GPU, loaded once, in memory that training lends.

    with streamed.lent_memory(), streamed.held_weights():
        streamed.model.generate(...)  # as often as you like: no token moves a weight

Between two steps training needs nothing on the GPU: slots and gradients are empty, and state at home there can move to
RAM. Before that, all pending work ends: updates that are due (speculative ones too), their write-backs, and weights
that an engine is reading.
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

from megatier.byte_counts import format_bytes
from megatier.errors import StreamedModelError
from megatier.integrations.stream_steps import StreamedSteps
from megatier.patch import patched
from megatier.schedule.lent_room import LentRoom
from megatier.session.resident_weights import ResidentWeights
from megatier.session.session import Session

_LOG = logging.getLogger("megatier")


class StreamedGeneration(StreamedSteps):
    """The part of a streamed model that generates text, by itself or through an engine.

    Attributes:
        lends_memory: whether the model's `generate` and `generate_batch`, and TRL's colocated vLLM, use the GPU memory
            of training while they run. It may be set at any time.
    """

    def __init__(self, session: Session, *, is_from_folder: bool, has_new_adapters: bool) -> None:
        """Take a loaded session; see `StreamedState`."""
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
        """Lend the GPU memory of slots, gradients and state to generation inside.

        State from the GPU is in RAM meanwhile, outside the budgets. Inside, the model runs only in `held_weights()`,
        and `weights()` feed an engine. When the block ends, the memory is taken back and the state restored. If others
        still use the memory then, the next call of this object takes it back. Ranks open the block together: all of
        them lend, or none does.

        Raises:
            StreamedModelError: a step is open.
            CapacityError: RAM has no room for the state, on this rank or another one; or others still use the memory at
                the end.
        """
        self._finish_updates("Lending memory", "lent_memory()")
        # Views of the arena are cached by address, and other bytes may lie there later.
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
        """Return how much GPU memory generation in lent memory will have, and how much RAM lending takes.

        Nothing is moved. Call it between two steps, such as before a run, to find a lack of memory early.

        Raises:
            StreamedModelError: a step is open, or memory is lent.
            CapacityError: all weights together do not fit the GPU, or RAM has no room for the state.
        """
        self._check_between_steps("Counting lent memory")
        self._session.store.loan.check_ram()
        return self._resident.lent_room()

    @contextlib.contextmanager
    def held_weights(self) -> Iterator[None]:
        """Hold all weights on the GPU inside, in the compute dtype. They are loaded once, and forwards load nothing.

        Only forwards without gradients run inside. Within `lent_memory()` the weights use the lent memory, otherwise
        other GPU memory. Ranks open the block together, and each generates its own texts.

        Raises:
            StreamedModelError: a step is open, or a model with tile_tokens has made no forward yet.
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
        """Log once, on the first rank, what is held and what training has lent for it."""
        if self._has_logged or self.rank > 0:
            return
        self._has_logged = True
        held = format_bytes(self._resident.num_bytes)
        if self._is_lending:
            state = format_bytes(self._session.store.loan.num_bytes)
            where = f"in memory that training lends. Its state there, {state}, lies in RAM meanwhile"
        else:
            where = "beside the memory of training"
        left = format_bytes(self._resident.left_bytes)
        _LOG.info(
            "generation: all weights are held on the GPU, so a token moves none: %s %s. For keys and values, and for "
            "the forward itself, %s are left.",
            held,
            where,
            left,
        )

    def _check_open(self) -> None:
        """Refuse calls that need the tiers during generation; see `StreamedSteps._check_open`."""
        super()._check_open()
        if self._is_lending or self._resident.is_loaded:
            raise StreamedModelError(
                "this needs the tiers, whose memory is lent, or whose weights are held, for generation. Inside of "
                "held_weights() make forwards without gradients alone, and inside of lent_memory() open held_weights() "
                "for them. Leave the block for everything else."
            )
        # Others may have used it when the block ended.
        self._session.store.loan.take_back()

    def _begin_weights(self) -> None:
        # All updates ended before the memory was lent, so an engine that uses it can be fed.
        if self._is_lending and not self._resident.is_loaded:
            self._stop_weights()
            self._sync_ranks("weights()")
        else:
            super()._begin_weights()

    def _held_forward(self) -> contextlib.AbstractContextManager[None]:
        """Run one forward inside, with weights that are held."""
        self._session.owner.check()
        if torch.is_grad_enabled():
            raise StreamedModelError(
                "a forward with gradients inside of held_weights(), where no backward can follow. Make it under "
                "torch.no_grad(), or leave the block first."
            )
        return self._resident.running()

    @contextlib.contextmanager
    def _generation(self, *, holds: bool) -> Iterator[None]:
        """Generate inside, in lent memory if `lends_memory` is set.

        Args:
            holds: whether all weights must be held, even if no memory is lent.
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
    """Collect the managers of continuous batching that a model opens inside, and stop their threads afterwards.

    After an error transformers waits only some seconds for a thread, whose forwards would then find no weights.
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
                    # Older versions have no hard stop, and finish all texts first.
                    hard = "hard_stop" in inspect.signature(manager.stop).parameters
                    manager.stop(block=True, **({"hard_stop": True} if hard else {}))


def _check_texts(texts: dict[str, Any], num_asked: int, managers: list[Any]) -> None:
    """Raise the error that stopped generation: transformers only logs it, and returns the texts that it has.

    Args:
        texts: the texts that transformers returned.
        num_asked: the number of prompts.
        managers: the managers that generated them.

    Raises:
        StreamedModelError: texts are missing or incomplete.
    """
    for manager in managers:
        # Newer versions keep the error itself.
        status = getattr(manager, "background_thread_status", None)
        if (error := getattr(status, "fatal_error", None)) is not None:
            raise error
    whole = [text for text in texts.values() if text.error is None]
    if len(whole) < max(num_asked, len(texts)):
        why = next(
            (text.error for text in texts.values() if text.error is not None), "see what transformers has logged"
        )
        raise StreamedModelError(f"generate_batch made {len(whole)} texts, and {num_asked} were asked for: {why}.")
