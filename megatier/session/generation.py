"""Generates text with a streamed model: weights are held on the GPU, and the log says what a token moves."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GenerationMixin

from megatier.errors import mib
from megatier.guards.prefix import is_cache
from megatier.session.held import HeldWeights
from megatier.session.session import Session

GENERATION_LOG = logging.getLogger("megatier")
QUEUES_TO_GPU = ("ram_to_gpu", "nvme_to_gpu")
"""Queues that bring weights to the GPU."""
QUEUES_FROM_DRIVES = ("nvme_to_ram", "nvme_to_gpu")
"""Queues that read them from drives."""
TOLD_FROM = 3
"""The forwards after which it is known what a token moves: the first two read the prompt, and take what is held."""
NOT_TWICE = ("past_key_values", "streamer")
"""Arguments of `generate` that a text changes, as caches are too. It cannot be generated again with them."""


def hold_in_generation(session: Session, limit_bytes: int | None) -> HeldWeights:
    """Let the model's `generate` hold weights on the GPU, and say once which bytes each token has moved.

    If memory runs out while weights are held, the text is generated again without them: the same text, since random
    numbers begin where they began.

    Args:
        session: the session, whose model the user calls.
        limit_bytes: the GPU memory that the process may take; see `HeldWeights`.
    """
    held = HeldWeights(session, limit_bytes)
    if isinstance(session.model, GenerationMixin):
        vars(session.model)["generate"] = _generating(session, held, session.model.generate)
    return held


def _generating(session: Session, held: HeldWeights, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's `generate`."""
    # The first rank alone says it, and once.
    is_told = session.ranks is not None and session.ranks.rank > 0

    def generate_once(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's
        nonlocal is_told
        with _demands(session) as demands:
            found = generate(*args, **kwargs)
        if not is_told and len(demands) >= TOLD_FROM:
            is_told = True
            # Of the last token alone: the first forwards have read the prompt, and have taken what is held.
            _log(demands[-1] - demands[-2], held.num_bytes, is_alone=session.ranks is None)
        return found

    @functools.wraps(generate)
    def generating(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's
        if held.is_needless:
            return generate(*args, **kwargs)
        if session.ranks is not None:
            # Each token takes all ranks, so those that are through with their texts go on until all are.
            kwargs.setdefault("synced_gpus", True)
        rewind = _rewinder(session.engine.options.device)

        # What a caller has handed in may have been used up or filled by the first try.
        given = [(name, value) for name, value in kwargs.items() if value is not None]
        with held.opened():
            try:
                return generate_once(*args, **kwargs)
            except torch.OutOfMemoryError:
                if not held.num_bytes or any(name in NOT_TWICE or is_cache(value) for name, value in given):
                    raise

            # Not in the handler: until it ends, the error's frames keep what was made of the text, such as its cache.
            GENERATION_LOG.warning(
                "generation: GPU memory ran out while weights were held there, so from now on they stream."
            )
            held.refuse()
            rewind()
            return generate_once(*args, **kwargs)

    return generating


@contextlib.contextmanager
def _demands(session: Session) -> Iterator[list[Counter[str]]]:
    """Note, after each forward of the model inside, the bytes that were demanded up to then."""
    demands = list[Counter[str]]()
    hook = session.model.register_forward_hook(lambda *_: demands.append(session.player.demanded))
    try:
        yield demands
    finally:
        hook.remove()


def _rewinder(device: torch.device) -> Callable[[], None]:
    """Return a function that sets torch's random numbers back to where they are now."""
    # A text that is sampled anew is to be the one that the first try would have given.
    on_cpu = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def rewind() -> None:
        torch.set_rng_state(on_cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)

    return rewind


def _log(moved: Counter[str], held_bytes: int, *, is_alone: bool) -> None:
    """Say which way generation went.

    Args:
        moved: bytes of weights that each queue moved for a token.
        held_bytes: bytes of weights that are held on the GPU while a text is generated.
        is_alone: whether there are no other ranks, so that weights may be held.
    """
    to_gpu = sum(moved[queue] for queue in QUEUES_TO_GPU)
    if not to_gpu and not held_bytes:
        GENERATION_LOG.info("generation: all weights are at home on the GPU, so a token moves none.")
        return
    if not to_gpu:
        GENERATION_LOG.info(
            "generation: all weights are resident on the GPU, so a token moves none. Its free memory holds those that "
            "are not at home there, %s, while a text is generated.",
            mib(held_bytes),
        )
        return
    remedy = (
        f"Its free memory holds {mib(held_bytes)} more; a smaller batch or a lower tiers.gpu leaves it more room, and "
        "Streamed.lends_memory gives it that of training."
    )
    GENERATION_LOG.warning(
        "generation streams: each token moves %s of weights to the GPU, and reads %s from drives. %s",
        mib(to_gpu),
        mib(sum(moved[queue] for queue in QUEUES_FROM_DRIVES)),
        remedy if is_alone else "Several ranks hold none, unless they lend memory (Streamed.lends_memory).",
    )
