"""Token ids that a model does not have; a streamed forward with one is in `test_integrations_streamed.py`."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import exactness_config, plain_model

from megatier.errors import UnknownTokenError
from megatier.guards.tokens import naming_tokens


@pytest.mark.parametrize("wrong", [-1, 160, 10**6])
def test_token_outside_of_the_vocabulary_is_named(wrong: int) -> None:
    model = plain_model(exactness_config("tied"))
    given = {"input_ids": torch.tensor([[3, wrong]])}
    message = rf"^input_ids has the token {wrong}, and the model has embeddings for 0 to 159\."
    with pytest.raises(UnknownTokenError, match=message), naming_tokens(given, model):
        model(**given)


def test_other_index_error_of_a_forward_stays_as_it_is() -> None:
    model = plain_model(exactness_config("tied"))
    with pytest.raises(IndexError, match="mine"), naming_tokens({"input_ids": torch.tensor([[3]])}, model):
        raise IndexError("mine")
