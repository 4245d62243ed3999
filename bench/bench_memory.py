"""Compares the GPU memory that `megatier plan` counts with what steps take, for twenty shapes and settings.

Each case has layers of real widths, but few of them, so that all run within minutes on a GPU of 80 GB. Planned are the
arena and `planner.memory.activation_bytes`. Measured is the most that tensors took in two steps (allocated), the most
that torch took for them (reserved: rounding, and room that it keeps until it needs it elsewhere), and what the driver
and libraries hold beside both. The plan is right if allocated <= plan <= 1.03 x reserved.

python bench/bench_memory.py [--only NAME ...] [--live]     writes bench/results/<machine>/memory.json
python bench/bench_memory.py --compare FILE.json            compares the plans of now with these peaks, without a GPU

With `--live` the tensors that were alive at the peak of the second step are added up by the code that made them, which
says what a plan leaves out.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from laid_weights import fill
from record import facts, folder_of

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, NumericsConfig, RunConfig, TiersConfig, TrainConfig
from megatier.hardware import set_cuda_defaults
from megatier.planner.memory import activation_bytes
from megatier.session.process import make_repeatable
from megatier.session.session import Session
from megatier.setup.attention_choice import choose_kernel
from megatier.setup.machine import Machine
from megatier.setup.setup import Setup
from megatier.setup.skeleton import model_config_of, skeleton_of
from megatier.tier import Tier

GIB = 1 << 30
RATIO_MAX = 1.03
"""The most that a plan may be over the peak."""
ENTRIES = 400_000
"""Allocations that are noted of a step, at most."""


def llama(hidden: int, ffn: int, heads: int, kv_heads: int, layers: int, vocab: int, **more: object) -> dict[str, Any]:
    """Return the config of a Llama shape."""
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "vocab_size": vocab}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": hidden // heads}
    return {"model_type": "llama", "tie_word_embeddings": False, "max_position_embeddings": 1 << 20} | {
        **sizes,
        **heads_of,
        **more,
    }


B3 = llama(2048, 11008, 16, 2, 8, 151936)
B8 = llama(4096, 14336, 32, 8, 6, 128256)
B15 = llama(5120, 13824, 40, 8, 4, 152064)
B32 = llama(5120, 27648, 40, 8, 4, 152064)
B100 = llama(8192, 28672, 64, 8, 2, 32768)
B70 = llama(8192, 28672, 64, 8, 1, 128256)
TIED = llama(2048, 8192, 32, 8, 12, 128256, tie_word_embeddings=True)
MOE: dict[str, Any] = {
    **llama(2048, 6144, 32, 4, 4, 151936),
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
SMALL_HEAD = B8 | {"vocab_size": 8192}
PLAIN: dict[str, Any] = {"compile": False, "loss_chunk": 512}
IMMEDIATE: dict[str, Any] = {"clip": None}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape with its settings."""

    config: Mapping[str, Any]
    """The model's config."""
    batch: int
    sequence: int = 1024
    model: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    state: tuple[str, ...] = ("gpu",)
    guard: bool = True

    def settings(self) -> RunConfig:
        """Return the settings, as `megatier train` would take them."""
        model: dict[str, Any] = {"config": dict(self.config), "loss_chunk": 4096, **self.model}
        return RunConfig(
            model=ModelConfig(**model),
            data=DataConfig(files=("random",), tokenizer="bytes", sequence_length=self.sequence),
            tiers=TiersConfig(state=self.state, gpu=72 * GIB, ram=64 * GIB),
            train=TrainConfig(**({"batch": self.batch, "clip": 1.0, "learning_rate": 1e-5} | dict(self.train))),
            numerics=NumericsConfig(guard=self.guard),
        )


