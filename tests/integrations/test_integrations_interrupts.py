"""megatier.stream, interrupted anywhere: state of one step, or an error that says it is not, until it is loaded."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupted
from tiny_runs import PLACES, exactness_config, opened, random_groups
from torch import Tensor

from megatier.config.schema import NumericsConfig, TrainConfig
from megatier.errors import CheckpointError, StreamedModelError, TornStateError
from megatier.integrations.streamed import Streamed
from megatier.session import filling
from megatier.store.queue import Queue

PLACES_INTERRUPTED = (
    "play",
    "store",
    "drives",
    "engine/gradient",
    "integrations/streamed",
    "integrations/stream_steps",
)
TRAIN = TrainConfig(steps=6, batch=6, groups=1, clip=0.5, weight_decay=0.1, learning_rate=1e-2)
PLACES_OF_RESTORE = (*PLACES_INTERRUPTED, "session", "checkpoint", "integrations", "optim/masters", "consistency")
LAST = 4
TRIES = pytest.mark.parametrize("tries", [4, pytest.param(20, marks=pytest.mark.slow)])
"""At how many places a test interrupts, or at three times as many."""


@contextlib.contextmanager
def streamed_on(place: str, mount: Path) -> Iterator[Streamed]:
    config, numerics = exactness_config("tied"), NumericsConfig()
    with (
        opened(config, mount, PLACES[place], TRAIN, numerics=numerics, fused_loss=True, seed=None) as session,
        Streamed(session, contextlib.ExitStack()) as streamed,
    ):
        streamed.model.train()
        yield streamed


def step(streamed: Streamed, number: int) -> None:
    torch.manual_seed(number)
    streamed.model(**random_groups(TRAIN, 160, number)[0]).loss.backward()
    streamed.optimizer.step()


def work(streamed: Streamed) -> None:
    """Two steps behind a checkpoint: updates that a pass submits, and some that a drain does."""
    step(streamed, 3)
    streamed.state_dict()
    step(streamed, 4)
    streamed.model(**random_groups(TRAIN, 160, 5)[0])
    streamed.abandon()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


class Histories:
    """What a model comes to by each number of steps, with a checkpoint after the second."""

    def __init__(self, streamed: Streamed, folder: Path) -> None:
        self.folder, self.after = folder, [streamed.state_dict()]
        for number in range(1, LAST + 1):
            step(streamed, number)
            self.after.append(streamed.state_dict())
            if number == 2:
                streamed.save(folder)

    def check(self, streamed: Streamed) -> bool:
        """After an interrupt the state is that of one step, or torn until it is loaded; returns whether it was torn."""
        streamed.abandon()
        try:
            found = streamed.state_dict()
        except TornStateError:
            for call in (streamed.state_dict, lambda: step(streamed, 3), lambda: streamed.save(self.folder)):
                with pytest.raises(TornStateError, match="Load all of it"):
                    call()
            is_torn = True
        else:
            assert same(found, self.after[streamed.steps]), "state of several steps, or of another one than it counts"
            is_torn = False
        streamed.restore(self.folder)
        assert same(streamed.state_dict(), self.after[2])
        step(streamed, 3)
        step(streamed, 4)
        assert same(streamed.state_dict(), self.after[4])
        return is_torn


@contextlib.contextmanager
def interrupted_submit(patch: pytest.MonkeyPatch, at: int) -> Iterator[list[int]]:
    """The so-manieth submission of this thread is interrupted: the odd ones when all but its end is done."""
    submit, thread, count = Queue.submit, threading.get_ident(), [0]

    def submitted(self: Queue, *arguments: Any, **named: Any) -> object:
        if threading.get_ident() != thread:
            return submit(self, *arguments, **named)
        count[0] += 1
        if count[0] - 1 == at and not at % 2:
            raise KeyboardInterrupt
        transfer = submit(self, *arguments, **named)
        if count[0] - 1 == at:
            raise KeyboardInterrupt
        return transfer

    with patch.context() as inside:
        inside.setattr(Queue, "submit", submitted)
        yield count


@TRIES
@pytest.mark.parametrize("place", ["gpu_ram_nvme", "ram_streamed", "nvme_twice"])
def test_interrupt_while_updates_are_submitted_is_said_until_state_is_loaded(
    place: str, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed_on(place, tmp_path) as streamed:
        histories = Histories(streamed, tmp_path / "saved")
        streamed.restore(tmp_path / "saved")
        with interrupted_submit(monkeypatch, -1) as count:
            work(streamed)
        torn = []
        for at in range(0, count[0], max(1, count[0] // tries)):
            streamed.restore(tmp_path / "saved")
            with contextlib.suppress(KeyboardInterrupt), interrupted_submit(monkeypatch, at):
                work(streamed)
            torn.append(histories.check(streamed))
    assert any(torn)


@TRIES
@pytest.mark.parametrize("place", ["ram", "nvme_grads"])
def test_interrupt_at_any_line_leaves_a_step_or_is_said_until_state_is_loaded(
    place: str, tries: int, tmp_path: Path
) -> None:
    with streamed_on(place, tmp_path) as streamed:
        histories = Histories(streamed, tmp_path / "saved")
        streamed.restore(tmp_path / "saved")
        with interrupted(PLACES_INTERRUPTED) as lines:
            work(streamed)
        for at in range(0, lines.count, max(1, lines.count // tries)):
            streamed.restore(tmp_path / "saved")
            with contextlib.suppress(KeyboardInterrupt), interrupted(PLACES_INTERRUPTED, at):
                work(streamed)
            histories.check(streamed)


def test_backward_that_is_interrupted_at_its_end_is_no_whole_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every unit has had its backward then, and the last one's gradient has not been handed over."""
    with streamed_on("ram", tmp_path) as streamed:
        step(streamed, 1)
        before = streamed.state_dict()
        loss = streamed.model(**random_groups(TRAIN, 160, 2)[0]).loss
        gradients = streamed._engine.model.stage.gradients
        ship = gradients._submit
        units = len(gradients._layouts)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            left = iter(range(units - 1, -1, -1))

            def interrupt(unit: str) -> None:
                if not next(left):
                    raise KeyboardInterrupt
                ship(unit)

            patch.setattr(gradients, "_submit", interrupt)
            loss.backward()
        with pytest.raises(StreamedModelError, match="0 of 1 backwards"):
            streamed.optimizer.step()
        streamed.abandon()
        assert same(streamed.state_dict(), before)


