"""Tells a plan as tables and sentences: what lies where, how long a step takes, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from megatier.byte_counts import format_bytes
from megatier.checkpoint.checkpoint_clock import every_seconds, format_about
from megatier.report.figures import unified_memory
from megatier.report.metrics import format_count, format_range, format_seconds, format_share
from megatier.report.report import figure_table
from megatier.schedule.rates import ASSUMED, Rates
from megatier.schedule.world import World
from megatier.tier import STATE_KINDS, Tier

if TYPE_CHECKING:
    from megatier.planner.plan import Plan


def make_tables(plan: Plan) -> tuple[Table, ...]:
    """Return the tables of a plan: bytes, lanes, and what single changes would do."""
    return _bytes_table(plan), _time_table(plan), _change_table(plan)


def _bytes_table(plan: Plan) -> Table:
    """Return the table of the bytes in each tier."""
    # Tiers are the columns, since they are few: with a column for each kind a terminal of 80 columns would cut names.
    budgets = {
        Tier.GPU: plan.budgets.gpu,
        Tier.RAM: plan.budgets.ram,
        Tier.NVME: plan.budgets.nvme,
    }
    table = figure_table("what lies where", "bytes", *budgets)

    other = {tier: plan.placement.other_bytes.get(tier, 0) for tier in budgets}
    rows: dict[str, Mapping[Tier, int]] = {}
    for kind in STATE_KINDS:
        rows[str(kind)] = {tier: plan.state_bytes.get((tier, kind), 0) for tier in budgets}
    rows["slots, gradients"] = other
    rows["in all"] = {tier: plan.placement.state_bytes.get(tier, 0) + other[tier] for tier in budgets}
    rows["budget"] = budgets
    for name, sizes in rows.items():
        # Each optimizer has kinds of state that others lack.
        if not any(sizes.values()):
            continue
        table.add_row(name, *(format_bytes(size) if size else "-" for size in sizes.values()))
    return table


def _time_table(plan: Plan) -> Table:
    """Return the table of how long each lane is busy, and how long it would be if it were alone."""
    forecast = plan.forecast
    waver = format_range(plan.seconds_range)
    title = f"a step: {format_seconds(forecast.seconds)}{waver}, {format_count(plan.tokens_per_s)} tokens/s"
    table = figure_table(title, "lane", "moves", "alone", "busy", "share")
    for lane, alone in forecast.alone_seconds.items():
        # A lane that has nothing to do in this run is no row.
        if not alone:
            continue
        # Compute and updates move nothing.
        moved = forecast.moved_bytes.get(lane, 0)
        moves = format_bytes(moved) if moved else "-"
        busy = forecast.busy_seconds[lane]
        table.add_row(lane, moves, format_seconds(alone), format_seconds(busy), format_share(busy, forecast.seconds))
    return table


def _change_table(plan: Plan) -> Table:
    table = figure_table("what a single change would do", "one change", "tokens/s", "gain")
    for change in plan.changes:
        table.add_row(change.what, format_count(change.tokens_per_s), f"{change.gain:+.1%}")
    return table


def write_sentences(plan: Plan, steps: int | None, taken: str) -> Iterator[str]:
    """Yield sentences about what the tables do not show.

    Args:
        plan: the plan.
        steps: those of the run; None: its text decides, by epochs.
        taken: what the run directory takes, in words; empty if it takes nothing.
    """
    # First of all, since it says what every figure after it is about.
    if plan.world.num_ranks > 1:
        yield _ranks(plan.world)
    trained = f", {format_count(plan.num_trained)} of them trained" if plan.num_trained < plan.num_parameters else ""
    yield f"{format_count(plan.num_parameters)} parameters{trained}, {format_count(plan.tokens)} tokens a step."
    yield f"Bound by {_bound(plan)}; compute alone takes {plan.bound_share:.0%} of the step."
    if plan.hidden_at is not None:
        most = format_count(plan.hidden_at)
        yield f"From {most} tokens a step on, compute would hide everything else, if activations fit."
    # Epochs say nothing of the number of steps until the text was read.
    if steps is not None:
        seconds = format_seconds(plan.forecast.seconds * steps)
        yield f"The {steps:,} steps of the run take {seconds}, besides its start, compiling and saves."
    yield from _describe_compiling(plan)
    yield f"Attention is computed by {plan.attention} (model.attention)."
    yield from _gpu_memory(plan)
    yield from _lent(plan)
    if plan.in_place_bytes:
        yield (
            f"{format_bytes(plan.in_place_bytes)} of the base are read from the model's own files. They take no room "
            "in tiers.nvme, and are never written."
        )
    if plan.placement.streamed:
        yield f"{len(plan.placement.streamed)} units stream their state through the GPU."
    if count := list(plan.placement.grad_homes.values()).count(Tier.NVME):
        yield _spilled_gradients(count, plan)
    offloaded = list(plan.placement.activation_homes.values())
    if spilled := offloaded.count(Tier.NVME):
        short = "because RAM is too short for them"
        yield f"The activations of {spilled} of {len(offloaded)} units go on to NVMe, {short}."
    yield from _saves(plan, taken)
    if plan.written_bytes_per_step:
        written = plan.written_bytes_per_step
        size = format_bytes(written)
        whole = "" if steps is None else f" and {written * steps / 1e12:,.3g} TB in the run"
        day = f"{plan.written_bytes_per_day / 1e12:,.3g} TB a day"
        yield f"A step writes {size} to NVMe, which is {day}{whole}. Compare it with the TBW of the drive."


def _gpu_memory(plan: Plan) -> Iterator[str]:
    """Yield sentences about what the GPU holds beside the budget, and whether its memory is RAM."""
    if plan.unified_bytes is not None:
        yield unified_memory(plan.unified_bytes, plan.budgets, plan.placement)
    peak = format_bytes(plan.activations.peak)
    yield f"Activations, loss and libraries take about {peak} of GPU memory besides tiers.gpu."
    yield from _images(plan)
    if plan.mask_bytes:
        yield (
            f"Of this the mask that keeps documents apart takes {format_bytes(plan.mask_bytes)} or more, and attention "
            "computes what it masks too. With model.attention flex_attention masked blocks are skipped."
        )


def _images(plan: Plan) -> Iterator[str]:
    """Yield sentences about what images take."""
    if plan.images_missing:
        yield f"Images are not counted: {plan.images_missing}"
    if not plan.pixel_bytes:
        return
    tower = format_bytes(plan.tower_bytes.saved)
    pixels, ahead = (format_bytes(plan.pixel_bytes[tier]) for tier in (Tier.GPU, Tier.RAM))
    yield (
        f"Of this vision towers save {tower}, and pixels take {pixels}. RAM holds {ahead} of pixels besides tiers.ram. "
        f"A step has {plan.images:,.3g} images, if all conversations are like the first ones."
    )


def _lent(plan: Plan) -> Iterator[str]:
    """Yield a sentence about text that a loop, such as TRL's GRPO, generates in lent memory; none if not known."""
    room = plan.lent_room
    if room is None:
        return
    weights = format_bytes(room.weight_bytes)
    if room.left_bytes < 0:
        missing = format_bytes(-room.left_bytes)
        yield (
            f"A loop that generates text, such as GRPO, would need {missing} more of GPU memory to hold all weights "
            f"({weights})."
        )
        return
    meanwhile = f", while {format_bytes(room.state_bytes)} of state wait in RAM" if room.state_bytes else ""
    yield (
        f"A loop that generates text in lent memory, such as GRPO, has {format_bytes(room.left_bytes)} of the GPU for "
        f"keys and values, beside {weights} of weights{meanwhile}."
    )