SLICED = {"slices": 16}
CASES: dict[str, Case] = {
    "8b": Case(config=B8, batch=16),
    "8b_all_saved": Case(config=B8, batch=16, model={"saved_share": 1.0}),
    "8b_half": Case(config=B8, batch=16, model={"saved_share": 0.4}),
    "8b_little": Case(config=B8, batch=32, model={"saved_share": 0.1}),
    "8b_nothing": Case(config=B8, batch=32, model={"saved_share": 0.0}),
    "8b_slices": Case(config=B8, batch=32, model={"saved_share": 0.0}, train={"slices": 4}),
    "8b_groups": Case(config=B8, batch=32, model={"saved_share": 0.3}, train={"groups": 2}),
    "8b_groups_slices": Case(config=B8, batch=64, model={"saved_share": 0.0}, train={"groups": 2, "slices": 8}),
    "8b_offload": Case(config=B8, batch=64, model={"saved_share": 0.0}, train={"activations": "offload", "slices": 2}),
    "8b_long": Case(config=B8, batch=1, sequence=65536, model={"saved_share": 0.0}),
    "8b_tiles": Case(config=B8, batch=1, sequence=65536, model={"saved_share": 0.0, "tile_tokens": 8192}),
    "8b_ram": Case(config=B8, batch=16, model={"saved_share": 0.2}, state=("ram",)),
    "8b_plain": Case(config=B8, batch=8, model={"compile": False}, train={"activations": "recompute"}),
    "8b_small_head": Case(config=SMALL_HEAD, batch=32, model={"loss_chunk": 512}),
    "plain_again": Case(config=SMALL_HEAD, batch=32, model=PLAIN, train={"activations": "recompute"}),
    "plain_kept": Case(config=SMALL_HEAD, batch=16, model=PLAIN),
    "small_head_tiles": Case(
        config=SMALL_HEAD, batch=1, sequence=65536, model={"saved_share": 0.0, "tile_tokens": 8192, "loss_chunk": 512}
    ),
    "8b_fp8_moments": Case(config=B8, batch=16, model={"saved_share": 0.6}, train={"moments": "fp8", "slices": 2}),
    "3b": Case(config=B3, batch=32),
    "tied": Case(config=TIED, batch=16, model={"saved_share": 0.5}),
    "15b_slices": Case(config=B15, batch=32, model={"saved_share": 0.1}, train={"slices": 2}),
    "32b_muon": Case(config=B32, batch=16, model={"saved_share": 0.0}, train={"optimizer": "muon"}),
    "moe_backward": Case(config=MOE | {"vocab_size": 8192}, batch=32, model={"saved_share": 0.0, "loss_chunk": 512}),
    "unfused": Case(config=B3 | {"vocab_size": 32768}, batch=8, model={"fused_loss": False, "saved_share": 0.1}),
    "moe": Case(config=MOE, batch=16, model={"saved_share": 0.2}),
    "70b": Case(config=B70, batch=16, model={"saved_share": 0.0}, train={"slices": 4}),
    "100b": Case(
        config=B100, batch=16, model={"saved_share": 0.0}, train=SLICED | IMMEDIATE | {"moments": "fp8"}, guard=False
    ),
    "100b_whole": Case(config=B100, batch=16, model={"saved_share": 0.0}, train={"moments": "bf16"}),
}


def planned(case: Case, *, here: str = "") -> tuple[Setup, dict[str, float]]:
    """Return the run, and the bytes that a plan counts beside the arena.

    Args:
        case: the case.
        here: the kernel of attention that its run took; empty: the one of this machine.
    """
    config = case.settings()
    machine = Machine.here(config.tiers)
    if here:
        config = config.changed({"model.attention": here})
    else:
        config, _ = choose_kernel(config, model_config_of(config.model), machine)
    config = config.changed({"model.compile": config.model.compile is not False})
    setup = Setup.of(config, skeleton_of(config.model), machine)
    found = activation_bytes(setup)
    return setup, {name: float(getattr(found, name)) for name in ("saved", "at_loss", "in_backward", "peak")}


