"""Weights as a model's folder has them, given out unit by unit: names and bytes, again and again, between steps."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from streamed_loops import TIERS, streamed_on, train_config
from tiny_models import tiny_config
from tiny_runs import PLACES, exactness_config, opened, plain_model, random_groups
from torch import Tensor

import megatier
from megatier.errors import IntegrityError, StreamedModelError
from megatier.integrations.streamed import Streamed
from megatier.models.visits import layer_groups
from megatier.optim.masters import split_by_torch

TRAIN = train_config("tied", groups=1)


def step(streamed: Streamed, number: int = 1) -> None:
    """One step, whose updates are due when it ends."""
    torch.manual_seed(number)  # of dropout
    (batch,) = random_groups(TRAIN, 160, number)
    batch = {name: tensor.to(streamed.device) for name, tensor in batch.items()}
    streamed.model(**batch).loss.backward()
    streamed.optimizer.step()


def taken(streamed: Streamed) -> dict[str, Tensor]:
    """All weights, which are checked against their description, at once."""
    found = dict(streamed.weights())
    described = [(tensor.name, tensor.dtype, tensor.shape) for tensor in streamed.weights().metadata()]
    assert described == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()]
    return found


def exported(streamed: Streamed, folder: Path) -> dict[str, Tensor]:
    """The weights that the model's folder has, in fp32."""
    streamed.export(folder, dtype="fp32")
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}


def in_planes(master: Tensor, dtype: torch.dtype) -> Tensor:
    """What forwards compute with. An export rounds numbers half-way between two others to even, a plane away from 0."""
    if dtype is not torch.bfloat16:
        return master.to(dtype)
    weight = torch.empty_like(master, dtype=dtype)
    split_by_torch(master, weight, torch.empty_like(master, dtype=torch.int16))
    return weight


@pytest.mark.parametrize(
    ("family", "parts", "place"),
    [
        ("llama_tied", 1, "nvme"),
        ("qwen3", 1, "gpu_ram_nvme"),
        ("qwen3_moe", 3, "nvme_twice"),
        ("gpt_oss", 3, "nvme"),  # its experts have one tensor on the hub, of which each part has a piece
        ("glm4_moe", 1, "ram_streamed"),  # its routers stay in fp32, and are a unit of their own
        ("gpt2", 1, "ram"),
    ],
)
def test_hub_weights_after_a_step_are_those_of_the_model_folder(
    family: str, parts: int, place: str, tmp_path: Path
) -> None:
    config = tiny_config(family)
    options: dict[str, Any] = {"seed": None, "expert_parts": parts}
    with (
        opened(config, tmp_path, PLACES[place], TRAIN, **options) as session,
        Streamed(session, contextlib.ExitStack()) as streamed,
    ):
        step(streamed)
        found = taken(streamed)
        step(streamed, 2)
        again, checksums = taken(streamed), streamed.weights().checksums()
        expected = exported(streamed, tmp_path / "model")
    assert found.keys() == expected.keys() == again.keys()
    assert not all(torch.equal(found[name], again[name]) for name in found), "a step was made"
    for name, master in expected.items():
        expected_plane = in_planes(master, again[name].dtype)
        assert torch.equal(again[name], expected_plane), name
        assert checksums[name] == streamed.weights().checksum(expected_plane), name


def test_hub_weights_that_are_taken_between_steps_change_no_bit_of_training(tmp_path: Path) -> None:
    outcomes = []
    for takes in (False, True):
        with streamed_on("nvme_twice", tmp_path, TRAIN) as (_, streamed):
            losses = []
            for number in range(1, 5):
                step(streamed, number)
                assert streamed.last is not None
                losses.append((streamed.last.loss, streamed.last.grad_norm))
                if takes:
                    taken(streamed)
            outcomes.append((losses, [tensor.tolist() for tensor in streamed.state_dict().values()]))
    assert outcomes[0] == outcomes[1]


def test_hub_weights_broken_off_in_a_layer_give_everything_back(tmp_path: Path) -> None:
    with streamed_on("nvme", tmp_path, TRAIN) as (session, streamed):
        step(streamed)
        whole = taken(streamed)
        for number in (0, 5, 20):
            for place, _ in enumerate(streamed.weights()):
                if place == number:
                    break
            assert not session.player.weights._leases_in_use, "leases went back"
        assert torch.equal(taken(streamed)["model.norm.weight"], whole["model.norm.weight"])
        step(streamed, 2)

        pairs = iter(streamed.weights())
        next(pairs)
        norm = streamed.read("model.norm.weight")
        with pytest.raises(StreamedModelError, match="was used, or closed, while its weights were given out"):
            next(pairs)
        assert norm.isfinite().all()
        pairs = iter(streamed.weights())
        next(pairs)
    with pytest.raises(StreamedModelError, match="was used, or closed"):
        next(pairs)


