"""TRL's trainers over a streamed model: `class StreamedSFT(StreamedTrl, SFTTrainer)`, and so with DPOTrainer.

TRL puts a forward of its own in the place of the model's. It has head and loss in one, and multiplies by the head's
weight itself. So a copy of that weight is lent to it, from the forward to its backward.
"""

from __future__ import annotations

import functools
from typing import Any

from megatier.errors import ConfigError
from megatier.integrations.streamed import Streamed
from megatier.integrations.transformers_trainer import StreamedTraining


class StreamedTrl(StreamedTraining):
    """Mixin for trainers of TRL; see `StreamedTraining`."""

    fuses_loss = False

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the trainer's
        """Take a streamed model, or a folder, in the place of the trainer's model, and all other arguments.

        Raises:
            ConfigError: an argument asks for something that a streamed model does not have.
        """
        if isinstance(model, Streamed) and not model.has_logits:
            raise ConfigError("TRL computes the loss itself: call megatier.stream with fused_loss=False.")
        super().__init__(model, *args, **kwargs)
        model = self.streamed

        # TRL's constructor has replaced the forward by now, so this one wraps TRL's.
        forward = model.model.forward

        @functools.wraps(forward)
        def entering(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if not kwargs.get("fused_lm_head"):
                return forward(*args, **kwargs)

            # The head is used outside its module, so this forward's order of units is another than the model's own.
            with model.one_forward("evaluate with a lent head"), model.lent_head():
                return forward(*args, **kwargs)

        model.model.forward = entering
