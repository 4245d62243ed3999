"""Measures a whole step: forward, backward, exact clipping at 1.0, and AdamW with fp32 masters, on random tokens.

Rows 38 and 39 do not clip: their updates run inside the backward.

Each row of the table in docs/benchmarks.md is one of `rows.ROWS`. A step carries the update of the step before it, so
each of several steps in sequence has exactly one. The weights are one random piece repeated, laid straight into the
store: speed does not depend on their values, and a real initialisation takes longer than the steps. The compute-only
bound of the same shape is measured in the same run, before the model is built.

python bench/bench_step.py --row 1 [--steps 6]          writes bench/results/<machine>/row1.json
python bench/bench_step.py --row 1 --set model.attention=sdpa    the same with another kernel
python bench/bench_step.py --row 7 --set tiers.locked=536870912  with 512 MiB of page-locked RAM, the rest through rings
python bench/bench_step.py --row 11 --nvme DIR          rows with state on NVMe need a directory on a drive
python bench/bench_step.py --row 11 --plan MACHINE.yaml forecasts the row, without a GPU; with --ranks N, on N GPUs

Rows 27 to 30 train adapters, and need peft. Row 29 compares its step with what `megatier bench` measured of the drive
before (`drive_seconds`), and has the losses of row 30:

python bench/bench_step.py --row 27                     8B, base in RAM (28: on the GPU), beside the bound of adapters
python bench/peers/peft_resident.py --shape 8b          its peer: PEFT over a model that lies on the GPU
megatier bench --nvme DIR --size 16GiB && python bench/bench_step.py --row 29 --nvme DIR --warmup 1 --steps 3 --no-bound
python bench/bench_step.py --row 30 --warmup 1 --steps 3 --no-bound

Row 32 is row 29 with its base in a model's own files, which are written first (29.6 GB) and removed in the end. The
run is opened as `megatier train` opens it, and also compares all bytes that moved with those that were demanded
(`surplus_bytes`):

python bench/bench_step.py --row 32 --nvme DIR --warmup 1 --steps 3 --no-bound

Under torchrun the ranks share the state, and each computes as many sequences as the row has:

torchrun --standalone --nproc-per-node 2 bench/bench_step.py --row 1 --no-bound    writes .../row1_ranks2.json
torchrun --standalone --nproc-per-node 4 bench/bench_step.py --row 41 --no-bound   rows 41 to 44 are for four GPUs
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bound import bound_of
from laid_weights import fill, load, written_base
from peers.shapes import SHAPES, TFLOPS_FORMULA, peak_gpu_bytes, peak_ram_bytes, trained_shape
from record import RESULTS, Row, default_output, row, write_row
from rows import RATE, ROWS, Run, changed, config_of, shared, skeleton

from megatier.hardware import set_cuda_defaults
from megatier.planner.plan import make_plan
from megatier.ranks.ranks import Ranks
from megatier.ranks.rendezvous import joined
from megatier.report.picture import draw, lane_uses
from megatier.schedule.budgets import Budgets
from megatier.schedule.rates_file import read_rates
from megatier.schedule.world import World
from megatier.session.process import make_repeatable, share_interpreter
from megatier.session.session import Session
from megatier.setup.attention_choice import choose_kernel
from megatier.setup.machine import Machine
from megatier.setup.setup import Setup
from megatier.setup.skeleton import model_config_of, open_model
from megatier.tier import Kind, Tier
from megatier.trace.events import TraceEvent, stall_seconds, write_trace


def forecast(run: Run, machine: Path, ranks: int) -> dict[str, Any]:
    """Forecast the row as `megatier plan` does, on so many GPUs of one host."""
    run = shared(run, ranks)
    config = config_of(run, True, Path()).changed({"model.compile": True})
    tiers = config.tiers
    budgets = Budgets(tiers.gpu or 0, tiers.ram or 0, run.nvme)
    there = Machine.elsewhere(tiers, read_rates(machine), budgets, World(ranks))
    config, _ = choose_kernel(config, model_config_of(config.model), there)
    made = make_plan(Setup.of(config, skeleton(run, config.model.attention), there))
    return made.as_dict() | {"what": run.what, "machine_file": machine.name}


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The measurements of a run, step by step."""

    reserve_seconds: float
    """Seconds until all memory and files were reserved."""
    fill_seconds: float
    """Seconds that the weights took after that."""
    seconds: list[float]
    """Seconds of each step, those of the warm-up included."""
    losses: list[float]
    """The loss of each step."""
    norms: list[float]
    """The gradient norm of each step."""
    events: list[TraceEvent]
    """The events of the last step."""
    moved: Counter[str]
    """Bytes that each queue moved in the last step."""
    surplus: dict[str, int] | None
    """Bytes that queues moved in all steps beyond those that were demanded; None: not asked for."""


