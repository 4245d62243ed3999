"""Weights that are all held on the GPU, also in memory that training lends: the bits of a run that streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import some
from streamed_loops import VOCAB, on_device, same, streamed_on, train_config
from test_session_held import ALL, NONE, SOME, AtToken, check_nothing_is_held, generate, memory_of_the_arena, step
from tiny_runs import random_groups

from megatier.config.lora import LoraConfig
from megatier.errors import CapacityError, StreamedModelError
from megatier.integrations.streamed import Streamed
from megatier.session.held import HeldWeights
from megatier.session.resident_weights import ResidentWeights
from megatier.session.session import Session
from megatier.tier import Tier

STREAMS, BESIDE, LENT = "streams", "beside", "lent"
"""The weights stream, are held beside the memory of training, or in it."""


def free_beside_the_arena(resident: ResidentWeights) -> int:
    """What is free of the arena and the room beside it, as a CPU counts it."""
    usage = resident._store.usage(Tier.GPU)
    arena = sum(usage.values()) - usage["budget"]
    return (resident._limit_bytes or arena) - (0 if resident._store.loan.is_lent else arena)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of `streamed_on` for a CPU and for a GPU, whose memory is counted as a CPU's."""
    monkeypatch.setattr(HeldWeights, "_memory", memory_of_the_arena)
    monkeypatch.setattr(ResidentWeights, "_free_bytes", free_beside_the_arena)
    return {"device": request.param, "compile": False, "fused_loss": False}


@contextlib.contextmanager
def phase(streamed: Streamed, way: str) -> Iterator[None]:
    """A phase of generation, in one of the three ways."""
    with contextlib.ExitStack() as opened:
        if way == LENT:
            opened.enter_context(streamed.lent_memory())
        if way != STREAMS:
            opened.enter_context(streamed.held_weights())
        yield


def room(way: str) -> float:
    return NONE if way == STREAMS else ALL


def check_all_is_back(session: Session, streamed: Streamed) -> None:
    assert not session.store.loan.is_lent
    assert not session.engine.model.stage.is_resident
    check_nothing_is_held(session, streamed._held)


PLACES = [
    ("gpu_ram_nvme", "moe"),
    ("nvme_twice", "tied"),
    ("ram_streamed", "tied"),
    ("gpu", "untied"),
    ("nvme", "untied"),
]


@pytest.mark.parametrize(("place", "model"), some(PLACES, by=3, first=2))
def test_tokens_and_all_training_bits_are_those_of_a_run_that_streams(
    place: str, model: str, where: dict[str, Any], tmp_path: Path
) -> None:
    train = train_config(model, groups=1)
    options: dict[str, Any] = {"output_router_logits": False} if model == "moe" else {}
    found = []
    for way in (STREAMS, BESIDE, LENT):
        with streamed_on(place, tmp_path, train, model=model, held=room(way), **where) as (session, streamed):
            texts, losses = [], []
            for number in (1, 2, 3):
                with phase(streamed, way):
                    before = session.player.demanded
                    texts += [generate(streamed, seed=seed, **options) for seed in (number, 9)]
                    assert (session.player.demanded == before) == (way != STREAMS or place == "gpu")
                check_all_is_back(session, streamed)
                losses.append(step(streamed, model, number, forwards=1 + number % 2))
            # A step whose updates are due still, and may have run ahead.
            with phase(streamed, way):
                texts.append(generate(streamed, **options))
            found.append((texts, losses, streamed.state_dict()))

    (texts, losses, weights), *others = found
    assert len({str(text) for text in texts}) == len(texts), "the steps change the tokens"
    for other in others:
        assert other[:2] == (texts, losses)
        assert same(other[2], weights)


@pytest.mark.parametrize("way", [BESIDE, LENT])
def test_weights_that_do_not_fit_are_refused_and_the_model_streams_on(
    way: str, where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = train_config("tied", groups=1)
    with streamed_on("ram", tmp_path, train, **where) as (_, streamed):
        expected = [step(streamed, "tied", 1), *generate(streamed), step(streamed, "tied", 2)]
    with streamed_on("ram", tmp_path, train, held=SOME, **where) as (session, streamed):
        monkeypatch.setattr(streamed._resident, "_free_bytes", lambda: 1000)
        found = [step(streamed, "tied", 1)]
        remedy = "Streamed.lends_memory" if way == BESIDE else "Use model.generate alone"
        refused = pytest.raises(CapacityError, match=f"no room for all weights on the GPU at once.*{remedy}")
        with refused, phase(streamed, way):
            raise AssertionError("there is no room")
        check_all_is_back(session, streamed)
        assert [*found, *generate(streamed), step(streamed, "tied", 2)] == expected


@pytest.mark.parametrize("way", [BESIDE, LENT])
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError("CUDA out of memory.")])
def test_an_error_while_weights_are_held_gives_all_back_and_training_goes_on_with_the_same_bits(
    error: BaseException, way: str, where: dict[str, Any], tmp_path: Path
) -> None:
    def stop(tokens: int) -> None:
        if tokens == 4:
            raise error

    found = []
    for each in (STREAMS, way):
        train = train_config("tied", groups=1)
        with streamed_on("gpu_ram", tmp_path, train, held=room(each), **where) as (session, streamed):
            losses = [step(streamed, "tied", 1)]
            with pytest.raises((KeyboardInterrupt, torch.OutOfMemoryError)), phase(streamed, each):
                generate(streamed, stop)
            check_all_is_back(session, streamed)
            losses.append(step(streamed, "tied", 2, forwards=2))
            found.append((losses, generate(streamed), streamed.state_dict()))
    assert found[0][:2] == found[1][:2]
    assert same(found[0][2], found[1][2])


