"""Measures what streaming costs: a plain torch step and a step of megatier with all state in RAM, both on the CPU.

Both train the same Llama from the same weights on the same tokens in one process, in alternated rounds:

  plain     model in memory, kept activations, clip_grad_norm_, torch.optim.AdamW(fused=True)
  megatier  state in RAM, slots for all weights in the arena that stands for the GPU, kept activations, exact clipping

A megatier step carries the update of the step before it, so each of several steps in sequence has exactly one.

python bench/bench_overhead.py                 the comparison; writes bench/results/<machine>/step_overhead.json
python bench/bench_overhead.py --profile       cost of streaming per use of a unit, on tiny tensors
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import facts, folder_of, write_row
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from megatier.config.schema import OF_LOOP, ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.engine.gradient import Gradients
from megatier.engine.node import Node
from megatier.hardware import cores_usable
from megatier.layout import Layout
from megatier.models.decoder import Unit, build_skeleton
from megatier.optim.gradient_sums import GradientSums
from megatier.play.gradients import UnitGradients
from megatier.play.unit_weights import UnitWeights, Use
from megatier.session.session import Session
from megatier.setup.setup import Setup
from megatier.trace.events import stall_seconds

RATE = 1e-4
"""Learning rate of every step."""
CLIP = 1.0
"""Norm to which both clip."""
PREDICTION = (
    "Ratio 1.05 to 1.10. Of 97.6M parameters (390 MB in fp32) megatier moves, beyond what plain torch moves: weights "
    "into slots (390 MB read, 390 MB written), gradients from autograd into a slot, from there to RAM (780 + 780 MB), "
    "and the poison on released slots (780 MB): 3.1 GB, or 0.2 to 0.4 s of one core at 8 to 15 GB/s, against 300 GFLOP "
    "of compute, 3 to 5 s on two cores. Clipping inside AdamW saves the 780 MB that clip_grad_norm_ moves to scale."
)
PROFILE_PREDICTION = "Under 100 microseconds per use of a unit, where a million turns of an empty loop take 50 ms."
Step = Callable[[], float]
"""Runs one step and returns its loss."""


class PlainWeights:
    """A source of weights that reads those of a model in memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Note the parameters by their names."""
        self._parameters = dict(model.named_parameters())

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield every tensor of a unit or of a shard of it, with the element at which it begins."""
        for tensor in (shard or unit.layout).tensors:
            start, stop = tensor.elements
            yield tensor.start, self._parameters[tensor.name].detach().flatten()[start:stop]


def llama(options: argparse.Namespace) -> PretrainedConfig:
    """Return the config of the model."""
    return AutoConfig.for_model(
        "llama",
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=options.tokens,
        tie_word_embeddings=False,
        use_cache=False,
    )


def batch_of(options: argparse.Namespace) -> dict[str, Tensor]:
    """Return a batch of random tokens, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, options.vocab, (options.sequences, options.tokens), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def plain_step(model: PreTrainedModel, batch: dict[str, Tensor]) -> Step:
    """Make a step of the plain model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def step() -> float:
        loss: Tensor = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def open_session(model: PreTrainedModel, options: argparse.Namespace) -> Session:
    """Open the same model with all state in RAM, and a weight slot for each unit."""
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    skeleton = build_skeleton(model.config, "sdpa")
    tiers = TiersConfig(device="cpu", state=("ram",), gpu=4 * num_bytes + (64 << 20), ram=6 * num_bytes + (64 << 20))
    model_config = ModelConfig(
        config={"model_type": "llama"}, compute_dtype="fp32", fused_loss=options.fused_loss, loss_chunk=512
    )
    train = TrainConfig(batch=options.sequences, clip=CLIP, learning_rate=RATE)
    data = replace(OF_LOOP, sequence_length=options.tokens)
    config = RunConfig(model=model_config, data=data, tiers=tiers, train=train)
    session = Session(Setup.here(config, skeleton))
    session.load(PlainWeights(model))
    return session


def streamed_step(session: Session, batch: dict[str, Tensor]) -> Step:
    """Make a step of the session, with the update of the step before it."""
    done = 0

    def step() -> float:
        nonlocal done
        done += 1
        return session.engine.train_step(done, RATE, [batch]).loss

    return step


def timed(step: Step, count: int) -> tuple[list[float], float]:
    """Return the seconds of each of `count` steps, and the last loss."""
    seconds = []
    loss = 0.0
    for _ in range(count):
        began = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - began)

    return seconds, loss


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run both in turns. Who begins changes from round to round."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(llama(options), dtype=torch.float32, attn_implementation="sdpa").train()
    batch = batch_of(options)

    with open_session(plain, options) as session:
        steps = {"plain": plain_step(plain, batch), "megatier": streamed_step(session, batch)}
        for step in steps.values():
            timed(step, 2)  # the first of megatier's records the order of units
        samples: dict[str, list[list[float]]] = {name: [] for name in steps}
        losses: dict[str, float] = {}
        for index in range(options.rounds):
            for name in sorted(steps, reverse=index % 2 == 0):
                seconds, losses[name] = timed(steps[name], options.steps)
                samples[name].append(seconds)
                print(f"round {index + 1}  {name:8}  {'  '.join(f'{value:.3f}' for value in seconds)} s", flush=True)

        session.player.drain()
        stalls = stall_seconds(session.player.take_events())

    medians = {name: median(value for seconds in rounds for value in seconds) for name, rounds in samples.items()}
    count = options.rounds * options.steps + 2

    return {
        "num_parameters": sum(parameter.numel() for parameter in plain.parameters()),
        "seconds": samples,
        "median_seconds": medians,
        "ratio": medians["megatier"] / medians["plain"],
        "ratio_of_each_round": [
            median(ours) / median(theirs) for ours, theirs in zip(samples["megatier"], samples["plain"], strict=True)
        ],
        "last_losses": losses,
        "stall_seconds_per_step": {cause: value / count for cause, value in stalls.items()},
    }


