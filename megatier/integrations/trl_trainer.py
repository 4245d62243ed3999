"""TRL's trainers over a streamed model: `class StreamedSFT(StreamedTrl, SFTTrainer)`, and so with DPOTrainer.

TRL puts a forward of its own in the place of the model's, with head and loss in one, and multiplies by the head's
weight there. So that weight is lent to it: a copy, from forward to backward.
"""

from __future__ import annotations

import functools
from typing import Any

from megatier.errors import ConfigError
from megatier.integrations.streamed import Streamed
from megatier.integrations.transformers_trainer import StreamedTraining


class StreamedTrl(StreamedTraining):
    """Mixin for trainers of TRL; see `StreamedTraining`."""

    def __init__(self, model: Streamed, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the trainer's
        """Take a streamed model where the trainer takes a model, and all that the trainer takes.

        Raises:
            ConfigError: an argument asks for what a streamed model has not.
        """
        if not model.has_logits:
            raise ConfigError("TRL computes the loss itself: call megatier.stream with fused_loss=False.")
        super().__init__(model, *args, **kwargs)
        forward = model.model.forward

        @functools.wraps(forward)
        def entering(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if not kwargs.get("fused_lm_head"):
                return forward(*args, **kwargs)
            with model.one_forward("evaluate with a lent head"), model.lent_head():
                return forward(*args, **kwargs)

        model.model.forward = entering
