"""Slices: one binding of a unit's weights runs a batch in several parts."""

from __future__ import annotations

import pytest
import torch
from one_node import SIZE, Probe, learn, streamed, streamed_gradients

from megatier.errors import ConfigError
from megatier.tier import Phase


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_node_slices_share_one_binding_and_give_the_whole_gradients(activations: str) -> None:
    probe, node, shelf, weights = streamed(activations, slices=3)
    probe.eval()
    learn(probe, node, (torch.randn(1, SIZE), torch.ones(SIZE)), (torch.randn(2, SIZE), torch.ones(SIZE)))
    shelf.phases.clear()
    x, mask = torch.randn(6, SIZE), torch.rand(SIZE)
    found = streamed_gradients(probe, shelf, x, mask=mask)
    assert node.rows.batched == [True, False]
    assert [call["rows"] for call in probe.calls] == [2] * 3 * (1 if activations == "keep" else 2)
    assert shelf.phases == [Phase.FORWARD, Phase.BACKWARD]
    plain = Probe("cpu").eval()
    plain.load_state_dict(weights)
    whole = x.clone().requires_grad_()
    plain(whole, mask).square().sum().backward()
    torch.testing.assert_close(found["gain"], plain.get_parameter("gain").grad)
    torch.testing.assert_close(found["x"], whole.grad)


def test_node_shared_input_gets_the_sum_of_the_slices_gradients() -> None:
    probe, node, _, weights = streamed("recompute", slices=2)
    probe.eval()
    learn(probe, node, (torch.randn(1, SIZE), torch.ones(SIZE)), (torch.randn(2, SIZE), torch.ones(SIZE)))
    x, mask = torch.randn(4, SIZE), torch.rand(SIZE).requires_grad_()
    [found] = torch.autograd.grad(probe(x, mask).square().sum(), [mask])
    plain = Probe("cpu").eval()
    plain.load_state_dict(weights)
    [expected] = torch.autograd.grad(plain(x, mask).square().sum(), [mask])
    torch.testing.assert_close(found, expected)


def test_node_shared_argument_as_long_as_the_batch_is_not_cut() -> None:
    probe, node, _, weights = streamed("recompute", slices=2)
    probe.eval()
    learn(probe, node, (torch.randn(1, SIZE), torch.ones(SIZE)), (torch.randn(2, SIZE), torch.ones(SIZE)))
    plain = Probe("cpu").eval()
    plain.load_state_dict(weights)
    x, mask = torch.randn(SIZE, SIZE), torch.rand(SIZE)
    torch.testing.assert_close(probe(x, mask), plain(x, mask))


def test_node_without_batched_arguments_runs_once() -> None:
    probe, node, _, _ = streamed("keep", slices=2)
    learn(probe, node, (torch.randn(5, SIZE), None), (torch.randn(5, SIZE), None))
    assert probe(torch.randn(5, SIZE, requires_grad=True)).shape == (5, SIZE)
    assert probe.calls == [{"rows": 5}]


def test_node_argument_whose_other_sizes_follow_the_batch_is_refused() -> None:
    probe, node, _, _ = streamed(slices=2)
    with pytest.raises(ConfigError, match=r"train\.slices: the arguments of probe cannot be cut"):
        learn(probe, node, (torch.randn(SIZE, 1, SIZE), None), (torch.randn(SIZE, 2, SIZE), None))


def test_node_argument_unknown_while_learning_is_refused() -> None:
    probe, node, _, _ = streamed(slices=2)
    learn(probe, node, (torch.randn(1, SIZE), None), (torch.randn(2, SIZE), None))
    with pytest.raises(ConfigError, match=r"argument 1 of probe was not there in the first step"):
        probe(torch.randn(4, SIZE), torch.ones(4, SIZE))


def test_node_rows_not_divisible_by_slices_are_refused() -> None:
    probe, node, _, _ = streamed(slices=2)
    learn(probe, node, (torch.randn(1, SIZE), None), (torch.randn(2, SIZE), None))
    with pytest.raises(ConfigError, match=r"train\.slices is 2, but a group has 5 rows"):
        probe(torch.randn(5, SIZE))
