"""What generation costs: a model whose weights do not fit the GPU reads them from its tiers for every token."""

from __future__ import annotations

import functools
import logging
from typing import Any

from transformers import GenerationMixin

from megatier.errors import mib
from megatier.session.session import Session

LOG = logging.getLogger("megatier")
TO_GPU = ("ram_to_gpu", "nvme_to_gpu")
"""Queues that bring weights to the GPU."""
FROM_DRIVES = ("nvme_to_ram", "nvme_to_gpu")
"""Queues that read them from drives."""


def log_first_generation(session: Session) -> None:
    """Let the first `generate` of two tokens or more say, once, which bytes each token has moved.

    Args:
        session: the session, whose model the user calls.
    """
    model = session.model
    if not isinstance(model, GenerationMixin) or (session.ranks is not None and session.ranks.rank):
        return
    generate = model.generate

    @functools.wraps(generate)
    def generating(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's
        moved = []
        hook = model.register_forward_hook(lambda *_: moved.append(session.player.demanded.copy()))
        try:
            found = generate(*args, **kwargs)
        finally:
            hook.remove()

        # The first forward reads the prompt, and waits for updates, whose bytes are no token's.
        if (tokens := len(moved) - 1) > 0:
            del vars(model)["generate"]
            per_token = {queue: (moved[-1][queue] - moved[0][queue]) // tokens for queue in (*TO_GPU, *FROM_DRIVES)}
            _log(sum(per_token[queue] for queue in TO_GPU), sum(per_token[queue] for queue in FROM_DRIVES))
        return found

    vars(model)["generate"] = generating


def _log(to_gpu: int, from_drives: int) -> None:
    """Say which way generation went.

    Args:
        to_gpu: bytes of weights that came to the GPU for each token.
        from_drives: bytes of weights that were read from drives for each token.
    """
    if not to_gpu:
        LOG.info("generation: all weights are at home on the GPU, so a token moves none.")
        return
    LOG.warning(
        "generation streams: each token moves %s of weights to the GPU, and reads %s from drives. Weights that are at "
        "home on the GPU move none; a larger tiers.gpu takes more of them.",
        mib(to_gpu),
        mib(from_drives),
    )
