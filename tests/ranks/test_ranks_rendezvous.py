"""How ranks find each other by a store: who is named if one of them does not come."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from megatier import _native
from megatier.errors import PeerError, StepAbandonedError
from megatier.ranks import rendezvous
from megatier.ranks.rendezvous import _meet

HANGS_S = 20.0
"""Seconds that a rank may wait in which it ought to give up."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """A store of a start in which ranks wait for a moment."""
    monkeypatch.setattr(rendezvous, "MEET_LIMIT_S", 0.5)
    return HashStore()


def error_of(store: HashStore, rank: int, size: int) -> Exception | None:
    """What ends the wait of a rank."""
    given_up = _native.Latch()
    timer = threading.Timer(HANGS_S, given_up.set)
    timer.start()
    try:
        _meet(store, rank, size, given_up)
    except (PeerError, StepAbandonedError) as error:
        return error
    finally:
        timer.cancel()
    return None


@pytest.mark.parametrize("left", [{}, {"megatier": "old", "old 1": "a", "old 2": "b", "old met": "a b"}])
def test_rank_whose_first_rank_does_not_come_names_it(left: dict[str, str], store: HashStore) -> None:
    for key, value in left.items():
        store.set(key, value)
    error = error_of(store, 1, 3)
    assert isinstance(error, PeerError)
    assert error.rank == 0
    assert "it has not come within" in str(error)


def test_ranks_of_which_one_does_not_come_all_name_it(store: HashStore) -> None:
    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(error_of, store, rank, 4) for rank in (0, 1, 2)]
        errors = [wait.result() for wait in waits]
    assert [isinstance(error, PeerError) and error.rank for error in errors] == [3, 3, 3]


def test_ranks_that_all_come_have_one_name(store: HashStore) -> None:
    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(_meet, store, rank, 3, _native.Latch()) for rank in range(3)]
        names = {wait.result() for wait in waits}
    assert len(names) == 1
