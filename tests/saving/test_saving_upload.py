"""Uploads to the hub: refused before a run without a login, private, and losing nothing when they fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from small_commands import command

from megatier.cli import main
from megatier.config.output_section import OutputConfig
from megatier.errors import ConfigError

NAME = "somebody/some-model_1.0"


class StandInHub:
    """The library's client, and what it was told.

    Attributes:
        refusal: what `whoami` raises.
        failure: what `upload_folder` raises.
    """

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self.failure: Exception | None = None
        self.repositories: dict[str, bool] = {}
        self.files: dict[str, set[str]] = {}

    def whoami(self) -> dict[str, str]:
        """Say who is logged in."""
        if self.refusal is not None:
            raise self.refusal
        return {"name": "somebody"}

    def create_repo(self, repository: str, *, private: bool, exist_ok: bool) -> str:
        """Make a repository."""
        assert exist_ok
        self.repositories.setdefault(repository, private)
        return f"https://hub/{repository}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        """Take a folder."""
        assert commit_message
        if self.failure is not None:
            raise self.failure
        self.files[repo_id] = {path.name for path in folder_path.iterdir()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> StandInHub:
    found = StandInHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    return found


def test_model_of_a_run_is_uploaded_to_a_private_repository(
    hub: StandInHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, {"output.push_to_hub": NAME})) == 0
    assert hub.repositories == {NAME: True}
    assert hub.files == {NAME: {path.name for path in (tmp_path / "run" / "model").iterdir()}}
    assert f"uploaded to https://hub/{NAME}" in capsys.readouterr().out


def test_new_repository_is_public_if_it_is_asked_for(hub: StandInHub, tmp_path: Path) -> None:
    settings = {"output.push_to_hub": NAME, "output.hub_private_repo": False, "output.checkpoint_every": 3}
    assert main(command(tmp_path, settings)) == 0
    assert hub.repositories == {NAME: False}

    run = str(tmp_path / "run")
    assert main(["export", run, str(tmp_path / "a"), "--push-to-hub", "somebody/a"]) == 0
    assert main(["export", run, str(tmp_path / "b"), "--push-to-hub", "somebody/b", "--public"]) == 0
    assert hub.repositories == {NAME: False, "somebody/a": True, "somebody/b": False}
    assert hub.files["somebody/a"] == hub.files[NAME]


def test_upload_that_fails_leaves_the_model_and_says_how_to_upload_it_again(
    hub: StandInHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.failure = RuntimeError("the connection was lost\nand more")
    assert main(command(tmp_path, {"output.push_to_hub": NAME})) == 2
    folder = tmp_path / "run" / "model"
    words = (
        f"the model is in {folder}, but its upload to {NAME} failed: the connection was lost. `hf upload {NAME} "
        f"{folder} . --private` uploads it again."
    )
    found = capsys.readouterr()
    assert words in found.err
    assert "model written to" in found.out
    assert (folder / "model.safetensors").is_file()


def answered(status: int) -> HfHubHTTPError:
    """The error of an answer of the hub."""
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError(f"{status} of the hub", response=response)


REFUSALS = [
    (LocalTokenNotFoundError("no token"), "nobody is logged in to the hub. Run `hf auth login`, or set HF_TOKEN."),
    (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set. Unset it, or upload later by `hf upload`."),
    (answered(401), "the hub does not take this token (401 of the hub). Run `hf auth login` again."),
]


@pytest.mark.parametrize(("refusal", "words"), REFUSALS, ids=["none", "offline", "wrong"])
def test_run_that_would_upload_is_refused_before_it_begins_if_nobody_is_logged_in(
    refusal: Exception, words: str, hub: StandInHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refusal = refusal
    assert main(command(tmp_path, {"output.push_to_hub": NAME})) == 2
    assert f"output.push_to_hub: {words}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("trouble", [answered(503), TimeoutError("no answer")], ids=["busy", "away"])
def test_hub_that_cannot_be_reached_before_a_run_is_tried_after_it(
    trouble: Exception, hub: StandInHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refusal = trouble
    assert main(command(tmp_path, {"output.push_to_hub": NAME})) == 0
    assert "The upload is tried when the model is written." in capsys.readouterr().out
    assert list(hub.files) == [NAME]


def test_export_that_would_upload_is_refused_before_it_writes_if_nobody_is_logged_in(
    hub: StandInHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, {"output.checkpoint_every": 3, "output.export": False})) == 0
    words = ["export", str(tmp_path / "run"), str(tmp_path / "model")]
    hub.refusal = LocalTokenNotFoundError("no token")
    assert main([*words, "--push-to-hub", NAME]) == 2
    assert "--push-to-hub: nobody is logged in to the hub" in capsys.readouterr().err
    assert main([*words, "--push-to-hub", "no owner"]) == 2
    assert "--push-to-hub is 'no owner'; it must be OWNER/NAME" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--public"])
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"push_to_hub": "name"}, r"push_to_hub is 'name'; it must be owner/name, or null"),
        ({"push_to_hub": "a/b/c"}, r"push_to_hub is 'a/b/c'"),
        ({"push_to_hub": NAME, "export": False}, r"push_to_hub is .* null without output\.export"),
        ({"hub_private_repo": False}, r"hub_private_repo is False; it must be true without output\.push_to_hub"),
    ],
)
def test_settings_of_an_upload_that_cannot_be_followed_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OutputConfig(**settings)


def test_library_itself_refuses_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    assert main(command(tmp_path, {"output.push_to_hub": NAME})) == 2
    assert not (tmp_path / "run").exists()