def _describe_compiling(plan: Plan) -> Iterator[str]:
    """Yield a sentence about what the first step takes in addition, if that is anything."""
    fresh, kept = map(format_seconds, plan.compile_seconds)
    if plan.compile_seconds[0]:
        yield f"The first step also compiles, which takes about {fresh}, or {kept} if an earlier run did."


def _saves(plan: Plan, taken: str) -> Iterator[str]:
    """Yield sentences about what the run saves, and the room that it takes."""
    yield f"A checkpoint takes {format_bytes(plan.space.checkpoint_bytes)}{_describe_writing(plan)}."
    if taken:
        yield taken

    if plan.generation_bytes:
        sizes = []
        for use, size in plan.generation_bytes.items():
            generations, _, purpose = use.partition(": ")
            sizes.append(f"{format_bytes(size)} with {generations} ({purpose})")
        yield f"The run takes on NVMe, by tiers.generations: {', '.join(sizes)}."

        # No drive is known to say how long.
        duration = ""
        if plan.savepoint_seconds is not None:
            duration = f" in {format_seconds(plan.savepoint_seconds)}"
        yield f"A savepoint writes {format_bytes(plan.savepoint_bytes)}{duration}; the rest stays where it is on NVMe."


def _bound(plan: Plan) -> str:
    """Return the lane that bounds a step, or the host, if even that lane works for less time."""
    alone = plan.forecast.alone_seconds
    bound = plan.forecast.bound_by

    # Drives stand under one name, for all queues, and have no time of their own here.
    by_host = bound in alone and alone.get("host", 0.0) > alone[bound]
    return "the host, which prepares and ends each step" if by_host else bound


