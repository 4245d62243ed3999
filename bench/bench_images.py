"""Measures steps of Qwen3-VL-8B's shape on texts with images, beside steps on texts alone with as many tokens.

Conversations have 0 to 4 images of 1,024 x 1,024 each, share sequences, and go the whole way of `megatier train`: the
model's own processor, pixels that are made two steps ahead, and a step with exact clipping. In the texts alone each
image is replaced by as many characters as it has tokens, so both have the same sequences. What is compared is FLOPs a
second: those of the language model, and of the tower for the patches.

python bench/bench_images.py [--steps 2] [--set tiers.gpu=25769803776]    writes bench/results/<machine>/images.json
python bench/bench_images.py --plan MACHINE.yaml                          plans the steps, without a GPU
python bench/bench_images.py --tiny                                       a smoke run on a CPU

A third measurement has texts alone whose documents see each other, which needs no mask. Plans take the rates that
`megatier bench` measured, or else those that are assumed for an H100. It needs Pillow and torchvision, and no network:
processor, pictures and texts are made on the spot, and weights are laid.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from image_scales import FULL, MERGED, TINY, Scale
from laid_weights import fill
from peers.shapes import peak_gpu_bytes, peak_ram_bytes
from phases import Phases
from PIL import Image
from record import facts, folder_of, write_row
from rows import RATE
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig, TrainConfig
from megatier.data.image_chats import ImageChats
from megatier.data.image_packs import positions_of
from megatier.data.processor import load_processor
from megatier.data.tokenizer import byte_tokenizer
from megatier.hardware import set_cuda_defaults
from megatier.models.decoder import build_skeleton
from megatier.planner.plan import make_plan
from megatier.schedule.budgets import Budgets
from megatier.schedule.rates_file import read_rates
from megatier.session.process import make_repeatable, share_interpreter
from megatier.session.session import Session
from megatier.setup.machine import Machine
from megatier.setup.setup import Setup
from megatier.setup.skeleton import model_config_of
from megatier.setup.tower import Tower
from megatier.trace.events import TraceEvent, account

SPECIAL = {"image_token": "<img>", "video_token": "<vid>", "vision_start_token": "<vs>", "vision_end_token": "<ve>"}
TEMPLATE = """\
{%- for message in messages -%}
{%- for part in message.content -%}
{%- if part.type == "image" -%}<vs><img><ve>
{%- elif message.role == "assistant" -%}{% generation %}{{ part.text + "<|end|>" }}{% endgeneration %}
{%- else -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endfor -%}
"""
MOST_IMAGES = 4
"""Images of a conversation that has most of them."""
WARMUP = 1
"""Steps of each kind that are not timed."""
KINDS = {"images": "images", "text": "text", "causal": "text"}
"""What is measured, and the conversations that it takes."""
SHOWN: tuple[str, ...] = ("tokens_per_s", "patches_per_s", "tflops", "images_over_text", "images_over_causal_text")
SHOWN += ("planned_seconds", "measured_over_planned", "planned_gpu_bytes", "peak_gpu_bytes", "peak_ram_bytes")


def make_processor(scale: Scale, folder: Path) -> dict[str, int]:
    """Write the model's processor with a tokenizer of bytes, and return the tokens that the model's config names."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().backend_tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=SPECIAL,
    )
    cut = {"patch_size": scale.vision["patch_size"], "merge_size": MERGED, "temporal_patch_size": 2}
    pixels = scale.side**2
    own = Qwen3VLProcessor(
        Qwen2VLImageProcessor(**cut, size={"shortest_edge": pixels // 16, "longest_edge": 16 * pixels}),
        tokenizer,
        Qwen3VLVideoProcessor(**cut),
        chat_template=TEMPLATE,
    )
    own.save_pretrained(folder)
    return {f"{name}_id": tokenizer.vocab[token] for name, token in SPECIAL.items()}


def make_chats(scale: Scale, folder: Path, *, with_images: bool) -> Path:
    """Write conversations of 0 to 4 images, or with as many characters instead, and return their file."""
    dice = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    lines = []
    for chat in range(scale.num_chats):
        names = [f"{chat}-{number}.jpg" for number in range(chat % (MOST_IMAGES + 1))]
        half = dice.randint(*scale.characters) // 2
        question = "x" * half
        if not with_images:
            question += "x" * (len(names) * scale.image_tokens)
            names = []
        for name in names:
            noise = torch.randint(0, 256, (scale.side, scale.side, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(noise.numpy()).save(folder / name)

        turns = [
            {"role": "user", "content": "<image>" * len(names) + question},
            {"role": "assistant", "content": "x" * half},
        ]
        lines.append(json.dumps({"messages": turns, "images": names}))
    path = folder / "chats.jsonl"
    path.write_text("\n".join(lines))
    return path


def config_of(scale: Scale, tokens: Mapping[str, int], processor: Path, chats: Path, settings: list[str]) -> RunConfig:
    """Make the run's settings, but for its batch."""
    model = {"model_type": "qwen3_vl", "text_config": dict(scale.text), "vision_config": dict(scale.vision)}
    config = RunConfig(
        model=ModelConfig(config={**model, **tokens, "tie_word_embeddings": False}, attention="sdpa"),
        data=DataConfig(
            files=(str(chats),),
            chat="messages",
            images=True,
            tokenizer=str(processor),
            sequence_length=scale.sequence,
            max_patches=MOST_IMAGES * scale.image_patches,
            holdout_fraction=0.0,
        ),
        train=TrainConfig(learning_rate=RATE, clip=1.0),
    )
    given = {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in settings)}
    return config.changed({**scale.settings, **given})


def text_flops(setup: Setup, lengths: Sequence[int]) -> float:
    """Return the FLOPs of the language model in a step: 6 for each parameter and token, and causal attention.

    Args:
        setup: the run, with its tower.
        lengths: tokens of each conversation.
    """
    text = setup.model.config.get_text_config()
    tower = setup.tower.units
    num_parameters = sum(
        tensor.num_parameters
        for unit in setup.units
        if unit.name not in tower
        for tensor in unit.layout.tensors
        if len(tensor.parameter_shape) > 1
    )
    width = text.num_attention_heads * text.head_dim
    attention = 6 * text.num_hidden_layers * width * sum(length**2 for length in lengths)
    return float(6 * num_parameters * sum(lengths) + attention)


def tower_flops(setup: Setup, scale: Scale) -> float:
    """Return the FLOPs of the tower in a step: three times those of the forward, of which shapes told."""
    tower = setup.tower
    forward = sum(unit.flops for unit in tower.units.values())
    return 3 * forward * tower.mean_share * scale.num_chats


def measure(session: Session, chats: ImageChats, config: RunConfig, name: str, steps: range) -> dict[str, Any]:
    """Run steps, and time those after the first ones, which compile and carry updates of other steps."""
    train = config.train
    tower = session.setup.tower.units
    seconds: list[float] = []
    losses: list[float] = []
    events: list[TraceEvent] = []
    began = 0
    for number, step in enumerate(steps):
        session.player.take_events()
        began = time.perf_counter_ns()
        groups = chats.groups(number, train.batch, train.groups)
        if name == "causal":
            groups = [{column: group[column] for column in ("input_ids", "labels")} for group in groups]
        result = session.engine.train_step(step, RATE, groups)
        seconds.append((time.perf_counter_ns() - began) / 1e9)
        losses.append(result.loss)
        events = session.player.take_events()
        print(f"{name}, step {step}: {seconds[-1]:.3f} s, loss {losses[-1]:.4f}", flush=True)
    timed = seconds[WARMUP:]
    return {
        "seconds": timed,
        "median_seconds": median(timed),
        "warmup_seconds": seconds[:WARMUP],
        "losses": losses,
        "last_step": asdict(account(events, began, began + round(seconds[-1] * 1e9))),
        # An event of compute has the name of its unit, the phase and the group.
        "tower_seconds": sum(
            event.seconds for event in events if event.lane == "compute" and event.name.split()[0] in tower
        ),
    }


def planned(setup: Setup, chats: ImageChats, scale: Scale) -> dict[str, Any]:
    """Return what a step has, with images and without, and what plans say of it."""
    rows = [row for pack in chats.train.read(range(chats.num_sequences)) for row in pack]
    images = round(setup.tower.mean_images * scale.num_chats)
    plans = {"images": make_plan(setup), "text": make_plan(replace(setup, tower=Tower()))}
    return {
        "sequences_per_step": chats.num_sequences,
        "tokens_per_step": sum(row.num_tokens for row in rows),
        "images_per_step": images,
        "patches_per_step": images * scale.image_patches,
        "text_flops": text_flops(setup, [row.num_tokens for row in rows]),
        "tower_flops": tower_flops(setup, scale),
        "planned_seconds": {name: plan.forecast.seconds for name, plan in plans.items()},
        "planned_compute_seconds": {name: plan.compute_seconds for name, plan in plans.items()},
        "planned_gpu_bytes": setup.budgets.gpu + plans["images"].activations.peak,
        "assumed_rates": setup.machine.assumed,
    }


def compared(step: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return rates of what was measured, their ratios at equal FLOPs, and how far plans are off.

    Args:
        step: as `planned` returned it.
        measured: what `measure` returned of each kind.
    """
    seconds = {name: found["median_seconds"] for name, found in measured.items()}
    rates = {name: step["text_flops"] / each for name, each in seconds.items()}
    rates["images"] += step["tower_flops"] / seconds["images"]
    return {
        "measured": measured,
        "tokens_per_s": {name: step["tokens_per_step"] / each for name, each in seconds.items()},
        "patches_per_s": step["patches_per_step"] / seconds["images"],
        "tflops": {name: rate / 1e12 for name, rate in rates.items()},
        "images_over_text": rates["images"] / rates["text"],
        "images_over_causal_text": rates["images"] / rates["causal"] if "causal" in rates else None,
        "measured_over_planned": {name: seconds[name] / each for name, each in step["planned_seconds"].items()},
    }


def opened(stack: ExitStack, scale: Scale, settings: list[str]) -> tuple[RunConfig, Any, dict[str, ImageChats]]:
    """Write processor and conversations, and return the run, its skeleton, and conversations with images and without.

    They are there until the stack ends.
    """
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="images-")))
    tokens = make_processor(scale, folder / "processor")
    files = {name: make_chats(scale, folder / name, with_images=name == "images") for name in ("images", "text")}
    config = config_of(scale, tokens, folder / "processor", files["images"], settings)
    make_repeatable(config)
    share_interpreter()

    model = build_skeleton(model_config_of(config.model), config.model.attention)
    processor = load_processor(config)
    chats = {}
    for name, path in files.items():
        data = config.changed({"data.files": (str(path),)}).data
        read = ImageChats(data, processor, folder / f"rows-{name}", positions=positions_of(model))
        chats[name] = stack.enter_context(read)

    # A step has every conversation once.
    num_rows = chats["images"].num_sequences
    assert chats["text"].num_sequences == num_rows, "sequences have as many tokens with images as without"
    return config.changed({"train.batch": num_rows, "train.groups": scale.groups}), model, chats


def run(
    scale: Scale, settings: list[str], steps: int, machine_file: Path | None, kinds: Sequence[str] = tuple(KINDS)
) -> dict[str, Any]:
    """Make model and conversations, measure unless only a plan is wanted, and return what is written."""
    phases = Phases()
    with ExitStack() as stack:
        config, model, chats = opened(stack, scale, settings)
        phases.end("conversations")
        if machine_file is None:
            machine = Machine.here(config.tiers)
        else:
            budgets = Budgets(config.tiers.gpu or 0, config.tiers.ram or 0, 0)
            machine = Machine.elsewhere(config.tiers, read_rates(machine_file), budgets)
        setup = Setup.of(config, model, machine).with_tower()
        if setup.tower.missing:
            sys.exit(f"the tower cannot be planned: {setup.tower.missing}")
        found = planned(setup, chats["images"], scale)
        print(found, flush=True)
        phases.end("plans")
        if machine_file is not None:
            return found

        session = stack.enter_context(Session(setup, any_shape=True))
        session.seal()
        phases.end("memory")
        fill(session)
        phases.end("weights")
        if groups := chats["images"].rehearsal(0, config.train.batch, config.train.groups):
            session.engine.rehearse(groups)
        measured = {}
        for number, name in enumerate(kinds):
            first = 1 + number * (WARMUP + steps)
            measured[name] = measure(session, chats[KINDS[name]], config, name, range(first, first + WARMUP + steps))
            phases.end(name)
        found |= compared(found, measured)
        print(phases, flush=True)
        return found | {
            "phases": phases.seconds,
            "peak_gpu_bytes": peak_gpu_bytes(),
            "peak_ram_bytes": peak_ram_bytes(),
        }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each kind (2)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what to measure: images, text")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="change a setting")
    parser.add_argument("--tiny", action="store_true", help="take a tiny model, on a CPU")
    parser.add_argument("--plan", type=Path, metavar="MACHINE", help="do not run: plan on this machine")
    parser.add_argument("--output", type=Path, help="JSON file (default: bench/results/<machine>/images.json)")
    options = parser.parse_args()
    if not {"images", "text"} <= {*options.kinds}:
        parser.error("--kinds needs images and text, which are compared")
    set_cuda_defaults()

    found = run(TINY if options.tiny else FULL, options.set, options.steps, options.plan, options.kinds)
    if options.plan is None:
        found |= {"settings": options.set} | facts()
        write_row(found, options.output or folder_of(found["machine"]) / "images.json")
        print({name: found[name] for name in SHOWN}, flush=True)


if __name__ == "__main__":
    main()
