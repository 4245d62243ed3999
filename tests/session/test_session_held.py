"""Weights that are held on the GPU while text is generated: the bits of none held, and nothing held afterwards."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import crossed, some
from streamed_loops import VOCAB, away_bytes, on_device, same, streamed_on, train_config
from tiny_runs import random_groups
from torch import Tensor

from megatier.config.lora import LoraConfig
from megatier.integrations.streamed import Streamed
from megatier.session.held import GPU_SHARES, HeldWeights
from megatier.session.session import Session
from megatier.tier import Tier

TOKENS = 7
NONE, SOME, ALL = 0.0, 0.6, 1.0
Told = Callable[[int], None]
"""What is told, after each token, how many there are."""


class AtToken:
    """A criterion of Hugging Face's that stops nothing, and calls something after each token."""

    def __init__(self, call: Told) -> None:
        self._call = call
        self._tokens = 0

    def __call__(self, ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        self._tokens += 1
        self._call(self._tokens)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def generate(streamed: Streamed, call: Told = lambda _: None, seed: int = 0, **options: Any) -> list[list[int]]:
    """Sampled tokens. The model trains still, so dropout draws from the same generator."""
    torch.manual_seed(seed)
    prompt = torch.arange(3, 9, device=streamed.device).view(2, 3)
    length = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 0}
    made: Any = streamed.model
    with torch.no_grad():
        found: Tensor = made.generate(prompt, do_sample=True, stopping_criteria=[AtToken(call)], **length, **options)
    return found.tolist()


def step(streamed: Streamed, model: str, number: int, forwards: int = 1) -> float:
    """An optimizer step over a loss of several forwards."""
    torch.manual_seed(number)
    with torch.enable_grad():
        batches = [
            random_groups(train_config(model, groups=1), VOCAB[model], 9 * number + n)[0] for n in range(forwards)
        ]
        losses = [streamed.model(**on_device(streamed, batch)).loss for batch in batches]
        loss = torch.stack(losses).square().sum()
        loss.backward()
    streamed.optimizer.step()
    return loss.item()


def undemanded(session: Session) -> Counter[str]:
    """Bytes that have moved though nobody demanded them: those with which state was filled."""
    return session.store.moved_bytes - session.player.demanded


def per_token(session: Session) -> tuple[list[int], Told]:
    """Bytes of weights that came to the GPU for each token after the first one, and what notes them."""
    moved: list[int] = []
    last = 0

    def note(tokens: int) -> None:
        nonlocal last
        now = session.player.demanded["ram_to_gpu"]
        moved.extend([now - last] if tokens > 1 else [])
        last = now

    return moved, note


def check_nothing_is_held(session: Session, held: HeldWeights) -> None:
    stage = session.engine.model.stage
    assert held.num_bytes == 0
    assert stage.source is session.player.weights

    # No view of memory outside of the arena is left, which would keep it.
    arena = session.store._reservation.view(Tier.GPU, 0, 1).data_ptr()
    usage = session.store.usage(Tier.GPU)
    addresses = [address for node in session.engine.model.nodes for address in node._leaves]
    assert all(arena <= address < arena + sum(usage.values()) - usage["budget"] for address in addresses)


def memory_of_the_arena(held: HeldWeights) -> tuple[int, int]:
    """The memory of a GPU as that of a CPU is counted: a limit, of which the arena and what is held are taken.

    A GPU hands out more at once than a tiny model has, and other processes take of it.
    """
    total = held._limit_bytes or held._arena_bytes
    return total // GPU_SHARES, total - held._arena_bytes - held.num_bytes


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of `streamed_on` for a CPU and for a GPU, whose memory is counted as a CPU's."""
    monkeypatch.setattr(HeldWeights, "_memory", memory_of_the_arena)
    return {"device": request.param, "compile": False, "fused_loss": False}


PLACES = [
    ("ram", "tied"),
    ("nvme", "untied"),
    ("gpu_ram_nvme", "moe"),
    ("ram_streamed", "tied"),
    ("nvme_twice", "tied"),
]


