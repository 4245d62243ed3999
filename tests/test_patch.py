from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatier.patch import patched


def test_exchanged_names_after_an_error_have_what_they_had_or_nothing() -> None:
    held = SimpleNamespace(kept=1)
    with pytest.raises(ArithmeticError), patched(vars(held), kept=2, new=3):
        assert (held.kept, held.new) == (2, 3)
        raise ArithmeticError
    assert vars(held) == {"kept": 1}


def test_exchanged_name_of_a_class_is_seen_again_afterwards() -> None:
    class Owner:
        value = 1

    owner = Owner()
    with patched(vars(owner), value=2, held=3):
        assert owner.value == 2
    assert owner.value == 1
    assert not vars(owner)


def test_exchanged_twice_in_one_place_ends_with_the_first_value() -> None:
    held: dict[str, object] = {"name": 1}
    with patched(held, name=2), patched(held, name=3):
        assert held == {"name": 3}
    assert held == {"name": 1}
