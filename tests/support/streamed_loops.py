"""Plain loops over a streamed model, and the engine's own steps that they are compared with."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny_runs import PLACES, exactness_config, opened, random_groups
from torch import Tensor

from megatier.config.schema import NumericsConfig, TiersConfig, TrainConfig
from megatier.engine.step import StepResult
from megatier.engine.unit_model import Batch
from megatier.integrations.streamed import Streamed
from megatier.session.held import GPU_SHARES
from megatier.session.session import Session
from megatier.tier import Kind, Tier

VOCAB = {"untied": 2112, "tied": 160, "moe": 160}
TIERS = TiersConfig(device="cpu", gpu=8 << 20, ram=8 << 20, update_threads=2, io_threads=2)
GUARDED = NumericsConfig()
PEAK = 1e-2


def train_config(model: str, *, groups: int = 2, clip: float | None = 0.5, activations: Any = "keep") -> TrainConfig:
    return TrainConfig(
        steps=6, batch=6, groups=groups, clip=clip, weight_decay=0.1, learning_rate=PEAK, activations=activations
    )


def rate_of(step: int) -> float:
    """Warm-up over two steps, then a fall."""
    return PEAK * min(1.0, step / 2) / step


def counted(groups: Sequence[Any]) -> int | None:
    """What Hugging Face's losses take as `num_items_in_batch`."""
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in groups) if len(groups) > 1 else None


def on_device(streamed: Streamed, batch: Batch) -> Batch:
    """Where the model wants it."""
    return {name: tensor.to(streamed.device) for name, tensor in batch.items()}


def loop(streamed: Streamed, train: TrainConfig, vocab: int, first: int = 1, last: int = 5) -> list[StepResult]:
    """A plain loop with a scheduler, evaluating in between."""
    results = []
    for group in streamed.optimizer.param_groups:
        group.update(lr=PEAK, initial_lr=PEAK)
    schedule = torch.optim.lr_scheduler.LambdaLR(streamed.optimizer, lambda n: rate_of(n + first) / PEAK)
    for step in range(first, last + 1):
        groups = [on_device(streamed, batch) for batch in random_groups(train, vocab, step)]
        losses = []
        for batch in groups:
            loss = streamed.model(**batch, num_items_in_batch=counted(groups)).loss
            loss.backward()
            losses.append(loss.item())
        norm = streamed.grad_norm()
        streamed.optimizer.step()
        schedule.step()  # the updates have not run yet; they keep the rate of their step
        streamed.optimizer.zero_grad()
        assert streamed.last is not None
        assert streamed.last.grad_norm == norm
        results.append(replace(streamed.last, loss=math.fsum(losses)))
        if step == 3:
            streamed.model.eval()
            with torch.no_grad():
                assert streamed.model(**on_device(streamed, random_groups(train, vocab, 99)[0])).loss.isfinite()
            streamed.model.train()
    return results


def reference(session: Session, train: TrainConfig, vocab: int) -> list[StepResult]:
    """The same steps by the engine."""
    engine = session.engine
    return [engine.train_step(n, rate_of(n), random_groups(train, vocab, n)) for n in range(1, 6)]


@contextlib.contextmanager
def streamed_on(
    place: str,
    mount: Path,
    train: TrainConfig,
    *,
    model: str = "tied",
    fused_loss: bool = True,
    held: float = 0.0,
    **options: Any,
) -> Iterator[tuple[Session, Streamed]]:
    """The session too, for what only a test asks; options are those of `opened`.

    Generation has room for the share `held` of the weights that are not at home on the GPU.
    """
    options = {"numerics": GUARDED, "fused_loss": fused_loss, "seed": None, **options}
    with opened(exactness_config(model), mount, PLACES[place], train, **options) as session:
        usage = session.store.usage(Tier.GPU)
        arena = sum(usage.values()) - usage["budget"]
        # Two shares of the whole stay free.
        limit = math.ceil((arena + held * away_bytes(session)) * GPU_SHARES / (GPU_SHARES - 2)) if held else None
        session.setup = replace(session.setup, config=session.setup.config.changed({"tiers.gpu_limit": limit}))
        with Streamed(session, contextlib.ExitStack()) as streamed:
            streamed.model.train()
            yield session, streamed


def away_bytes(session: Session) -> int:
    """Bytes of the weights that are not at home on the GPU."""
    homes, blocks = session.placement.homes, session.blocks
    away = (unit.name for unit in session.own_units if homes[unit.name, Kind.WEIGHT] is not Tier.GPU)
    return sum(blocks.whole(unit, Kind.WEIGHT)[1] for unit in away)


def same(found: dict[str, Any], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