def _ranks(world: World) -> str:
    """Return a sentence about what the figures of several ranks are about."""
    host = "the host" if world.num_hosts == 1 else f"one of {world.num_hosts} hosts"
    share = "all" if world.num_host_ranks == 1 else f"one part in {world.num_host_ranks}"
    return (
        f"{world.num_ranks} ranks share the state. The figures are those of one rank, which has a GPU and {share} of "
        f"the RAM, drives and processors of {host}. Tokens, parameters and the checkpoint are those of all ranks "
        "together."
    )


def links_assumption(names: Sequence[str], world: World, *, here: bool) -> str:
    """Return a sentence about the rates that are assumed for links between ranks, and how to measure them."""
    templates = {
        "gather_bytes_per_s": "a GPU gathers {:.0f} GB/s from the others of its host",
        "scatter_bytes_per_s": "it receives {:.0f} GB/s of gradients from them",
        "network_bytes_per_s": "it receives {:.1f} GB/s from other hosts",
        "ranks_slowdown": "compute stands still meanwhile",
    }
    # The words of the slowdown have no place for a figure, so it does not matter that it is divided here as well.
    said = ", ".join(templates[name].format(ASSUMED[name] / 1e9) for name in names)
    remedy = f"Give {', '.join(names)} in the file of --machine."
    if here:
        hosts = f"--nnodes {world.num_hosts} " if world.num_hosts > 1 else ""
        remedy = f"Run `torchrun {hosts}--nproc-per-node {world.num_host_ranks} -m megatier bench` to measure them."
    return (
        f"Links between GPUs were not measured, so the times are rough. Assumed: {said}. With NVLink, GPUs are about "
        f"ten times as fast. {remedy}"
    )


def rates_assumption(rates: Rates, assumed: Sequence[str], mounts: Sequence[str], *, searches: bool) -> str:
    """Return a sentence about the rates that are assumed because nobody measured them, and what follows from that.

    Args:
        rates: those of the plan.
        assumed: the names of those that were not measured.
        mounts: the run's, as `tiers.nvme` has them.
        searches: whether settings were chosen nevertheless.
    """
    rates_text = []
    subject = "These drives were"
    # A bench measures links and processors together, so one of their rates tells of all of them.
    if "flops_per_s" in assumed:
        subject = "This machine was"
        rates_text = [
            f"copies to and from the GPU {rates.to_gpu_bytes_per_s / 1e9:.0f} GB/s",
            f"AdamW in RAM {format_count(rates.update_parameters_per_s)} parameters/s",
            f"AdamW on the GPU {format_count(rates.gpu_update_parameters_per_s)} parameters/s",
            f"compute {rates.flops_per_s / 1e12:.3g} TFLOP/s",
        ]
    if rates.drives:
        rates_text.append(f"each drive {rates.drives[0].mixed_bytes_per_s / 1e9:.0f} GB/s")

    then = "and so is the choice" if searches else "and no settings are chosen (`megatier train` chooses none either)"
    command = "megatier bench" + (f" --nvme {','.join(mounts)}" if mounts else "")
    return (
        f"{subject} not measured, so the times are rough, {then}. Assumed: {', '.join(rates_text)}. Run `{command}` to "
        "measure them."
    )


def _spilled_gradients(count: int, plan: Plan) -> str:
    """Return a sentence about what gradients of so many units cost on NVMe, and how to avoid that."""
    subject = "Gradients"

    # Without a norm to wait for, gradients of a single group are used up at once.
    remedy = "and so do train.clip null and numerics.guard off."
    if plan.placement.sums_on_gpu:
        subject = "Sums of groups"
        remedy = "and so does train.groups 1; fewer groups make it less."

    size = format_bytes(plan.spilled_gradient_bytes)
    return (
        f"{subject} of {count} units lie on NVMe, because RAM is too short for them. For this a step writes {size} "
        f"more, and reads as much. More tiers.ram avoids it, {remedy}"
    )


def _describe_writing(plan: Plan) -> str:
    """Return how long a checkpoint takes, in words; empty if no drive is known."""
    if plan.checkpoint_seconds is None or plan.checkpoint_pause_seconds is None:
        return ""

    seconds = format_seconds(plan.checkpoint_seconds)
    pause = format_seconds(plan.checkpoint_pause_seconds)
    apart = format_about(every_seconds(plan.checkpoint_pause_seconds))
    return (
        f" and is written in {seconds}, of which training waits for {pause}. With output.checkpoint_every auto there "
        f"is one about every {apart}"
    )