def measure(
    run: Run,
    warmup: int,
    steps: int,
    *,
    deterministic: bool,
    bound: Mapping[str, Any] | None,
    directory: Path | None,
    ranks: Ranks | None,
) -> tuple[Row, list[TraceEvent]]:
    """Measure the row of a run, and note what happened in its last step.

    Args:
        run: the row.
        warmup: steps that are not timed, which compile and record.
        steps: timed steps.
        deterministic: choose deterministic kernels.
        bound: the compute-only bound, if it was measured.
        directory: where block files lie, on the drive to measure.
        ranks: the ranks that share the state; `run` has the sequences of all of them.
    """
    with written_base(run.shape, run.sequence, directory) if run.in_place else nullcontext() as base:
        config = config_of(run, deterministic, directory, base)
        machine = Machine.here(config.tiers, ranks=ranks)
        config, _ = choose_kernel(config, model_config_of(config.model), machine)
        make_repeatable(config)
        share_interpreter()
        began = time.perf_counter()
        fills = fill
        if base is None:
            model = skeleton(run, config.model.attention)
        else:
            model, reader = open_model(config)
            fills = partial(load, reader=reader, folder=base)

        with Session(Setup.of(config, model, machine), ranks=ranks) as session:
            if base is not None and not session.in_place:
                sys.exit(f"the base would not be read where it lies: {session.why_copied}")
            timed = _run_steps(session, run, config.train.groups, warmup + steps, began, fills)
            measured = _row_of(session, run, timed, warmup) | {"deterministic": deterministic, "bound": bound}
            measured["attention"] = config.model.attention

    # The bound is that of a smaller batch where a whole group does not fit next to resident weights.
    if bound is not None:
        groups = config.train.groups
        bound_s = groups * bound["median_s"] * (run.batch // groups) / bound["batch"]
        measured |= {"bound_seconds": bound_s, "attainment": bound_s / measured["median_seconds"]}

    return measured, timed.events


def _run_steps(
    session: Session, run: Run, groups: int, count: int, began: float, fills: Callable[[Session], None]
) -> Steps:
    """Fill the weights and run steps, the last of which is traced.

    Args:
        session: the opened session.
        run: the row.
        groups: groups of a step.
        count: the number of steps, warm-up included.
        began: the time at which building the skeleton began.
        fills: gives the session its weights.
    """
    session.seal()
    reserved = time.perf_counter() - began
    fills(session)
    filled = time.perf_counter() - began
    loaded = _moved(session)
    print(f"reserved after {reserved:.1f} s, filled after {filled:.1f} s", flush=True)

    seconds: list[float] = []
    losses: list[float] = []
    norms: list[float] = []
    moved: Counter[str] = Counter()
    generator = torch.Generator().manual_seed(1)

    for step in range(1, count + 1):
        ids = torch.randint(0, SHAPES[run.shape].vocab, (run.batch, run.sequence), generator=generator)
        batch = [{"input_ids": part, "labels": part} for part in ids.chunk(groups)]

        # Events of the steps before are dropped: the trace and the bytes are those of the last step.
        if step == count:
            session.player.take_events()
            moved = _moved(session)

        began_step = time.perf_counter()
        result = session.engine.train_step(step, RATE, batch)
        seconds.append(time.perf_counter() - began_step)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        print(f"step {step}: {seconds[-1]:.3f} s, loss {losses[-1]:.6f}, norm {norms[-1]:.6f}", flush=True)

    events = session.player.take_events()
    moved = _moved(session) - moved

    return Steps(
        reserve_seconds=reserved,
        fill_seconds=filled - reserved,
        seconds=seconds,
        losses=losses,
        norms=norms,
        events=events,
        moved=moved,
        surplus=_surplus(session, loaded) if session.in_place else None,
    )


def _moved(session: Session) -> Counter[str]:
    """Return the bytes that each queue moved so far, and that came from other ranks."""
    others = Counter[str]() if session.ranks is None else session.ranks.moved_bytes
    return session.store.moved_bytes + others


def _surplus(session: Session, loaded: Counter[str]) -> dict[str, int]:
    """Return the bytes that queues moved beyond those that were demanded. It ends the last step.

    Args:
        session: over a base, so what is left of the step is little.
        loaded: bytes that had moved before the first step.
    """
    session.player.drain()
    beyond = _moved(session)
    beyond.subtract(loaded + session.player.demanded)
    return {queue: size for queue, size in beyond.items() if size}


def _row_of(session: Session, run: Run, timed: Steps, warmup: int) -> Row:
    """Make the row of the measurements. The session must still be open."""
    shape = SHAPES[run.shape]
    on_gpu = torch.cuda.is_available()
    return row(
        "megatier",
        trained_shape(run.shape, run.rank),
        batch=run.batch,
        sequence_length=run.sequence,
        num_parameters=shape.num_parameters,
        seconds=timed.seconds[warmup:],
        first_step_seconds=timed.seconds[0],
        model_flops=shape.model_flops(run.batch * run.sequence, run.sequence, run.rank),
        tflops_formula=TFLOPS_FORMULA,
        peak_ram_bytes=peak_ram_bytes(),
        peak_gpu_bytes=peak_gpu_bytes() if on_gpu else None,
        clip=session.setup.config.train.clip is not None,
        master_dtype="fp32",
        budgets=run.what,
        settings={name: dict(getattr(run, name)) for name in ("tiers", "model", "train", "numerics")},
        ranks=session.placement.num_ranks,
        speculation=dict(session.speculation.outcomes),
        void_bytes=session.speculation.void_bytes,
        torch_peak_allocated_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        reserve_seconds=timed.reserve_seconds,
        fill_seconds=timed.fill_seconds,
        seconds_to_first_step_end=timed.reserve_seconds + timed.fill_seconds + timed.seconds[0],
        losses=timed.losses,
        norms=timed.norms,
        **_placement(session),
        **_movement(timed.events, timed.moved),
        drive_seconds=_drive_seconds(session, timed.moved),
        units_in_place=len(session.in_place),
        surplus_bytes=timed.surplus,
    )


def _placement(session: Session) -> dict[str, Any]:
    """Return the bytes in each tier, and those that are page-locked."""
    placement = session.placement
    in_ram = sum(v for k, v in session.store.usage(Tier.RAM).items() if k != "budget")
    staging = session.store.staging
    unlocked = 0 if staging is None else staging.unlocked_bytes
    return {
        "state_bytes": {str(tier): placement.state_bytes.get(tier, 0) for tier in Tier},
        "other_bytes": {str(tier): placement.other_bytes.get(tier, 0) for tier in Tier},
        "pinned_bytes": in_ram - unlocked,
        "unlocked_bytes": unlocked,
        "streamed_units": len(placement.streamed),
        "weight_slots": placement.num_slots(Tier.GPU, Kind.WEIGHT),
    }


def _drive_seconds(session: Session, moved: Mapping[str, int]) -> float | None:
    """Return the seconds that reading a step's bytes from the drives takes at the rates that `megatier bench` measured.

    None: there is no drive, or it was not measured.
    """
    rates = session.setup.machine.measured_rates
    drives = () if rates is None else rates.drives
    rate = sum(drive.read_bytes_per_s for drive in drives)
    return moved["nvme_to_ram"] / rate if rate else None


def _movement(events: list[TraceEvent], moved: Counter[str]) -> dict[str, Any]:
    """Return the busy seconds of each lane and the stalls by cause in the last step."""
    return {
        "busy_seconds": {use.lane: use.busy_seconds for use in lane_uses(events)},
        "stall_seconds": stall_seconds(events),
        "moved_bytes": dict(moved),
    }


def _bound(run: Run, deterministic: bool) -> dict[str, Any] | None:
    """Measure the compute-only bound in a process of its own, so that its memory is free again."""
    config = config_of(run, deterministic, None)
    found = model_config_of(config.model)
    attention = choose_kernel(config, found, Machine.here(config.tiers))[0].model.attention
    groups = run.train.get("groups", 1)
    # Weights, activations and gradients lie on the GPU at once there: more than 16 sequences of 8B have no room.
    batch = min(16, run.batch // groups)
    words = ["--shape", run.shape, "--batch", str(batch), "--sequence", str(run.sequence), "--attention", attention]
    words += ["--rank", str(run.rank), "--products", config.numerics.products]
    flag = "--deterministic" if deterministic else "--no-deterministic"

    return bound_of(
        subprocess.run(
            [sys.executable, str(Path(__file__).parent / "bound.py"), *words, flag],
            capture_output=True,
            text=True,
            check=False,
        )
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, choices=ROWS, required=True)
    parser.add_argument("--warmup", type=int, default=2, help="steps before, which compile and record (default 2)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps (default 6)")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=NUMBER", help="change a setting")
    parser.add_argument("--bound", action=argparse.BooleanOptionalAction, default=True, help="measure the bound too")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--trace", type=Path, help="write the last step in the Chrome trace format")
    parser.add_argument("--output", type=Path, help="JSON file (default: bench/results/<machine>/row<N>.json)")
    parser.add_argument("--nvme", type=Path, help="directory for block files, on the drive to measure")
    parser.add_argument("--plan", type=Path, metavar="MACHINE", help="do not run: forecast the row on this machine")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the forecast (default 1)")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = parse_arguments()
    run = changed(ROWS[options.row], options.set)

    if options.plan is not None:
        made = forecast(run, options.plan, options.ranks)
        path = options.output or RESULTS / options.plan.stem / "plans" / f"row{options.row}.json"
        write_row(made, path)
        print({key: made[key] for key in ("seconds", "tokens_per_s", "bound_share", "bound_by", "hidden_at_tokens")})
        return

    if run.nvme and options.nvme is None:
        sys.exit(f"row {options.row} needs --nvme DIRECTORY")
    set_cuda_defaults()
    name = f"row{options.row}"
    with joined("cuda" if torch.cuda.is_available() else "cpu") as ranks:
        if ranks is not None:
            run = shared(run, ranks.size)
            name += f"_ranks{ranks.size}"
        bound = _bound(run, options.deterministic) if options.bound else None
        result, events = measure(
            run,
            options.warmup,
            options.steps,
            deterministic=options.deterministic,
            bound=bound,
            directory=options.nvme,
            ranks=ranks,
        )

    # All ranks measure the same steps, so one of them writes the row.
    if ranks is not None and ranks.rank:
        return

    result["row"] = options.row
    picture = draw(events, f"{run.shape}, {run.batch} x {run.sequence} tokens, {run.what}")
    path = options.output or default_output(result).with_stem(name)
    write_row(result, path)
    path.with_suffix(".svg").write_text(picture, encoding="utf-8")
    if options.trace is not None:
        write_trace(options.trace, [(options.warmup + options.steps, events)])
    shown: tuple[str, ...] = (
        "tokens_per_s",
        "median_seconds",
        "model_tflops",
        "attainment",
        "peak_gpu_bytes",
        "peak_ram_bytes",
    )
    shown += ("torch_peak_allocated_bytes", "state_bytes", "other_bytes", "stall_seconds", "busy_seconds")
    shown += ("moved_bytes", "drive_seconds", "surplus_bytes")
    print({key: result.get(key) for key in shown}, flush=True)


if __name__ == "__main__":
    main()
