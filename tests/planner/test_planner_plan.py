"""The plan of a run: its order of units and its bytes are those of the run itself."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crossed import crossed, some
from rank_pool import POOL
from rank_runs import RankRun, train_on_ranks
from small_setups import elsewhere
from small_timelines import RATES
from tiny_runs import (
    BATCH,
    PLACES,
    TOKENS,
    Place,
    exactness_config,
    least_budgets,
    opened,
    random_groups,
)

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.errors import PlanError
from megatier.forecast.forecast import Forecast
from megatier.models.decoder import build_skeleton
from megatier.planner.compile_time import KIND_SECONDS
from megatier.planner.plan import Plan, checkpoint_seconds, make_plan, pause_seconds
from megatier.planner.trial import Trial
from megatier.planner.unit_seconds import ROUNDED_BYTES
from megatier.schedule.budgets import Budgets, host_ram
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.policy import Policy
from megatier.schedule.rates import UPDATE_BYTES, Rates
from megatier.schedule.rates_file import read_rates
from megatier.schedule.world import World
from megatier.setup.attention_rule import estimate_efficiency
from megatier.setup.skeleton import skeleton_of
from megatier.tier import Kind, Phase, Tier

SLOW = replace(
    RATES,
    drives=(DriveRates(directory="a", read_bytes_per_s=3e6, write_bytes_per_s=2e6, mixed_bytes_per_s=2.5e6),),
    flops_per_s=1e11,
)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
MIB = 1 << 20
H200 = Path(__file__).parents[2] / "examples" / "machines" / "h200.yaml"


def run_config(train: TrainConfig | None = None, tiers: TiersConfig | None = None, **model: object) -> RunConfig:
    return RunConfig(
        model=ModelConfig(**({"config": LLAMA} | model)),  # type: ignore[arg-type]
        data=DataConfig(files=("python-stdlib",), tokenizer="bytes", sequence_length=TOKENS),
        tiers=tiers or TiersConfig(),
        train=train or TrainConfig(batch=BATCH),
    )


def llama(rates: Rates = RATES, **changes: object) -> Plan:
    config = run_config()
    return make_plan(elsewhere(config, rates, budgets(**changes)))


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (LLAMA, 3),
        ({**LLAMA, "num_hidden_layers": 9}, 3),
        ({**LLAMA, "model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"] * 2}, 4),
    ],
)
def test_plan_estimates_what_compiling_takes_from_the_kinds_of_modules(config: dict[str, Any], kinds: int) -> None:
    asked = run_config(config=config)
    skeleton = skeleton_of(asked.model)
    plan = make_plan(elsewhere(asked, RATES, budgets(gpu=64 * MIB), compiles=True, model=skeleton))
    seconds, kept_seconds = plan.compile_seconds
    assert seconds == KIND_SECONDS * kinds  # kinds of layers, the last norm, and the loss
    assert 0 < kept_seconds < seconds
    assert plan.as_dict()["compile_seconds"] == seconds
    plain = make_plan(elsewhere(asked, RATES, budgets(gpu=64 * MIB), compiles=False, model=skeleton))
    assert plain.as_dict()["compile_seconds"] == 0
    assert plain.forecast.seconds > 0


def budgets(**changes: object) -> Budgets:
    return replace(Budgets(2 * MIB, 16 * MIB, 64 * MIB), **changes)  # type: ignore[arg-type]


def test_plan_of_documents_apart_computes_all_pairs_but_for_flex_attention() -> None:
    """2 FLOPs more a pair of tokens and column, forward, and 2.5 times as many backward, at the kernel's rate."""
    seconds = {}
    for attention, crosses in itertools.product(("sdpa", "flex_attention"), (True, False)):
        config = run_config(attention=attention)
        config = replace(config, data=replace(config.data, cross_documents=crosses))
        made = make_plan(elsewhere(config, RATES, budgets()))
        seconds[attention, crosses] = made.compute_seconds
    more = seconds["sdpa", False] - seconds["sdpa", True]
    forward = 2 * BATCH * TOKENS**2 * LLAMA["hidden_size"] * LLAMA["num_hidden_layers"] / RATES.flops_per_s
    rates = {phase: estimate_efficiency("sdpa", 16, TOKENS, phase) for phase in Phase}
    wanted = forward / rates[Phase.FORWARD] + 2.5 * forward / rates[Phase.BACKWARD]
    assert more == pytest.approx(wanted, rel=0.02)
    assert seconds["flex_attention", False] == seconds["flex_attention", True]