@pytest.mark.parametrize(("place", "model"), some(PLACES, by=3, first=2))
def test_tokens_and_all_training_bits_are_those_of_a_run_that_holds_nothing(
    place: str, model: str, where: dict[str, Any], tmp_path: Path
) -> None:
    train = train_config(model, groups=1)
    # The loss of routers, which no text needs, counts the tokens of the cache in some versions of transformers.
    options: dict[str, Any] = {"output_router_logits": False} if model == "moe" else {}
    found = []
    for held in (NONE, SOME, ALL):
        with streamed_on(place, tmp_path, train, model=model, held=held, **where) as (session, streamed):
            session.player.drain()
            filled = undemanded(session)
            texts = [generate(streamed, **options)]
            losses = [step(streamed, model, 1, forwards=2)]

            # Weights of before the step would give other tokens.
            moved, note = per_token(session)
            texts.append(generate(streamed, note, **options))
            check_nothing_is_held(session, streamed._held)
            losses += [step(streamed, model, number, forwards=1 + number % 2) for number in (2, 3)]
            texts.append(generate(streamed, **options))
            session.player.drain()
            assert undemanded(session) == filled
            found.append((texts, losses, streamed.state_dict()))

            # One forward for each token. The first of them has taken what is held.
            away = away_bytes(session)
            assert len(set(moved[1:])) == 1
            assert moved[0] >= away
            assert {NONE: moved[1] >= away, SOME: 0 < moved[1] < away, ALL: moved[1] == 0}[held]

    (texts, losses, weights), *others = found
    assert len({str(text) for text in texts}) == len(texts), "the steps change the tokens"
    for other in others:
        assert other[:2] == (texts, losses)
        assert same(other[2], weights)


@pytest.mark.gpu
def test_weights_that_the_free_memory_of_a_gpu_holds_give_the_bits_of_a_run_that_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = train_config("tied", groups=1)
    options: dict[str, Any] = {"device": "cuda", "compile": False, "fused_loss": False}
    found = []
    for takes_memory in (True, False):
        with streamed_on("ram", tmp_path, train, **options) as (session, streamed):
            if not takes_memory:
                monkeypatch.setattr(HeldWeights, "_memory", memory_of_the_arena)
            moved, note = per_token(session)
            texts = [generate(streamed, note)]
            check_nothing_is_held(session, streamed._held)
            assert (moved[1] == 0) == takes_memory
            losses = [step(streamed, "tied", number) for number in (1, 2)]
            texts.append(generate(streamed))
            found.append((texts, losses, streamed.state_dict()))
    assert found[0][:2] == found[1][:2]
    assert same(found[0][2], found[1][2])


@pytest.mark.parametrize(("held", "what"), crossed([SOME, ALL], ["steps", "restores"], by=2))
def test_weights_that_change_while_a_text_is_generated_are_those_of_its_next_tokens(
    what: str, held: float, where: dict[str, Any], tmp_path: Path
) -> None:
    def run(held: float) -> list[list[int]]:
        with streamed_on("ram", tmp_path, train_config("tied", groups=1), held=held, **where) as (_, streamed):
            streamed.save(tmp_path / f"saved-{held}")
            for number in (1, 2, 3):
                step(streamed, "tied", number)

            def change(tokens: int) -> None:
                if tokens == 4 and what == "steps":
                    step(streamed, "tied", 4)
                elif tokens == 4:
                    streamed.restore(tmp_path / f"saved-{held}")
                torch.manual_seed(tokens)

            return [*generate(streamed, change), *generate(streamed)]

    assert run(held) == run(NONE)


def test_an_error_in_a_text_leaves_nothing_held_and_training_goes_on_with_the_same_bits(
    where: dict[str, Any], tmp_path: Path
) -> None:
    def stop(tokens: int) -> None:
        if tokens == 4:
            raise KeyboardInterrupt

    found = []
    for held in (NONE, SOME, ALL):
        train = train_config("tied", groups=1)
        with streamed_on("gpu_ram", tmp_path, train, held=held, **where) as (session, streamed):
            with pytest.raises(KeyboardInterrupt):
                generate(streamed, stop)
            check_nothing_is_held(session, streamed._held)
            loss = step(streamed, "tied", 1, forwards=2)
            found.append(([loss, *generate(streamed)], streamed.state_dict()))
    assert all(texts == found[0][0] and same(weights, found[0][1]) for texts, weights in found)


