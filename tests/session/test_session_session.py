"""Sessions: weights in, state out, failures, and what is left when they close."""

from __future__ import annotations

import contextlib
import gc
import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from small_commands import leftovers
from small_setups import sections
from tiny_runs import (
    BATCH,
    PLACES,
    ModelWeights,
    Run,
    exactness_config,
    opened,
    plain_model,
    random_groups,
    read_parameters,
    read_unit,
    run_steps,
)
from torch import Tensor

from megatier.config.schema import ModelConfig, NumericsConfig, TiersConfig, TrainConfig
from megatier.errors import NonFiniteError, PlanError, TornStateError
from megatier.layout import Layout
from megatier.measure import probe
from megatier.models import deferred_init
from megatier.models.decoder import Unit, build_skeleton
from megatier.models.initialiser import Initialiser
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates import Rates
from megatier.session.session import Session
from megatier.setup.setup import Setup
from megatier.tier import Activations, Kind

STATE = (Kind.WEIGHT, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


def state_of(session: Session) -> dict[tuple[Kind, str], Tensor]:
    """Masters and moments by unit, also after a step whose updates were refused."""
    with contextlib.suppress(NonFiniteError, TornStateError):
        session.player.drain()
    return {(kind, unit.name): read_unit(session, unit, kind) for kind in STATE for unit in session.own_units}


def changed(before: dict[tuple[Kind, str], Tensor], after: dict[tuple[Kind, str], Tensor]) -> set[str]:
    """Units of which a bit is different."""
    bits = {key: (value.view(torch.int32), after[key].view(torch.int32)) for key, value in before.items()}
    return {key[1] for key, (first, second) in bits.items() if not torch.equal(first, second)}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("place", PLACES)
def test_load_any_place_holds_the_masters_bit_for_bit(place: str, dtype: str, tmp_path: Path) -> None:
    config = exactness_config("untied")
    plain = plain_model(config)
    train = Run(model="untied").train
    with opened(config, tmp_path, PLACES[place], train, source=ModelWeights(plain), compute_dtype=dtype) as session:
        found = read_parameters(session, Kind.WEIGHT)
        assert all(not moment.any() for moment in read_parameters(session, Kind.EXP_AVG).values())
    assert all(torch.equal(found[name], parameter) for name, parameter in plain.named_parameters())


class UnevenPieces:
    """A source whose pieces end anywhere but at the ends of chunks and tensors."""

    def __init__(self, source: ModelWeights, size: int) -> None:
        self._source, self._size = source, size

    def read(self, unit: Unit, shard: Layout | None = None) -> Iterator[tuple[int, Tensor]]:
        for start, values in self._source.read(unit, shard):
            for first in range(0, values.numel(), self._size):
                yield start + first, values[first : first + self._size]


@pytest.mark.parametrize("size", [1000, 32768, 50_000])
def test_load_pieces_of_any_size_give_the_same_masters(size: int, tmp_path: Path) -> None:
    config = exactness_config("untied")
    plain = plain_model(config)
    source = UnevenPieces(ModelWeights(plain), size)
    with opened(config, tmp_path, PLACES["nvme"], Run(model="untied").train, source=source) as session:
        found = read_parameters(session, Kind.WEIGHT)
    assert all(torch.equal(found[name], parameter) for name, parameter in plain.named_parameters())


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_load_first_weights_are_the_same_in_any_place_and_by_any_number_of_cores(
    place: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_init, "INIT_CHUNK_ELEMENTS", 700)
    monkeypatch.setattr("megatier.session.session.cores_usable", lambda: cores)
    monkeypatch.setattr("megatier.session.filling.CHUNK_ELEMENTS_MAX", 32_768)
    filled: list[str] = []
    with opened(exactness_config("untied"), tmp_path, PLACES[place], Run(model="untied").train) as session:
        source = Initialiser(session.model, 7)
        session.load(source, lambda unit: filled.append(unit.name))
        assert sorted(filled) == sorted(unit.name for unit in session.own_units)
        for unit in session.own_units:
            expected = torch.zeros(unit.layout.num_elements)
            for first, values in source.read(unit):
                expected[first : first + values.numel()] = values
            assert torch.equal(session.read_master(unit, 0, unit.layout.num_elements), expected)


def test_load_that_is_broken_off_tears_the_state(tmp_path: Path) -> None:
    def interrupt(_unit: Unit) -> None:
        raise KeyboardInterrupt

    with opened(exactness_config("untied"), tmp_path, PLACES["nvme"], Run(model="untied").train) as session:
        with pytest.raises(KeyboardInterrupt):
            session.load(Initialiser(session.model, 7), interrupt)
        with pytest.raises(TornStateError):
            session.store.consistency.check()


def test_read_master_part_is_that_part_of_the_whole(tmp_path: Path) -> None:
    with opened(exactness_config("untied"), tmp_path, PLACES["nvme"], Run(model="untied").train) as session:
        unit = session.own_units[0]
        whole = session.read_master(unit, 0, unit.layout.num_elements)
        assert torch.equal(session.read_master(unit, 32_000, 65_999), whole[32_000:65_999])


def test_evaluate_between_steps_leaves_every_bit(tmp_path: Path) -> None:
    train = Run(model="tied").train
    with opened(exactness_config("tied"), tmp_path, PLACES["ram_nvme"], train) as session:
        run_steps(session, train, 2)
        before = state_of(session)
        losses = [session.engine.evaluate(random_groups(train, 160, 9)) for _ in range(2)]
        assert losses[0] == losses[1]
        assert changed(before, state_of(session)) == set()


# ---------------------------------------------------------------------- numbers that are not finite


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("place", ["gpu", "gpu_ram_nvme"])
def test_step_with_a_loss_that_is_not_finite_changes_nothing(place: str, clip: float | None, tmp_path: Path) -> None:
    config = exactness_config("untied")
    plain = plain_model(config)
    plain.get_parameter("model.layers.1.mlp.down_proj.weight").data[3, 4] = float("inf")
    train = Run(model="untied", clip=clip).train
    with opened(config, tmp_path, PLACES[place], train, source=ModelWeights(plain)) as session:
        before = state_of(session)
        with pytest.raises(NonFiniteError, match=r"the loss of step 1 .* a weight of unit model\.layers\.1 "):
            run_steps(session, train, 1)
        assert changed(before, state_of(session)) == set()


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("place", ["gpu", "ram", "nvme"])
def test_step_with_a_gradient_that_is_not_finite_overwrites_no_unit_it_belongs_to(
    place: str, clip: float | None, groups: int, tmp_path: Path
) -> None:
    """With clipping nothing changes; without, and unguarded, units behind it in the backward were updated already."""
    train = Run(model="untied", clip=clip, groups=groups).train
    with opened(exactness_config("untied"), tmp_path, PLACES[place], train) as session:
        run_steps(session, train, 2)
        before = state_of(session)
        spoil(session, "model.layers.1")
        [batch, *rest] = random_groups(train, 2112, 3)
        with pytest.raises(NonFiniteError, match=r"step 3.*gradient of model\.layers\.1\."):
            session.engine.train_step(3, 1e-2, [batch, *rest])
        found = changed(before, state_of(session))
    behind = {"model.norm", "lm_head"}
    assert found == (set() if clip is not None else behind)


def spoil(session: Session, unit: str) -> None:
    """From now on, a unit's gradient has an infinity."""
    gradients = session.engine.model.stage.gradients
    add = gradients.add

    def spoilt(name: str, parts: Sequence[tuple[str, Tensor | None]]) -> None:
        if name == unit:
            first, grad = parts[0]
            assert grad is not None
            parts = [(first, grad.index_fill(0, torch.tensor([2]), float("inf"))), *parts[1:]]
        add(name, parts)

    gradients.__dict__["add"] = spoilt


# ---------------------------------------------------------------------- opening


@pytest.mark.parametrize("compiles", [True, False])
def test_seal_imports_the_compiler_only_where_layers_are_compiled(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing: list[str] = []
    monkeypatch.setattr(
        "megatier.session.session.import_compiler", lambda: importing.append(threading.current_thread().name)
    )
    model = ModelConfig(config={"model_type": "llama"}, compile=compiles, compute_dtype="fp32")
    tiers = TiersConfig(device="cpu", gpu=16 << 20, ram=16 << 20)
    config = sections(model, tiers, TrainConfig(), NumericsConfig(), 16)
    with Session(Setup.here(config, build_skeleton(exactness_config("tied"), "sdpa"))) as session:
        assert not importing
        session.seal()
    assert importing == ["megatier-compiler_0"] * compiles


# ---------------------------------------------------------------------- closing


def test_close_in_the_middle_of_a_step_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    train = Run(model="tied").train
    before = threading.active_count()
    with (
        pytest.raises(RuntimeError, match="stop here"),
        opened(exactness_config("tied"), tmp_path, PLACES["ram_nvme"], train) as session,
    ):
        run_steps(session, train, 3)
        session.model.model.layers[2].register_forward_pre_hook(stop)
        run_steps(session, train, 1)
    assert threading.active_count() == before
    assert list(leftovers(tmp_path)) == []


def test_exit_in_which_telling_the_other_ranks_is_interrupted_closes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Told:
        """Ranks that are told of a failure until an interrupt."""

        def fail(self, error: BaseException) -> None:
            raise KeyboardInterrupt

    before = threading.active_count()
    with (
        pytest.raises(KeyboardInterrupt),
        opened(exactness_config("tied"), tmp_path, PLACES["ram_nvme"], Run(model="tied").train) as session,
    ):
        monkeypatch.setattr(session, "ranks", Told())
        raise RuntimeError("a reason")
    assert threading.active_count() == before
    assert list(leftovers(tmp_path)) == []


def stop(*_: object) -> None:
    raise RuntimeError("stop here")


def test_open_that_is_refused_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    config = exactness_config("tied")
    skeleton = build_skeleton(config, "sdpa")
    before = threading.active_count()
    tiers = TiersConfig(device="cpu", gpu=1, ram=1, nvme=(f"{tmp_path}:16MiB",))
    with pytest.raises(PlanError):
        Session(
            Setup.here(
                sections(ModelConfig(config={"model_type": "llama"}), tiers, TrainConfig(), NumericsConfig(), 16),
                skeleton,
            )
        )
    assert threading.active_count() == before
    assert list(leftovers(tmp_path)) == []


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_session_kept_layers_change_no_bit(activations: str, tmp_path: Path) -> None:
    outcomes = []
    for kept_layers in (0, 1, 9):
        train = TrainConfig(steps=3, batch=BATCH, activations=activations, kept_layers=kept_layers)  # type: ignore[arg-type]
        with opened(exactness_config("untied"), tmp_path, PLACES["ram_nvme"], train) as session:
            kept = [n.unit for n in session.engine.model.nodes if n.activations is Activations.KEEP]
            assert kept == ["model.layers.1", "model.layers.0"][:kept_layers][::-1]
            results = [session.engine.train_step(s, 1e-2, random_groups(train, 2112, s)) for s in (1, 2, 3)]
            outcomes.append([(result.loss, result.grad_norm) for result in results])
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize(("asked", "found", "taken"), [(None, None, 4), (None, 8, 8), (2, 8, 2)])
def test_session_takes_as_many_io_threads_as_were_measured(
    asked: int | None, found: int | None, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Rates(
        drives=(
            DriveRates(
                directory="a", read_bytes_per_s=9e9, write_bytes_per_s=9e9, mixed_bytes_per_s=9e9, io_threads=found
            ),
        ),
        to_gpu_bytes_per_s=1e9,
        to_ram_bytes_per_s=1e9,
        update_parameters_per_s=1e9,
        memory_bytes_per_s=1e9,
        gpu_update_parameters_per_s=1e9,
        flops_per_s=1e12,
    )
    monkeypatch.setattr(probe, "cached_rates", lambda *arguments: rates if found else None)
    tiers = TiersConfig(
        device="cpu", gpu=1 << 20, ram=8 << 20, nvme=(f"{tmp_path}:16MiB",), state=("nvme",), io_threads=asked
    )
    skeleton = build_skeleton(exactness_config("tied"), "sdpa")
    model = ModelConfig(config={"model_type": "llama"})
    with Session(Setup.here(sections(model, tiers, TrainConfig(), NumericsConfig(), 16), skeleton)) as session:
        assert session.store.files is not None
        assert session.store.files.options.num_threads == session.io_threads[0] == taken
        assert session.io_threads[1].startswith(
            "as set" if asked else "as `megatier bench`" if found else "the default"
        )


def test_session_stripes_by_the_rates_that_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drives = tuple(
        DriveRates(directory=name, read_bytes_per_s=9e9, write_bytes_per_s=9e9, mixed_bytes_per_s=rate)
        for name, rate in (("a", 6e9), ("b", 2e9))
    )
    asked = []

    def measured(directories: Sequence[Path], device: str) -> Rates:
        asked.append((list(directories), device))
        return Rates(
            drives=drives,
            to_gpu_bytes_per_s=1e9,
            to_ram_bytes_per_s=1e9,
            update_parameters_per_s=1e9,
            memory_bytes_per_s=1e9,
            gpu_update_parameters_per_s=1e9,
            flops_per_s=1e12,
        )

    monkeypatch.setattr(probe, "cached_rates", measured)
    for name in "ab":
        (tmp_path / name).mkdir()
    mounts = tuple(f"{tmp_path / name}:16MiB" for name in "ab")
    tiers = TiersConfig(device="cpu", gpu=1 << 20, ram=8 << 20, nvme=mounts, state=("nvme",))
    skeleton = build_skeleton(exactness_config("tied"), "sdpa")
    model = ModelConfig(config={"model_type": "llama"})
    with Session(Setup.here(sections(model, tiers, TrainConfig(), NumericsConfig(), 16), skeleton)) as session:
        files = session.store.files
        assert files is not None
        assert files.options.shares == (6e9, 2e9)
    assert asked == [([tmp_path / "a", tmp_path / "b"], "cpu")]


@pytest.mark.parametrize("place", ["gpu", "nvme"])
def test_closed_session_has_given_its_memory_back_though_the_model_lives_on(place: str, tmp_path: Path) -> None:
    def mappings() -> dict[int, weakref.ref[mmap.mmap]]:
        return {id(found): weakref.ref(found) for found in gc.get_objects() if type(found) is mmap.mmap}

    gc.collect()
    gc.disable()
    try:
        before, run = mappings().keys(), Run(model="untied")
        with opened(exactness_config("untied"), tmp_path, PLACES[place], run.train) as session:
            run_steps(session, run.train)
            arenas = [mapping for key, mapping in mappings().items() if key not in before]
        assert arenas
        assert [arena for arena in arenas if arena() is not None] == []
        assert session.model.training
    finally:
        gc.enable()
