"""Weights that are not bound: whoever reads them past the model's forward is told where they are, and gets no numbers.

Each of these reads gave zeros, garbage or an unchanged tensor, in silence, or an error that named nothing.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from trainer_runs import Rows, arguments, open_streamed
from transformers import TrainerCallback

from megatier.errors import AbsentWeightError, StreamedModelError
from megatier.guards.unbound_weights import make_unbound, mark_streamed
from megatier.integrations.streamed import Streamed

pytest.importorskip("accelerate")

from megatier.integrations.transformers_trainer import MegatierTrainer


def unbound(*, is_streamed: bool = False) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(2, 2, device="meta"))
    make_unbound(parameter, torch.device("cpu"), torch.bfloat16, "layer.weight")
    if is_streamed:
        mark_streamed([parameter], lambda: False)
    return parameter


def assign(weight: Tensor) -> None:
    torch.ones(2, 2)[:] = weight


READS: dict[str, Callable[[Tensor], object]] = {
    "mixed in": lambda w: torch.ones(2, 2).mul_(0.9).add_(w.data, alpha=0.1),
    "averaged": lambda w: torch.ones(2, 2).lerp_(w, 0.1),
    "a list mixed in": lambda w: torch._foreach_add_([torch.ones(2, 2)], [w]),
    "out": lambda w: torch.add(w, 1, out=torch.ones(2, 2)),
    "chosen": lambda w: torch.where(torch.ones(2, 2) > 0, 1.0, w),
    "copied into": lambda w: torch.ones(2, 2).copy_(w),
    "assigned": assign,
    "cloned": lambda w: w.detach().clone(),
    "moved": lambda w: w.to("cpu"),
    "cast": lambda w: w.data.float(),
    "item": lambda w: w[0],
    "rows": lambda w: [*w],
    "view": lambda w: w.view(-1),
    "transposed": lambda w: w.T,
    "norm": lambda w: w.norm(),
    "largest": lambda w: w.max().item(),
    "compared": lambda w: torch.equal(w, torch.ones(2, 2)),
    "searched": lambda w: torch.isnan(w).any(),
    "product": lambda w: torch.ones(2, 2) @ w,
    "stacked": lambda w: torch.stack([w]),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
    "array": lambda w: w.detach().numpy(),
    "address": lambda w: w.data_ptr(),
    "deep copy": copy.deepcopy,
    "deep copy of data": lambda w: copy.deepcopy(w.data),
    "pickled": pickle.dumps,
    "saved": lambda w: torch.save([w], io.BytesIO()),
}


@pytest.mark.parametrize("kind", READS)
def test_unbound_weight_is_read_in_no_way(kind: str) -> None:
    with torch.no_grad(), pytest.raises(AbsentWeightError, match=r"Streamed\.read\('layer\.weight'\) gives its fp32"):
        READS[kind](unbound())


def test_unbound_weight_lends_its_form() -> None:
    weight = unbound()
    assert torch.zeros_like(weight.data).tolist() == [[0, 0], [0, 0]]
    assert weight.new_ones(3).dtype is torch.bfloat16
    assert (weight.size(), weight.stride(), weight.is_contiguous()) == ((2, 2), (2, 1), True)
    assert "size=(2, 2)" in repr(weight)


@pytest.mark.parametrize(
    "kind", [lambda w: w.register_hook(print), lambda w: w.register_post_accumulate_grad_hook(print), lambda w: w.grad]
)
def test_unbound_weight_in_a_loop_has_no_gradient_to_wait_for(kind: Callable[[Tensor], object]) -> None:
    with pytest.raises(StreamedModelError, match=r"never in \.grad"):
        kind(unbound(is_streamed=True))


def test_unbound_weight_in_a_loop_is_frozen_when_it_is_opened_alone() -> None:
    weight = unbound(is_streamed=True)
    weight.requires_grad_()
    weight.requires_grad = True
    for freeze in (lambda: weight.requires_grad_(False), lambda: setattr(weight, "requires_grad", False)):
        with pytest.raises(StreamedModelError, match=r"layer\.weight is trained was decided .* frozen of megatier"):
            freeze()
    assert weight.requires_grad


# ---------------------------------------------------------------------- readers of a whole model


MODELS: dict[str, Callable[[nn.Module], object]] = {
    "deep copy": copy.deepcopy,
    "average": AveragedModel,
    "saved": lambda model: torch.save(model, io.BytesIO()),
    "ensemble": lambda model: torch.func.stack_module_state([model]),
    "norms": lambda model: nn.utils.get_total_norm(model.parameters()),
}


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streamed]:
    with open_streamed(tmp_path_factory.mktemp("streamed")) as found:
        yield found


@pytest.mark.parametrize("kind", MODELS)
def test_reader_of_a_streamed_model_is_told_where_the_weights_are(kind: str, streamed: Streamed) -> None:
    with torch.no_grad(), pytest.raises(AbsentWeightError, match=r"the weight \S+ lies on megatier's tiers"):
        MODELS[kind](streamed.model)


@pytest.mark.parametrize("kind", ["half", "cpu", "cuda", "float"])
def test_cast_of_a_part_of_a_streamed_model_names_itself_and_both_remedies(kind: str, streamed: Streamed) -> None:
    message = rf"^\.{kind}\(\) asks for the weight .*Streamed\.read.*compute_dtype of megatier\.stream"
    with torch.no_grad(), pytest.raises(AbsentWeightError, match=message):
        getattr(streamed.model.get_decoder(), kind)()


def test_optimizer_of_torch_over_a_streamed_model_names_the_streamed_one(streamed: Streamed) -> None:
    optimizers = (torch.optim.AdamW(streamed.model.parameters()), torch.optim.SGD(streamed.model.parameters(), lr=0.1))
    for optimizer in optimizers:
        optimizer.zero_grad()
        with pytest.raises(StreamedModelError, match=r"^an optimizer over .* update nothing: .*streamed\.optimizer"):
            optimizer.step()


def test_load_state_dict_of_a_streamed_model_names_restore(streamed: Streamed) -> None:
    with pytest.raises(StreamedModelError, match=r"Streamed\.restore"):
        streamed.model.load_state_dict(streamed.state_dict())


class Average(TrainerCallback):
    """A running mean of the weights, as many write it: on copies, or on zeros."""

    def __init__(self, begin: Callable[[Tensor], Tensor]) -> None:
        self.begin = begin

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        self.means = [self.begin(p) for p in kwargs["model"].parameters()]

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        for mean, parameter in zip(self.means, kwargs["model"].parameters(), strict=True):
            mean.data.mul_(0.9).add_(parameter.data, alpha=0.1)


@pytest.mark.parametrize("begin", [lambda p: p.detach().clone(), torch.zeros_like])
def test_callback_that_averages_weights_is_refused(begin: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed:
        callbacks = [Average(begin)]
        trainer = MegatierTrainer(streamed, arguments(tmp_path), train_dataset=Rows(60), callbacks=callbacks)
        with pytest.raises(AbsentWeightError, match=r"Streamed\.read"):
            trainer.train()


def test_callback_that_averages_what_read_gives_has_the_weights_of_each_step(tmp_path: Path) -> None:
    name = "model.norm.weight"
    found = []

    class Means(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            found.append(model.read(name))

    with open_streamed(tmp_path) as model:
        MegatierTrainer(model, arguments(tmp_path, max_steps=3), train_dataset=Rows(60), callbacks=[Means()]).train()
        assert torch.equal(found[-1], model.read(name))
    assert not torch.equal(found[0], found[1])


def test_gradient_of_a_streamed_weight_is_not_set_and_not_cleared_alone() -> None:
    parameter = unbound(is_streamed=True)
    parameter.grad = None
    del parameter.grad
    with pytest.raises(StreamedModelError, match=r"the gradient of layer\.weight is set to a tensor"):
        parameter.grad = torch.zeros(2, 2)

    mark_streamed([parameter], lambda: True)
    with pytest.raises(StreamedModelError, match=r"grad = None of a module with layer\.weight would clear gradients"):
        parameter.grad = None