def measured(case: Case, *, live: bool) -> dict[str, Any]:
    """Return what a plan counts, and what two steps take."""
    setup, plan = planned(case)
    config = setup.config
    make_repeatable(config)
    torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(1)
    vocab = case.config["vocab_size"]
    row: dict[str, Any] = {"planned": plan, "attention": config.model.attention}
    with Session(setup) as session:
        placed = session.placement
        row["arena_bytes"] = placed.state_bytes.get(Tier.GPU, 0) + placed.other_bytes.get(Tier.GPU, 0)
        session.seal()
        fill(session)
        row["steps"] = []
        for step in (1, 2):
            ids = torch.randint(0, vocab, (case.batch, case.sequence), generator=generator)
            groups = [{"input_ids": part, "labels": part} for part in ids.chunk(config.train.groups)]
            if live and step == 2:
                torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=ENTRIES)
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            session.engine.train_step(step, 1e-5, groups)
            session.player.drain()
            torch.cuda.synchronize()
            row["steps"].append(
                {
                    "seconds": time.perf_counter() - began,
                    "allocated_bytes": torch.cuda.max_memory_allocated(),
                    "reserved_bytes": torch.cuda.max_memory_reserved(),
                }
            )
        if live:
            row["live"] = at_peak(torch.cuda.memory._snapshot()["device_traces"][0])
            torch.cuda.memory._record_memory_history(enabled=None)
        free, total = torch.cuda.mem_get_info()
        row["context_bytes"] = total - free - torch.cuda.memory_reserved()

    row["peak_bytes"] = max(step["reserved_bytes"] for step in row["steps"]) + row["context_bytes"]
    row["peak_allocated_bytes"] = max(step["allocated_bytes"] for step in row["steps"]) + row["context_bytes"]
    row["plan_bytes"] = row["arena_bytes"] + plan["peak"]
    row["ratio"] = row["plan_bytes"] / row["peak_bytes"]
    row["is_right"] = row["peak_allocated_bytes"] <= row["plan_bytes"] <= RATIO_MAX * row["peak_bytes"]
    return row


def compared(name: str, row: Mapping[str, Any]) -> bool:
    """Return whether the plan of a case is right beside the peak that was measured, and print both."""
    plan = row["arena_bytes"] + planned(CASES[name], here=row["attention"])[1]["peak"]
    least, most = row["peak_allocated_bytes"], RATIO_MAX * row["peak_bytes"]
    found = [size / GIB for size in (plan, least, row["peak_bytes"])]
    words = "plan {:.2f}  allocated {:.2f}  reserved {:.2f}".format(*found)
    is_right = bool(least <= plan <= most)
    print(
        f"{name:18} {words}  plan/allocated {plan / least:.3f}{'' if is_right else '  not within bounds'}", flush=True
    )
    return is_right


def at_peak(trace: list[dict[str, Any]]) -> list[list[Any]]:
    """Return what was alive at the peak of a trace: MiB, number and place of the code, the most first."""
    alive: dict[int, tuple[int, str]] = {}
    now = most = 0
    peak: dict[int, tuple[int, str]] = {}
    for entry in trace:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry["size"], place_of(entry["frames"])
            now += entry["size"]
            if now > most * 1.002:
                most, peak = now, dict(alive)
        elif entry["action"] == "free_completed" and entry["addr"] in alive:
            now -= alive.pop(entry["addr"])[0]
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for size, place in peak.values():
        sizes[place] += size
        counts[place] += 1
    return [[round(size / 2**20), counts[place], place] for place, size in sizes.most_common(14)]


def place_of(frames: list[dict[str, Any]]) -> str:
    """Return the innermost frames of a stack that say most, as "file:line function"."""
    own = [f for f in frames if "/torch/" not in f["filename"] or "inductor" in f["filename"]]
    words = [f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in own[:2]]
    return " < ".join(words) or "?"


def main() -> None:
    """Run the cases, print a table and write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.compare:
        stored = json.loads(options.compare.read_text())["cases"]
        found = [compared(name, stored[name]) for name in options.only]
        sys.exit(not all(found))

    set_cuda_defaults()
    rows: dict[str, Any] = {}
    where = facts()
    output = options.output or folder_of(where["machine"]) / "memory.json"
    for name in options.only:
        began = time.perf_counter()
        try:
            rows[name] = measured(CASES[name], live=options.live)
        except Exception as error:  # noqa: BLE001 - one case that fails must not lose the others
            traceback.print_exc()
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()
        torch.cuda.empty_cache()
        row = rows[name]
        if "error" in row:
            print(f"{name:18} {row['error']}", flush=True)
            continue
        gib = [row[key] / GIB for key in ("arena_bytes", "plan_bytes", "peak_bytes", "peak_allocated_bytes")]
        words = "arena {:.2f}  plan {:.2f}  peak {:.2f}  allocated {:.2f}".format(*gib)
        print(f"{name:18} {words}  plan/peak {row['ratio']:.3f}  ({time.perf_counter() - began:.0f} s)", flush=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"cases": rows} | where, indent=1) + "\n")
    off = [name for name, row in rows.items() if not row.get("is_right")]
    print(f"{len(rows) - len(off)} of {len(rows)} within bounds; not: {', '.join(off) or 'none'}", flush=True)
    sys.exit(bool(off))


if __name__ == "__main__":
    main()
