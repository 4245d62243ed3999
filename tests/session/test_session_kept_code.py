"""Compiled code is kept where it outlives the machine's start, and where nobody else may put any."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import PLACES, exactness_config, opened
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from megatier.config.schema import TrainConfig
from megatier.session.kept_code import VARIABLE, keep_code


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This user's caches, and nothing that says where code is kept."""
    monkeypatch.setenv(VARIABLE, "")  # so that what is set here is taken back
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatier"


@pytest.mark.usefixtures("traced")
def test_compiled_session_keeps_code_in_a_private_directory_of_the_users_caches(cache: Path, tmp_path: Path) -> None:
    train = TrainConfig(batch=2, groups=1)
    with opened(exactness_config("plain"), tmp_path, PLACES["gpu"], train, compile=False):
        assert VARIABLE not in os.environ
    with opened(exactness_config("plain"), tmp_path, PLACES["gpu"], train, compute_dtype="fp32", compile=True):
        assert os.environ[VARIABLE] == str(cache / "compiled")
    assert stat.S_IMODE((cache / "compiled").stat().st_mode) == 0o700

    # torch goes by it.
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert cache_dir() == str(cache / "compiled")


def test_code_is_kept_elsewhere_than_in_the_place_that_torch_sets_itself(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, default_cache_dir())
    keep_code()
    assert os.environ[VARIABLE] == str(cache / "compiled")


def test_code_is_kept_where_the_user_says(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/somewhere")
    keep_code()
    assert os.environ[VARIABLE] == "/somewhere"
    assert not cache.exists()


def test_code_is_kept_by_an_absolute_path_in_the_home_without_other_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    keep_code()
    assert os.environ[VARIABLE] == str(tmp_path / "home/.cache/megatier/compiled")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "near")
    keep_code()
    assert os.environ[VARIABLE] == str(tmp_path / "near/megatier/compiled")


def open_to_others(cache: Path) -> None:
    (cache / "compiled").mkdir(parents=True)
    (cache / "compiled").chmod(0o777)


def readable(cache: Path) -> None:
    (cache / "compiled").mkdir(parents=True)
    (cache / "compiled").chmod(0o755)


def linked(cache: Path) -> None:
    (cache / "elsewhere").mkdir(parents=True, mode=0o700)
    (cache / "compiled").symlink_to(cache / "elsewhere")


def a_file(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "compiled").write_text("")


def in_a_file(cache: Path) -> None:
    cache.parent.write_text("")


def below_what_all_may_write(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)


@pytest.mark.parametrize("prepare", [open_to_others, readable, linked, a_file, in_a_file, below_what_all_may_write])
def test_code_is_not_kept_where_others_may_put_some(prepare: Callable[[Path], None], cache: Path) -> None:
    prepare(cache)
    with pytest.warns(UserWarning, match=f"compiled code may have to be .* cannot use .*{VARIABLE}") as caught:
        keep_code()
    assert caught[0].filename == __file__
    assert VARIABLE not in os.environ
