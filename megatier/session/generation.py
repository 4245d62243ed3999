"""Wraps the `generate` of a streamed model: weights are held on the GPU, and the log says what each token moves.

`megatier.stream` installs it. It runs on the thread that calls `generate`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GenerationMixin

from megatier.byte_counts import format_bytes
from megatier.guards.prefix import is_cache
from megatier.session.held import HeldWeights
from megatier.session.session import Session

GENERATION_LOG = logging.getLogger("megatier")
QUEUES_TO_GPU = ("ram_to_gpu", "nvme_to_gpu")
"""Queues that bring weights to the GPU."""
QUEUES_FROM_DRIVES = ("nvme_to_ram", "nvme_to_gpu")
"""Queues that read weights from drives."""
TOLD_FROM = 3
"""From this forward on it is known what a token moves: the first two read the prompt and copy weights to hold."""
NOT_TWICE = ("past_key_values", "streamer")
"""Arguments of `generate` that a text changes, as it changes caches. With these it cannot be generated again."""


def hold_in_generation(session: Session, limit_bytes: int | None) -> HeldWeights:
    """Make the model's `generate` hold weights on the GPU, and log once how many bytes each token moves.

    If memory runs out while weights are held, the text is generated again without them. It is the same text, because
    the random state is set back.

    Args:
        session: the session, whose model the user calls.
        limit_bytes: the GPU memory that the process may take; see `HeldWeights`.
    """
    held = HeldWeights(session, limit_bytes)
    if isinstance(session.model, GenerationMixin):
        vars(session.model)["generate"] = _wrap_generate(session, held, session.model.generate)
    return held


def _wrap_generate(session: Session, held: HeldWeights, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's `generate`."""
    # The first rank alone logs it, and only once.
    is_told = session.ranks is not None and session.ranks.rank > 0

    def generate_once(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's
        nonlocal is_told
        with _demands(session) as demands:
            generated = generate(*args, **kwargs)
        if not is_told and len(demands) >= TOLD_FROM:
            is_told = True
            # Only the last token counts, since the first forwards read the prompt and copy weights to hold.
            _log(demands[-1] - demands[-2], held.num_bytes, is_alone=session.ranks is None)
        return generated

    @functools.wraps(generate)
    def generating(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's
        if held.is_needless:
            return generate(*args, **kwargs)
        if session.ranks is not None:
            # Each token takes all ranks, so a rank whose texts are done goes on until all are.
            kwargs.setdefault("synced_gpus", True)
        rewind = _rewinder(session.engine.options.device)

        # The first try may have used up or filled the caller's arguments.
        given = [(name, value) for name, value in kwargs.items() if value is not None]
        with held.opened():
            try:
                return generate_once(*args, **kwargs)
            except torch.OutOfMemoryError:
                if not held.num_bytes or any(name in NOT_TWICE or is_cache(value) for name, value in given):
                    raise

            # Outside of the handler, because the error keeps the tensors of the text alive, such as its cache.
            GENERATION_LOG.warning(
                "generation: GPU memory ran out while weights were held there, so from now on they stream."
            )
            held.refuse()
            rewind()
            return generate_once(*args, **kwargs)

    return generating


@contextlib.contextmanager
def _demands(session: Session) -> Iterator[list[Counter[str]]]:
    """Record the demanded bytes so far after each forward of the model."""
    demands = list[Counter[str]]()
    hook = session.model.register_forward_hook(lambda *_: demands.append(session.player.demanded))
    try:
        yield demands
    finally:
        hook.remove()


def _rewinder(device: torch.device) -> Callable[[], None]:
    """Return a function that restores torch's present random state."""
    # The second try has to sample the text that the first one would have sampled.
    on_cpu = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def rewind() -> None:
        torch.set_rng_state(on_cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)

    return rewind


def _log(moved: Counter[str], held_bytes: int, *, is_alone: bool) -> None:
    """Log how weights reach the GPU while text is generated.

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
            format_bytes(held_bytes),
        )
        return
    remedy = (
        f"Its free memory holds {format_bytes(held_bytes)} more; a smaller batch or a lower tiers.gpu leaves it more "
        "room, and Streamed.lends_memory gives it that of training."
    )
    GENERATION_LOG.warning(
        "generation streams: each token moves %s of weights to the GPU, and reads %s from drives. %s",
        format_bytes(to_gpu),
        format_bytes(sum(moved[queue] for queue in QUEUES_FROM_DRIVES)),
        remedy if is_alone else "Several ranks hold none, unless they lend memory (Streamed.lends_memory).",
    )
