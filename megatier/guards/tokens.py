"""Names token ids that the model does not have, where torch says only that an index is out of range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from megatier.errors import UnknownTokenError


@contextmanager
def naming_tokens(given: Mapping[str, Any], model: PreTrainedModel) -> Iterator[None]:
    """Run a forward of the model inside.

    Looked at only when it has failed: models with images take ids beyond their vocabulary in the place of these.

    Args:
        given: the arguments of the forward, by name.
        model: the model.

    Raises:
        UnknownTokenError: an id is outside of the vocabulary.
    """
    try:
        yield
    except IndexError as error:
        ids = given.get("input_ids")
        size = getattr(model.get_input_embeddings(), "num_embeddings", None)
        if not torch.is_tensor(ids) or size is None:
            raise

        # The index may be out of another range, such as that of the positions.
        wrong = ids[(ids < 0) | (ids >= size)]
        if not wrong.numel():
            raise
        raise UnknownTokenError(
            f"input_ids has the token {int(wrong[0])}, and the model has embeddings for 0 to {size - 1}. Use the "
            "model's own tokenizer, or call resize_token_embeddings on the model in RAM before megatier.stream."
        ) from error