@pytest.mark.parametrize("was_torn", [False, True])
def test_restore_that_fails_half_way_tears_the_state_and_mends_none(
    was_torn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed_on("ram", tmp_path) as streamed:
        step(streamed, 1)
        streamed.save(tmp_path / "saved")
        saved = streamed.state_dict()
        step(streamed, 2)
        streamed._session.store.consistency.is_torn = was_torn
        # Threads fill, and this one ends what they have filled of each unit.
        share, left = streamed._session.filling._share, iter((1, 1, 0))

        def interrupt(*arguments: Any, **options: Any) -> None:
            share(*arguments, **options)
            if not next(left):
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(streamed._session.filling, "_share", interrupt)
            streamed.restore(tmp_path / "saved")
        with pytest.raises(TornStateError):
            streamed.state_dict()
        streamed.restore(tmp_path / "saved")
        assert same(streamed.state_dict(), saved)


@TRIES
@pytest.mark.parametrize(("place", "is_torn"), [("ram", True), ("gpu_ram_nvme", False)])
def test_restore_interrupted_at_any_line_leaves_what_was_or_is_said(
    place: str, is_torn: bool, tries: int, tmp_path: Path
) -> None:
    """Lines of a restore of whole state, and of one that mends, are tried at random."""
    with streamed_on(place, tmp_path) as streamed:
        histories = Histories(streamed, tmp_path / "saved")
        consistency = streamed._session.store.consistency
        with interrupted(PLACES_OF_RESTORE) as lines:
            streamed.restore(tmp_path / "saved")
        told = []
        for at in sorted(random.Random(f"{place} {is_torn}").sample(range(lines.count), 3 * tries)):
            if streamed.steps == 2:
                step(streamed, 3)
                streamed.state_dict()
            consistency.is_torn = is_torn
            with contextlib.suppress(KeyboardInterrupt), interrupted(PLACES_OF_RESTORE, at):
                streamed.restore(tmp_path / "saved")
            try:
                assert same(streamed.state_dict(), histories.after[streamed.steps])
            except TornStateError:
                told.append(at)
                streamed.restore(tmp_path / "saved")
                assert same(streamed.state_dict(), histories.after[2])
        assert told


def test_restore_interrupted_in_a_wait_is_said_though_the_wait_is_harmless_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region around the wait for the threads that fill has some of its planes written."""
    with streamed_on("nvme_grads", tmp_path) as streamed:
        histories = Histories(streamed, tmp_path / "saved")
        wait, left = filling._wait, iter([1, 1, 0])

        def interrupt(*arguments: Any) -> None:
            wait(*arguments)
            if not next(left):
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(filling, "_wait", interrupt)
            streamed.restore(tmp_path / "saved")
        assert histories.check(streamed)


def test_loading_that_is_refused_before_it_begins_leaves_whole_state(tmp_path: Path) -> None:
    with streamed_on("ram", tmp_path) as streamed:
        histories = Histories(streamed, tmp_path / "saved")
        (checkpoint,) = (tmp_path / "saved").glob("step-*")
        metadata = next((checkpoint / "params").glob("*/zarr.json"))
        text = metadata.read_text()
        metadata.write_text(text.replace("float32", "float64"))
        with pytest.raises(CheckpointError):
            streamed.restore(tmp_path / "saved")
        assert same(streamed.state_dict(), histories.after[LAST])
        metadata.write_text(text)
        assert not histories.check(streamed)