def test_plan_of_one_long_sequence_takes_as_long_as_it_was_measured() -> None:
    """8B, 131,072 tokens on an H200: 97.9 s with sdpa and 64.5 s with flex attention, computed twice in both."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    shape = {"model_type": "llama", "num_hidden_layers": 32, "vocab_size": 128256, "tie_word_embeddings": False} | sizes
    seconds = {}
    for attention, kept in (("sdpa", False), ("flex_attention", False), ("flex_attention", True)):
        config = RunConfig(
            model=ModelConfig(config=shape, attention=attention, saved_share=0.0),  # type: ignore[arg-type]
            data=DataConfig(files=("random",), tokenizer="bytes", sequence_length=131_072),
            train=TrainConfig(batch=1, kept_attention=kept),
        )
        room = Budgets(30 << 30, 116 << 30, 0)
        made = make_plan(elsewhere(config, read_rates(H200), room))
        seconds[attention, kept] = made.forecast.seconds
    assert seconds["sdpa", False] == pytest.approx(97.9, rel=0.05)
    assert seconds["flex_attention", False] == pytest.approx(64.5, rel=0.05)
    assert seconds["flex_attention", True] < 131_072 / 2_400


def test_plan_in_tiles_counts_the_sums_of_their_gradients() -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
    shape = {"model_type": "llama", "num_hidden_layers": 4, "vocab_size": 1024, **sizes}
    rates = read_rates(H200)
    seconds = {}
    for tile in (8192, 4096, 1024, 512):
        config = RunConfig(
            model=ModelConfig(config=shape, tile_tokens=tile, frozen=("*.down_proj.*",)),
            data=DataConfig(files=("random",), tokenizer="bytes", sequence_length=8192),
            train=TrainConfig(batch=1),
        )
        made = make_plan(elsewhere(config, rates, Budgets(8 << 30, 8 << 30, 0)))
        seconds[tile] = made.forecast.busy_seconds["compute"]

    # Of each weight that is trained, a tile writes a gradient in bf16 and reads it, and reads and writes the sum.
    trained = 4 * (2 * 1024 * 4096 + 2 * 1024)
    a_tile = trained * (2 + 2 + 4 + 4) / (26 * rates.gpu_update_parameters_per_s)
    assert seconds[1024] - seconds[4096] == pytest.approx((8 - 2) * a_tile)
    assert seconds[512] - seconds[1024] == pytest.approx((16 - 8) * a_tile)


PLACED = [
    ("gpu", 1, "keep"),
    ("gpu", 1, "offload"),
    ("ram", 3, "recompute"),
    ("ram_streamed", 1, "keep"),
    ("ram_streamed", 3, "offload"),
    ("nvme", 1, "recompute"),
    ("gpu_ram_nvme", 3, "keep"),
    ("nvme_grads", 3, "offload"),
]
TRAINED = [
    ("untied", False, "adamw", "fp32"),
    ("untied", True, "adamw", "bf16"),
    ("untied", True, "muon", "bf16"),
    ("untied", True, "lion", "fp32"),
    ("tied", True, "adamw", "fp32"),
    ("moe", False, "adamw", "fp32"),
]


@pytest.mark.parametrize(("trained", "placed"), crossed(TRAINED, PLACED, by=6))
def test_plan_foretells_the_order_and_the_bytes_of_a_real_run(
    trained: tuple[str, bool, str, str], placed: tuple[str, int, str], tmp_path: Path
) -> None:
    model, fused, optimizer, moments = trained
    place, groups, activations = placed
    choices: dict[str, Any] = {"activations": activations, "optimizer": optimizer, "moments": moments}
    train = TrainConfig(batch=BATCH, groups=groups, learning_rate=1e-2, **choices)
    config = exactness_config(model)
    with opened(config, tmp_path, PLACES[place], train, fused_loss=fused) as session:
        vocab = config.get_text_config().vocab_size
        for step in (1, 2):
            session.engine.train_step(step, 1e-2, random_groups(train, vocab, step))
        before = session.player.demanded
        session.engine.train_step(3, 1e-2, random_groups(train, vocab, 3))
        demanded = session.player.demanded - before
        order = tuple(session.player.accesses)
        sizes = Budgets(*(session.store.usage(tier)["budget"] for tier in (Tier.GPU, Tier.RAM, Tier.NVME)))
        share = PLACES[place].streamed
        settings = run_config(train, TiersConfig(state=PLACES[place].tiers, streamed_share=share), fused_loss=fused)
        plan = make_plan(elsewhere(settings, RATES, sizes, compiles=False, model=build_skeleton(config, "sdpa")))
    assert plan.accesses == order
    assert plan.placement.homes == session.placement.homes
    assert Counter({queue: round(size) for queue, size in plan.forecast.moved_bytes.items()}) == demanded


@pytest.mark.parametrize("name", some(["nvme", "gpu", "ram"], by=3))
def test_plan_of_ranks_foretells_the_bytes_of_a_real_run(name: str, tmp_path: Path) -> None:
    """A step more demands as much as the plan says. The least budgets of a session are those of the plan."""
    place = Place(tiers=(name,), gpu=64 * MIB if name == "gpu" else 0)
    runs = [RankRun(model="untied", steps=steps) for steps in (3, 4)]
    first, more = (POOL.run(train_on_ranks, 2, run, place, tmp_path)[0].demanded for run in runs)
    step = {queue: size - first[queue] for queue, size in more.items()}

    config = exactness_config("untied")
    model = ModelConfig(config={"model_type": config.model_type}, fused_loss=False, loss_chunk=20)
    nvme = (f"{tmp_path}:128MiB",) if name == "nvme" else ()
    tiers = TiersConfig(device="cpu", nvme=nvme, state=place.tiers, io_threads=2, update_threads=2)
    skeleton = build_skeleton(config, "sdpa")
    settings = replace(run_config(runs[0].train, tiers), model=model)
    least = least_budgets(settings, skeleton, place, 2)
    host = Budgets(least.gpu, host_ram(least.ram, Policy(num_ranks=2, num_host_ranks=2)), least.nvme)
    plan = make_plan(elsewhere(settings, RATES, host, compiles=False, world=World(2), model=skeleton))
    assert {queue: round(size) for queue, size in plan.forecast.moved_bytes.items()} == step
    assert plan.tokens == runs[0].batch * TOKENS


def test_plan_bytes_add_up_to_twelve_a_parameter() -> None:
    plan = llama()
    assert sum(plan.state_bytes.values()) >= 12 * plan.num_parameters
    assert {tier for tier, _ in plan.state_bytes} <= set(Tier)
    assert plan.placement.state_bytes[Tier.RAM] + plan.placement.other_bytes[Tier.RAM] <= plan.budgets.ram


def test_plan_that_spills_names_the_disk_and_what_would_help() -> None:
    plan = llama(SLOW, gpu=MIB, ram=5 * MIB // 2)
    assert plan.forecast.bound_by == "nvme"
    assert plan.written_bytes_per_step > 0
    assert plan.hidden_at is not None
    assert plan.hidden_at > plan.tokens
    assert plan.space.checkpoint_bytes == 12 * plan.num_parameters
    assert plan.changes[0].gain >= plan.changes[-1].gain
    wanted = {"one more drive", "a quarter more RAM", "updates in the backward (tiers.generations 2)"}
    assert wanted <= {change.what for change in plan.changes}


def test_plan_says_what_more_tokens_would_do_at_once_or_in_more_groups() -> None:
    found = {change.what: change.gain for change in llama(SLOW, gpu=MIB, ram=5 * MIB // 2).changes}
    large = found[f"twice the tokens in a group (batch {2 * BATCH})"]
    many = found[f"twice the groups (batch {2 * BATCH}, groups 2)"]
    assert large > many > 0, "weights are loaded again for each group"


def test_plan_counts_the_room_of_checkpoints_and_of_the_export() -> None:
    plan = llama()
    assert plan.space.export_bytes == 2 * plan.num_parameters
    assert plan.as_dict()["export_bytes"] == plan.space.export_bytes
    assert plan.space.needed_bytes(2) == 3 * plan.space.checkpoint_bytes


def test_plan_that_spills_says_what_each_number_of_generations_takes() -> None:
    plan = llama(SLOW, gpu=MIB, ram=5 * MIB // 2)
    one, speculative, saved, both = plan.generation_bytes.values()
    assert one == plan.placement.state_bytes[Tier.NVME]
    assert saved == 2 * one
    assert 2 * both == 3 * speculative
    assert speculative >= saved  # RAM takes fewer other kinds beside two weight planes
    resident = plan.placement.state_bytes[Tier.GPU] + plan.placement.state_bytes[Tier.RAM]
    assert plan.savepoint_bytes == resident < plan.space.checkpoint_bytes
    assert plan.savepoint_seconds == checkpoint_seconds(resident, 0, SLOW.drives)


def test_plan_that_does_not_spill_has_no_generations() -> None:
    assert llama().generation_bytes == {}


def test_plan_that_does_not_fit_says_what_is_short() -> None:
    with pytest.raises(PlanError, match=r"tiers\.nvme"):
        llama(gpu=MIB, ram=2 * MIB, nvme=MIB)


def test_plan_recompute_takes_longer_than_keeping() -> None:
    def seconds(activations: str) -> float:
        config = run_config(TrainConfig(batch=BATCH, activations=activations))  # type: ignore[arg-type]
        return make_plan(elsewhere(config, RATES, budgets(), compiles=False)).compute_seconds

    assert seconds("keep") < seconds("recompute") == seconds("offload")


def test_plan_with_products_in_fp8_saves_less_and_computes_as_fast_as_was_measured() -> None:
    config = run_config(TrainConfig(batch=8), saved_share=1.0)
    in_fp8 = config.changed({"numerics.products": "fp8"})
    plain, assumed = (Trial.of(elsewhere(each, RATES)) for each in (config, in_fp8))
    assert assumed.activations.saved < plain.activations.saved
    assert assumed.compute_seconds < plain.compute_seconds

    # Products of layers alone take half as long; attention, head and loss take what they took.
    fast = replace(RATES, fp8_flops_per_s=2 * RATES.flops_per_s)
    measured = Trial.of(elsewhere(in_fp8, fast))
    layer = [("model.layers.0", phase) for phase in Phase]
    assert all(plain.seconds[use] / 2 < measured.seconds[use] < plain.seconds[use] for use in layer)
    assert measured.seconds["lm_head", Phase.FORWARD] == plain.seconds["lm_head", Phase.FORWARD]
    assert Trial.of(elsewhere(config, fast)).seconds == plain.seconds


def test_plan_of_experts_in_fp8_saves_a_row_once_and_counts_their_rate() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "output_router_logits": False}
    settings: dict[str, Any] = {"config": {**LLAMA, "model_type": "qwen3_moe", **experts}, "saved_share": 1.0}
    config = run_config(TrainConfig(batch=8), **settings)
    fast = replace(RATES, fp8_flops_per_s=2 * RATES.flops_per_s)
    in_fp8 = config.changed({"numerics.products": "fp8"})
    without = in_fp8.changed({"numerics.products_except": ["*.experts"]})
    plain, some, found = (Trial.of(elsewhere(each, fast)) for each in (config, without, in_fp8))
    forward = "model.layers.0", Phase.FORWARD
    assert plain.seconds[forward] > some.seconds[forward] > found.seconds[forward] > plain.seconds[forward] / 2

    # Of 4 copies of a row, in two bytes, one is left, in one byte; rows inside of experts have half its width.
    assert found.activations.saved < some.activations.saved < plain.activations.saved

    # A second slice rounds the stacks once more.
    sliced = [
        Trial.of(elsewhere(each.changed({"train.slices": 2}), fast)).seconds[forward] for each in (in_fp8, without)
    ]
    num_bytes = ROUNDED_BYTES[Phase.FORWARD] * 8 * 3 * 32 * LLAMA["hidden_size"]
    assert sliced[0] - found.seconds[forward] == pytest.approx(
        num_bytes / fast.gpu_update_parameters_per_s / UPDATE_BYTES
    )
    assert sliced[1] == some.seconds[forward]


def test_plan_of_frozen_layers_in_fp8_spares_what_their_gradients_would_take() -> None:
    settings: dict[str, Any] = {"frozen": ("*", "!model.embed_tokens")}
    config = run_config(TrainConfig(batch=8), **settings)
    fast = replace(RATES, fp8_flops_per_s=2 * RATES.flops_per_s)
    plain = Trial.of(elsewhere(config, fast))
    found = Trial.of(elsewhere(config.changed({"numerics.products": "fp8"}), fast))
    forward, backward = (
        plain.seconds["model.layers.0", phase] - found.seconds["model.layers.0", phase] for phase in Phase
    )
    # Of the backward's two products for each of the forward's, one is left, and what is computed again.
    assert 1 <= backward / forward < 1.1


def test_plan_of_offload_waits_for_links_that_are_slower_than_compute() -> None:
    slow = replace(RATES, to_gpu_bytes_per_s=1e5, to_ram_bytes_per_s=1e5)
    made = {}
    for activations in ("recompute", "offload"):
        config = run_config(TrainConfig(batch=BATCH, activations=activations))
        model = skeleton_of(config.model)
        made[activations] = make_plan(
            elsewhere(config, slow, budgets(gpu=64 * MIB), compiles=False, model=model)
        ).forecast
    num_bytes = made["offload"].moved_bytes["gpu_to_ram"]
    assert num_bytes == LLAMA["num_hidden_layers"] * BATCH * TOKENS * LLAMA["hidden_size"] * 2
    assert made["offload"].moved_bytes == {"gpu_to_ram": num_bytes, "ram_to_gpu": num_bytes}
    # Out in the forward, then back in the backward.
    assert made["offload"].seconds - made["recompute"].seconds == pytest.approx(2 * num_bytes / 1e5, rel=0.05)


def test_checkpoint_seconds_are_those_of_the_bytes_that_the_first_drive_moves() -> None:
    drives = [
        DriveRates(directory="/mnt/a", read_bytes_per_s=3e9, write_bytes_per_s=2e9, mixed_bytes_per_s=2.5e9),
        DriveRates(directory="/mnt/b", read_bytes_per_s=9e9, write_bytes_per_s=9e9, mixed_bytes_per_s=9e9),
    ]
    assert checkpoint_seconds(12_000_000_000, 0, drives) == 6
    assert checkpoint_seconds(12_000_000_000, 8_000_000_000, drives) == 8
    assert checkpoint_seconds(12_000_000_000, 0, []) is None


def test_checkpoint_seconds_are_of_files_that_were_never_written_before() -> None:
    drives = [
        DriveRates(
            directory="/mnt/a",
            read_bytes_per_s=3e9,
            write_bytes_per_s=2e9,
            mixed_bytes_per_s=2.5e9,
            first_write_bytes_per_s=1e9,
        )
    ]
    assert checkpoint_seconds(12_000_000_000, 0, drives) == 12
    assert checkpoint_seconds(12_000_000_000, 8_000_000_000, drives) == 12
    assert checkpoint_seconds(12_000_000_000, 28_000_000_000, drives) == 16


def test_pause_seconds_are_those_that_a_step_leaves_of_the_writing() -> None:
    step = Forecast(
        seconds=10.0,
        busy_seconds={},
        alone_seconds={"compute": 9.0, "nvme_to_ram": 3.0, "ram_to_nvme": 4.0},
        moved_bytes={},
        spans=(),
    )
    assert pause_seconds(2.0, step) == 0
    assert pause_seconds(8.0, step) == 5
    busy = Forecast(
        seconds=10.0, busy_seconds={}, alone_seconds={"nvme_to_ram": 6.0, "ram_to_nvme": 6.0}, moved_bytes={}, spans=()
    )
    assert pause_seconds(8.0, busy) == 8


def test_plan_as_dict_is_json_and_its_events_cover_compute() -> None:
    plan = llama()
    read = json.loads(json.dumps(plan.as_dict()))
    assert read["tokens_per_step"] == BATCH * TOKENS
    assert set(read["homes"].values()) <= {"gpu", "ram", "nvme"}
    assert {event.lane for event in plan.events()} >= {"compute"}
    assert Kind.WEIGHT in {kind for _, kind in plan.state_bytes}


def test_plan_counts_a_tied_head_once() -> None:
    def seconds(tied: bool) -> float:
        config = run_config(config=LLAMA | {"tie_word_embeddings": tied})
        return make_plan(elsewhere(config, RATES, budgets(), compiles=False)).compute_seconds

    assert seconds(True) == pytest.approx(seconds(False))
