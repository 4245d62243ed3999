from __future__ import annotations

import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from megatier.config.schema import TrainConfig
from megatier.engine import replay as engine_replay
from megatier.engine.activation import Rebinding, dropping
from megatier.engine.replay import Replay, settings_now
from megatier.errors import UnsupportedModelError
from megatier.tier import Activations


def slot(values: Tensor, before: int = 64) -> Tensor:
    """A uint8 view of an arena, `before` bytes into it, that holds the values."""
    arena = torch.full((before + values.numel() * values.element_size() + 64,), 0xFF, dtype=torch.uint8)
    view = arena[before : before + values.numel() * values.element_size()]
    view.copy_(values.reshape(-1).view(torch.uint8))
    return view


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rebinding_weights_moved_and_poisoned_gradients_are_those_of_the_new_place(dtype: torch.dtype) -> None:
    values, x = torch.randn(8, 4).to(dtype), torch.randn(3, 4).to(dtype).requires_grad_()
    weights = slot(values)
    leaf = weights.view(dtype).view(8, 4).detach().requires_grad_()
    rebinding = Rebinding("probe", weights)
    with rebinding.hooks():
        output = x @ leaf[2:6].t()
    assert rebinding._regions == ()  # it holds no slot in between
    weights.fill_(0xFF)
    rebinding.bind(slot(values, before=192))
    [found] = torch.autograd.grad(output.sum(), [x])
    assert torch.equal(found, torch.ones(3, 4, dtype=dtype) @ values[2:6])


def test_rebinding_tensors_outside_the_slot_are_kept_as_they_are() -> None:
    values, other = torch.randn(4, 4), torch.randn(4, 4)
    weights = slot(values)
    neighbour = torch.as_strided(weights.view(torch.float32), (4,), (1,), 0)  # before the slot, in the same arena
    neighbour.fill_(3.0)
    x = torch.randn(4, 4, requires_grad=True)
    rebinding = Rebinding("probe", weights)
    with rebinding.hooks():
        output = (x @ other) * neighbour
    rebinding.bind(slot(torch.zeros(4, 4)))
    [found] = torch.autograd.grad(output.sum(), [x])
    torch.testing.assert_close(found, (torch.ones(4, 4) * 3.0) @ other.t())


def test_rebinding_backward_past_the_node_is_refused_by_name() -> None:
    weights = slot(torch.randn(4, 4))
    x = torch.randn(4, 4, requires_grad=True)
    rebinding = Rebinding("probe", weights)
    with rebinding.hooks():
        output = x @ weights.view(torch.float32).view(4, 4)
    with pytest.raises(UnsupportedModelError, match="that probe made in its forward, but did not return, was used"):
        output.sum().backward()


def test_dropping_graph_holds_nothing_and_cannot_run_backward() -> None:
    x = torch.randn(4, requires_grad=True)
    with dropping("probe"):
        output = x.exp().sin()
    assert output.requires_grad
    with pytest.raises(UnsupportedModelError, match="that probe made in its forward, but did not return, was used"):
        output.sum().backward()


def test_replay_again_gives_the_same_random_numbers_and_leaves_the_state_alone() -> None:
    torch.manual_seed(7)
    replay = Replay(torch.device("cpu"), torch.nn.Module())
    first = torch.rand(4)
    torch.rand(100)
    state = torch.get_rng_state()
    with replay.again():
        assert torch.equal(torch.rand(4), first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("enabled", [True, False])
def test_replay_again_restores_autocast(enabled: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        replay = Replay(torch.device("cpu"), torch.nn.Module())
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not enabled), replay.again():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is (torch.bfloat16 if enabled else product.dtype)


@pytest.mark.parametrize("name", ["enabled", "deterministic"])
def test_replay_again_restores_settings_of_mkldnn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = getattr(torch.backends.mkldnn, name)
    replay = Replay(torch.device("cpu"), torch.nn.Module())
    monkeypatch.setattr(torch.backends.mkldnn, name, not before)
    with replay.again():
        assert getattr(torch.backends.mkldnn, name) is before
    assert getattr(torch.backends.mkldnn, name) is not before


@pytest.mark.gpu
def test_replay_again_restores_the_device_generator() -> None:
    device = torch.device("cuda", 0)
    replay = Replay(device, torch.nn.Module())
    first = torch.rand(4, device=device)
    with replay.again():
        assert torch.equal(torch.rand(4, device=device), first)


FIRST_ATTENTION = """
import torch
from megatier.engine.replay import Replay, settings_now

device = torch.device("cuda", 0)
replay = Replay(device, torch.nn.Module()) if {replays} else None
before = settings_now(device)
query = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, device=device)
torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
assert settings_now(device) == before
if replay is not None:
    with replay.again():
        assert settings_now(device) == before
"""


@pytest.mark.gpu
@pytest.mark.parametrize("replays", [False, True])
def test_settings_noted_before_the_first_attention_of_a_process_are_those_after_it(replays: bool) -> None:
    subprocess.run([sys.executable, "-c", FIRST_ATTENTION.format(replays=replays)], check=True)


def test_settings_on_cuda_are_noted_after_torch_has_chosen_the_order_of_attention_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Stand-ins for a GPU, and for torch, which sets the order when it first chooses a kernel there.
    before = torch._C._get_sdp_priority_order()
    later = [before[-1], *before[:-1]]
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_: torch._C._set_sdp_priority_order(later))
    monkeypatch.setattr(engine_replay, "_GPU_SETTINGS", ())
    engine_replay._settle_order.cache_clear()
    try:
        assert settings_now(torch.device("cuda", 0))[engine_replay.KERNEL_ORDER.name] == str(later)
    finally:
        engine_replay._settle_order.cache_clear()
        torch._C._set_sdp_priority_order(before)


def test_policies_of_the_config_are_those_there_are() -> None:
    assert get_args(get_type_hints(TrainConfig)["activations"]) == tuple(policy.value for policy in Activations)


@pytest.mark.parametrize("policy", Activations)
def test_policy_without_offload_offloads_nothing_and_keeps_as_much(policy: Activations) -> None:
    assert not policy.without_offload.offloads_input
    assert policy.without_offload.keeps_graph is policy.keeps_graph
