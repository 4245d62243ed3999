"""Methods of a streamed model that place, cast or checkpoint it: what they ask for is named, and so is the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from trainer_runs import open_streamed

from megatier.errors import StreamedModelError
from megatier.integrations.streamed import Streamed


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streamed]:
    with open_streamed(tmp_path_factory.mktemp("streamed")) as found:
        yield found


@pytest.mark.parametrize(("kind", "place"), [("half", "float16"), ("double", "float64"), ("cuda", "cuda:1")])
def test_cast_or_move_of_a_streamed_model_names_itself_and_the_remedy(
    kind: str, place: str, streamed: Streamed
) -> None:
    message = rf"was to move to (torch\.)?{place}, .* Leave out \.{kind}\(\), .* compute_dtype of megatier\.stream"
    with pytest.raises(StreamedModelError, match=message):
        getattr(streamed.model, kind)(*[1] * (kind == "cuda"))


def test_cast_and_move_to_where_a_streamed_model_is_leave_it_there(streamed: Streamed) -> None:
    model: Any = streamed.model
    computes = model.dtype
    here = {torch.bfloat16: "bfloat16", torch.float32: "float"}[computes]
    assert getattr(model, here)() is model.cpu() is model.to(computes)


@pytest.mark.parametrize("name", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
def test_gradient_checkpointing_of_a_streamed_model_names_activations(name: str, streamed: Streamed) -> None:
    with pytest.warns(UserWarning, match="activations of megatier.stream decides") as caught:
        getattr(streamed.model, name)()
    assert caught[0].filename == __file__
