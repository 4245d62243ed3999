"""TRL's `use_vllm` over a streamed model: the engine has its weights, and what cannot be fed is refused before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_pool import POOL
from small_optimizers import close_optimizer
from stand_in_engine import stand_in
from streamed_loops import TIERS
from test_integrations_grpo import PLAIN, STREAMED, figures, plain, saved, trainer
from transformers import set_seed

import megatier
from megatier.errors import ConfigError

pytest.importorskip("trl")

from accelerate import state

pytestmark = pytest.mark.filterwarnings("default")  # of TRL and datasets
OPTIONS: dict[str, Any] = {"tiers": TIERS, "compute_dtype": "fp32", "compile": False, "fused_loss": False}


def with_adapters(path: str) -> Any:
    peft = pytest.importorskip("peft")
    set_seed(1)
    return peft.get_peft_model(plain(path), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))


def made_with(*given: Any, **options: Any) -> Any:
    """A trainer. For an engine in its own process TRL names ranks in the environment, which are no one else's."""
    with patch.dict(os.environ):
        return trainer(*given, **options)


@pytest.mark.parametrize(
    ("mode", "has_adapters"),
    [
        ("colocate", False),
        pytest.param("server", False, marks=pytest.mark.slow),
        pytest.param("colocate", True, marks=pytest.mark.slow),
    ],
)
def test_grpo_with_an_engine_has_the_losses_of_the_plain_trainer_and_feeds_it_its_weights(
    mode: str, has_adapters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)
    engines = stand_in(monkeypatch, path)
    options = {"use_vllm": True, "vllm_mode": mode, "steps": 4}

    def model() -> Any:
        return with_adapters(path) if has_adapters else plain(path)

    reference = made_with(PLAIN, model(), tmp_path, **options)
    adamw = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "ram": "64MiB"}
    reference.optimizer_cls_and_kwargs = (megatier.TieredAdamW, adamw)
    expected = figures(reference)
    close_optimizer(reference)
    with megatier.stream(model() if has_adapters else path, accumulation_steps=2, **OPTIONS) as streamed:
        made = made_with(STREAMED, streamed, tmp_path, **options)
        found = figures(made)
        first, second = engines
        made.vllm_generation.sync_weights()
        weights = dict(streamed.weights())
    losses, norms, rewards = found
    assert rewards == expected[2]
    # TRL takes adapters out of their base again by subtraction, which rounds it.
    assert losses == (pytest.approx(expected[0], abs=1e-6) if has_adapters else expected[0])
    assert norms == pytest.approx(expected[1], rel=1e-5), "torch adds up squares in fp32"
    assert len(set(losses)) > 1
    assert weights.keys() == second.parameters.keys()
    assert all(torch.equal(weights[name], parameter) for name, parameter in second.parameters.items())
    assert second.num_taken == first.num_taken + len(weights)


def test_engine_that_sleeps_generates_in_memory_that_training_lends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)
    engines = stand_in(monkeypatch, path)
    options = {"use_vllm": True, "vllm_enable_sleep_mode": True, "steps": 3}

    def run(lends: bool) -> list[list[float]]:
        with megatier.stream(path, accumulation_steps=2, **OPTIONS) as streamed:
            made: Any = made_with(STREAMED, streamed, tmp_path, **options)
            streamed.lends_memory = lends
            loan, engine = streamed._session.store.loan, engines[-1]
            generate, load = engine.generate, engine.load_weights
            lent, fed = [], []

            def loading(*args: Any) -> None:
                fed.append(loan.is_lent)
                load(*args)

            def generating(*args: Any, **kwargs: Any) -> Any:
                lent.append(loan.is_lent)
                assert engine.awake == {"weights", "kv_cache"}
                if len(lent) == 4:
                    raise ValueError("the engine died")
                return generate(*args, **kwargs)

            monkeypatch.setattr(engine, "generate", generating)
            monkeypatch.setattr(engine, "load_weights", loading)
            found = figures(made)
            with pytest.raises(ValueError, match="the engine died"):
                made._generate_single_turn([[1, 2]], None, {}, 1)
            assert set(fed) == set(lent) == {lends}
            assert len(lent) == 4
            assert not loan.is_lent
            assert bool(engine.awake) != lends, "an engine that failed gives its memory back too"
            streamed.save(tmp_path / f"saved-{lends}")
            return found

    assert run(lends=False) == run(lends=True)


def test_engine_that_would_be_fed_within_a_step_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)
    engines = stand_in(monkeypatch, path)
    with megatier.stream(path, accumulation_steps=2, **OPTIONS) as streamed:
        with pytest.raises(ConfigError, match=r"completions are made every 3 backwards .* no multiple of gradient"):
            trainer(STREAMED, streamed, tmp_path, use_vllm=True, steps_per_generation=3)
        streamed.model.config.name_or_path = streamed.model.name_or_path = ""
        with pytest.raises(ConfigError, match="vllm_mode colocate: vLLM opens the folder"):
            trainer(STREAMED, streamed, tmp_path, use_vllm=True)
    assert engines == []


def feed_on_ranks(path: str, folder: Path) -> Any:
    """Figures of some steps on this rank, and whether the engines of this process have the model's weights then."""
    state.AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.MonkeyPatch.context() as patching:
        engines = stand_in(patching, path)
        with megatier.stream(path, accumulation_steps=2, **OPTIONS) as streamed:
            made = made_with(STREAMED, streamed, folder, steps=3, use_vllm=True, vllm_mode="server")
            found = figures(made)
            made.vllm_generation.sync_weights()
            weights = dict(streamed.weights())
        same = [all(torch.equal(weights[name], of) for name, of in engine.parameters.items()) for engine in engines]
        return found, same


@pytest.mark.slow
def test_grpo_on_ranks_feeds_the_server_by_the_first_one(tmp_path: Path) -> None:
    (found, same), (others, none) = POOL.run(feed_on_ranks, 2, saved(tmp_path), tmp_path)
    assert others == found
    assert (same, none) == ([True], [])