def test_texts_with_adapters_and_without_them_are_those_of_a_run_that_holds_nothing(
    where: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    found = []
    for held in (NONE, SOME, ALL):
        train = replace(train_config("tied", groups=1), learning_rate=0.1)
        lora = LoraConfig(rank=4, alpha=64, targets=("q_proj", "down_proj"))
        with streamed_on("ram", tmp_path, train, held=held, lora=lora, **where) as (session, streamed):
            losses = [step(streamed, "tied", number) for number in (1, 2)]
            moved, note = per_token(session)
            texts = [generate(streamed, note)]
            with streamed.disable_adapter():
                texts.append(generate(streamed))
            losses.append(step(streamed, "tied", 3))
            found.append((losses, texts))
            assert moved[-1] == 0 or held != ALL
            assert texts[0] != texts[1]
    assert found[1:] == found[:1] * 2


def test_weights_are_let_go_when_memory_gets_short_and_the_text_stays_the_same(
    where: dict[str, Any], tmp_path: Path
) -> None:
    train = train_config("tied", groups=1)
    with streamed_on("ram", tmp_path, train, **where) as (_, streamed):
        expected = generate(streamed)
    with streamed_on("ram", tmp_path, train, held=ALL, **where) as (session, streamed):
        held = streamed._held
        seen = []

        def shorten(tokens: int) -> None:
            seen.append(held.num_bytes)
            if tokens == 4:
                assert held._limit_bytes is not None
                held._limit_bytes -= held._limit_bytes // (GPU_SHARES - 3)

        assert generate(streamed, shorten) == expected
        away = away_bytes(session)
        assert seen[:4] == [0, away, away, away]
        assert 0 < seen[4] < away
        assert seen[4:] == seen[4:5] * (TOKENS - 4), "no more than memory asks for"


@pytest.mark.parametrize("held", [SOME, ALL])
def test_a_text_for_which_memory_runs_out_is_generated_again_with_nothing_held(
    held: float, where: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = train_config("tied", groups=1)
    with streamed_on("ram", tmp_path, train, **where) as (_, streamed):
        expected = [generate(streamed), generate(streamed, seed=1), step(streamed, "tied", 1)]
    with streamed_on("ram", tmp_path, train, held=held, **where) as (session, streamed):
        sizes = []

        def run_out(_: int) -> None:
            sizes.append(streamed._held.num_bytes)
            if sizes[-1] and len(sizes) == 5:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        assert generate(streamed, run_out) == expected[0]
        assert [size > 0 for size in sizes] == [False] + [True] * 4 + [False] * TOKENS
        assert any("GPU memory ran out" in message for message in caplog.messages)
        assert [generate(streamed, run_out, seed=1), step(streamed, "tied", 1)] == expected[1:]
        assert not any(sizes[5:]), "it does not hold weights again"
        check_nothing_is_held(session, streamed._held)


def test_memory_that_runs_out_where_a_text_cannot_be_generated_again_is_an_error(tmp_path: Path) -> None:
    class Streamer:
        def put(self, _: Tensor) -> None:
            return

        def end(self) -> None:
            return

    def run_out(tokens: int) -> None:
        if tokens == 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    train = train_config("tied", groups=1)
    cases: list[tuple[float, dict[str, Any]]] = [(NONE, {}), (ALL, {"streamer": Streamer()})]
    for held, options in cases:
        with (
            streamed_on("ram", tmp_path, train, held=held, fused_loss=False) as (_, streamed),
            pytest.raises(torch.OutOfMemoryError),
        ):
            generate(streamed, run_out, **options)


def test_a_text_in_the_middle_of_a_step_holds_nothing(tmp_path: Path) -> None:
    train = train_config("tied", groups=2)
    found = []

    def run(held: float) -> None:
        def check(_: int) -> None:
            assert streamed._held.num_bytes == 0

        with streamed_on("ram", tmp_path, train, held=held, fused_loss=False) as (_, streamed):
            first, second = random_groups(train, VOCAB["tied"], 1)
            torch.manual_seed(1)
            streamed.model(**first).loss.backward()
            text = generate(streamed, check)
            streamed.model(**second).loss.backward()
            streamed.optimizer.step()
            found.append((text, generate(streamed)))

    run(NONE)
    run(ALL)
    assert found[0] == found[1]


def test_forwards_outside_of_generation_hold_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="megatier")
    train = train_config("tied", groups=1)
    with streamed_on("ram", tmp_path, train, held=ALL, fused_loss=False) as (session, streamed):
        (batch,) = random_groups(train, VOCAB["tied"], 1)
        before = session.player.demanded
        with torch.no_grad():
            for _ in range(3):
                streamed.model(**batch)
                check_nothing_is_held(session, streamed._held)
        moved = session.player.demanded - before
        assert moved["ram_to_gpu"] >= 3 * away_bytes(session)
    assert caplog.messages == []