def test_hub_weights_that_a_drive_has_damaged_are_an_error_each_time(tmp_path: Path) -> None:
    with streamed_on("nvme", tmp_path, TRAIN) as (session, streamed):
        step(streamed)
        taken(streamed)
        for path in tmp_path.rglob("blocks"):
            content = bytearray(path.read_bytes())
            content[::4096] = bytes(byte ^ 1 for byte in content[::4096])
            with path.open("r+b") as file:
                file.write(content)
        for _ in range(2):
            with pytest.raises(IntegrityError, match="is damaged in"):
                dict(streamed.weights())
            assert not session.player.weights._leases_in_use, "leases went back"


def test_hub_weights_within_a_step_or_of_a_closed_model_are_refused() -> None:
    with megatier.stream(plain_model(exactness_config("tied")), tiers=TIERS) as streamed:
        tokens = torch.randint(3, 160, (2, 8))
        loss = streamed.model(input_ids=tokens, labels=tokens).loss
        with pytest.raises(StreamedModelError, match="Giving weights out in the middle of a step: end it"):
            next(iter(streamed.weights()))
        loss.backward()
        streamed.optimizer.step()
        weights = streamed.weights()
    with pytest.raises(StreamedModelError, match="closed"):
        next(iter(weights))


def test_hub_weights_that_an_error_cuts_off_let_the_model_close(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the engine is gone"), streamed_on("nvme", tmp_path, TRAIN) as (_, streamed):
        pairs = iter(streamed.weights())
        next(pairs)
        raise ValueError("the engine is gone")
    with pytest.raises(StreamedModelError, match="was used, or closed"):
        next(pairs)


def test_hub_weights_taken_by_layer_end_their_pass_so_the_next_one_loads_ahead(tmp_path: Path) -> None:
    with streamed_on("nvme", tmp_path, TRAIN) as (_, streamed):
        for _ in streamed.weights().iter_groups():
            pass
        assert streamed._session.player._orders.knows("weights")


def test_hub_weights_taken_by_another_thread_leave_its_modes_alone(tmp_path: Path) -> None:
    with streamed_on("nvme", tmp_path, TRAIN) as (_, streamed):
        found, modes = dict[str, Tensor](), list[bool]()

        def take() -> None:
            for name, tensor in streamed.weights():
                found[name] = tensor
                modes.append(torch.is_grad_enabled())

        sender = threading.Thread(target=take)
        sender.start()
        sender.join()
        expected = taken(streamed)
        groups = [(names, [tensor.shape for tensor in tensors]) for names, tensors in streamed.weights().iter_groups()]
    assert all(modes)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert [names for names, _ in groups] == streamed.weights().groups()
    assert [shape for _, shapes in groups for shape in shapes] == [tensor.shape for tensor in expected.values()]


@pytest.mark.gpu
@pytest.mark.usefixtures("one_gpu")
def test_hub_weights_taken_on_several_streams_are_whole(tmp_path: Path) -> None:
    tiers = megatier.TiersConfig(device="cuda", gpu=2 << 20, ram=8 << 20)
    with megatier.stream(plain_model(exactness_config("untied")), tiers=tiers, lr=1e-2) as streamed:
        step(streamed)
        expected = taken(streamed)
        streams = [torch.cuda.Stream() for _ in range(3)]
        pairs = iter(streamed.weights())
        for number in range(len(expected)):
            with torch.cuda.stream(streams[number % 3]):
                name, tensor = next(pairs)
                assert torch.equal(tensor, expected[name]), name


def test_layer_groups_are_those_of_vllm() -> None:
    names = ["visual.blocks.0.a", "embed", "layers.10.b", "layers.2.experts.7.w", "layers.2.a", "visual.blocks.1.a"]
    assert layer_groups(["tower", *names, "norm"]) == [
        ["tower"],
        ["visual.blocks.0.a"],
        ["visual.blocks.1.a"],
        ["layers.2.experts.7.w", "layers.2.a"],
        ["layers.10.b"],
        ["embed", "norm"],
    ]