def test_texts_with_adapters_and_without_them_are_those_of_a_run_that_streams(
    where: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    found = []
    for way in (STREAMS, LENT):
        train = replace(train_config("tied", groups=1), learning_rate=0.1)
        lora = LoraConfig(rank=4, alpha=64, targets=("q_proj", "down_proj"))
        with streamed_on("gpu_ram", tmp_path, train, held=room(way), lora=lora, **where) as (_, streamed):
            losses = [step(streamed, "tied", number) for number in (1, 2)]
            with phase(streamed, way):
                texts = [generate(streamed)]
                with streamed.disable_adapter():
                    texts.append(generate(streamed))
            found.append((losses, texts))
            assert texts[0] != texts[1]
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:.*runs whole, without tiles of tokens")
def test_tiles_and_parts_of_experts_run_as_where_weights_stream(where: dict[str, Any], tmp_path: Path) -> None:
    found = []
    options = {**where, "expert_parts": 3, "tile_tokens": 2}
    for way in (STREAMS, LENT):
        train = train_config("moe", groups=1)
        with streamed_on("ram", tmp_path, train, model="moe", held=room(way), **options) as (_, streamed):
            if way == LENT:
                with pytest.raises(StreamedModelError, match=r"before the first forward of a model with tile_tokens"):
                    streamed.held_weights().__enter__()
            losses = [step(streamed, "moe", 1)]
            with phase(streamed, way):
                found.append((losses, generate(streamed, output_router_logits=False)))
    assert found[0] == found[1]


def test_what_needs_the_tiers_is_refused_while_weights_are_held(where: dict[str, Any], tmp_path: Path) -> None:
    with streamed_on("gpu_ram", tmp_path, train_config("tied", groups=1), held=ALL, **where) as (_, streamed):
        (batch,) = random_groups(train_config("tied", groups=1), VOCAB["tied"], 1)
        for way in (BESIDE, LENT):
            with phase(streamed, way):
                for call in (
                    streamed.state_dict,
                    streamed.optimizer.step,
                    streamed.lent_memory().__enter__,
                    lambda: streamed.save(tmp_path / "saved"),
                    lambda: streamed.restore(tmp_path / "saved"),
                    lambda: next(iter(streamed.weights())),
                ):
                    with pytest.raises(StreamedModelError, match="Leave the block for everything else"):
                        call()
                with torch.enable_grad(), pytest.raises(StreamedModelError, match="a forward with gradients inside of"):
                    streamed.model(**on_device(streamed, batch))
        with streamed.lent_memory(), torch.no_grad(), pytest.raises(StreamedModelError, match="open held_weights"):
            streamed.model(**on_device(streamed, batch))
        step(streamed, "tied", 1)


def test_weights_cannot_be_held_within_a_step(tmp_path: Path) -> None:
    train = train_config("tied", groups=2)
    with streamed_on("ram", tmp_path, train, held=ALL, fused_loss=False) as (_, streamed):
        first, _ = random_groups(train, VOCAB["tied"], 1)
        streamed.model(**first).loss.backward()
        for context in (streamed.held_weights(), streamed.lent_memory()):
            with pytest.raises(StreamedModelError, match="in the middle of a step"):
                context.__enter__()


def test_forwards_between_tokens_run_with_weights_that_are_held(where: dict[str, Any], tmp_path: Path) -> None:
    seen = []
    with streamed_on("ram", tmp_path, train_config("tied", groups=1), held=ALL, **where) as (session, streamed):
        made: Any = streamed.model.eval()
        prompt = torch.arange(3, 9, device=streamed.device).view(2, 3)

        def look(_: int) -> None:
            seen.append(made(prompt).logits.sum().item())

        with torch.no_grad():
            look(0)
            with phase(streamed, LENT):
                made.generate(prompt, max_new_tokens=3, pad_token_id=0, stopping_criteria=[AtToken(look)])
        check_all_is_back(session, streamed)
    assert seen == seen[:1] * 4