# ---------------------------------------------------------------------- the cost of a use

TIMED: tuple[tuple[type[Any], str], ...] = (
    (Node, "__call__"),
    (Node, "run"),
    (Node, "leaves"),
    (UnitWeights, "enter"),
    (Use, "leave"),
    (UnitGradients, "acquire_grad_buffer"),
    (UnitGradients, "submit_grad"),
    (Gradients, "add"),
    (Gradients, "end_use"),
    (GradientSums, "measure"),
)
"""The calls of the computing thread for each use of a unit. The time of each includes the calls that it makes."""


def profile(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the microseconds of a use of a unit, forward or backward, with tiny tensors."""
    options.hidden = 16
    options.heads = 2
    options.vocab = 64
    options.sequences = 1
    options.tokens = 4
    # Tensors so small take torch no time to speak of, so the difference of the two steps is what streaming adds.
    torch.set_num_threads(1)
    plain = AutoModelForCausalLM.from_config(llama(options), dtype=torch.float32, attn_implementation="sdpa").train()
    batch = batch_of(options)

    with open_session(plain, options) as session:
        steps = {"plain": plain_step(plain, batch), "megatier": streamed_step(session, batch)}
        for step in steps.values():
            timed(step, 5)
        uses = len(session.player.accesses)
        medians = {name: median(timed(step, options.steps * 20)[0]) for name, step in steps.items()}
        session.player.take_events()
        timed(steps["megatier"], options.steps * 20)
        stalled = sum(stall_seconds(session.player.take_events()).values()) / (options.steps * 20)

        # Timed last, since noting the time of every call slows the calls down.
        with ExitStack() as stack:
            spent = {f"{kind.__name__}.{name}": _watch(stack, kind, name) for kind, name in TIMED}
            timed(steps["megatier"], options.steps * 20)

    whole = (medians["megatier"] - medians["plain"]) / uses * 1e6

    return {
        "uses_per_step": uses,
        "microseconds_of_a_million_turns": loop_seconds() * 1e6,
        "median_step_microseconds": {name: value * 1e6 for name, value in medians.items()},
        "microseconds_per_use": whole,
        "microseconds_per_use_stalled": stalled / uses * 1e6,
        "microseconds_per_call": {
            name: {"median": median(times) / 1e3, "calls_per_step": len(times) / (options.steps * 20)}
            for name, times in spent.items()
            if times
        },
    }


def loop_seconds() -> float:
    """Return the seconds of a million turns of a loop that adds: how fast Python is here and now."""
    began = time.perf_counter()
    total = 0
    for number in range(1_000_000):
        total += number
    return time.perf_counter() - began


def _watch(stack: ExitStack, kind: type[Any], name: str) -> list[int]:
    """Note the nanoseconds of every call of a method until the stack closes."""
    times: list[int] = []
    original = getattr(kind, name)

    def timed_call(*args: object, **kwargs: object) -> object:
        began = time.perf_counter_ns()
        try:
            return original(*args, **kwargs)
        finally:
            times.append(time.perf_counter_ns() - began)

    setattr(kind, name, timed_call)
    stack.callback(setattr, kind, name, original)
    return times


# ---------------------------------------------------------------------- the command


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("rounds", 5, "alternated rounds"),
        ("steps", 3, "timed steps of each in a round"),
        ("hidden", 768, "hidden size; the feed-forward is 8/3 of it"),
        ("layers", 12, "decoder layers"),
        ("heads", 12, "attention heads"),
        ("vocab", 8192, "vocabulary"),
        ("sequences", 2, "sequences a step"),
        ("tokens", 256, "tokens a sequence"),
        ("threads", cores_usable(), "threads of torch; AdamW of megatier takes the cores this process may use"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")

    parser.add_argument(
        "--fused-loss", action=argparse.BooleanOptionalAction, default=True, help="megatier's loss node"
    )
    parser.add_argument("--profile", action="store_true", help="cost per use of a unit instead")
    parser.add_argument("--output", type=Path, help="JSON file (default: bench/results/<machine>/, by kind)")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print, write."""
    options = parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = facts() | {"options": {k: v for k, v in vars(options).items() if k != "output"}}

    if options.profile:
        result |= {"prediction": PROFILE_PREDICTION} | profile(options)
        print(json.dumps({name: result[name] for name in result if "microseconds" in name}, indent=2))
    else:
        result |= {"prediction": PREDICTION} | compare(options)
        medians = result["median_seconds"]
        print(f"plain {medians['plain']:.3f} s, megatier {medians['megatier']:.3f} s, ratio {result['ratio']:.3f}")

    kind = "step_profile" if options.profile else "step_overhead"
    path = options.output or folder_of(result["machine"]) / f"{kind}.json"
    write_row(result, path)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
