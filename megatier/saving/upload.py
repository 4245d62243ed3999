"""Uploads an exported model to the Hugging Face hub, by its own library and with the token that this finds.

The hub is asked who is there before a run begins, because a run of days must not find out at its end that nobody is
logged in. The model lies in its folder whatever becomes of the upload.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from rich.console import Console

from megatier.errors import ConfigError, UploadError
from megatier.foreign import reason_of
from megatier.report.console import say

REFUSED_STATUSES = (401, 403)
"""What the hub answers to a token that it does not take."""


def check_login(console: Console, setting: str) -> None:
    """Refuse to begin what ends with an upload if nobody is logged in to the hub.

    If the hub cannot be reached now, a person is told so, and the upload is tried all the same.

    Args:
        console: what a person sees.
        setting: what asks for the upload.

    Raises:
        ConfigError: there is no token, the hub does not take it, or the hub is not to be asked.
    """
    try:
        huggingface_hub.HfApi().whoami()
    except LocalTokenNotFoundError as error:
        raise ConfigError(
            f"{setting}: nobody is logged in to the hub. Run `hf auth login`, or set HF_TOKEN."
        ) from error
    except OfflineModeIsEnabled as error:
        raise ConfigError(f"{setting}: HF_HUB_OFFLINE is set. Unset it, or upload later by `hf upload`.") from error
    except HfHubHTTPError as error:
        if error.response.status_code in REFUSED_STATUSES:
            raise ConfigError(
                f"{setting}: the hub does not take this token ({reason_of(error)}). Run `hf auth login` again."
            ) from error
        say(console, _describe_unreached(error))
    except Exception as error:  # noqa: BLE001 - whatever the network's libraries raise; the run needs no network
        say(console, _describe_unreached(error))


def _describe_unreached(error: Exception) -> str:
    return f"the hub cannot be reached ({reason_of(error)}). The upload is tried when the model is written."


def upload(console: Console, folder: Path, repository: str, *, private: bool) -> None:
    """Upload a folder, and say where it is now.

    Args:
        console: what a person sees.
        folder: the exported model or adapters.
        repository: owner/name. It is made if it is not there.
        private: whether a new one is private. One that is there stays as it is.

    Raises:
        UploadError: it failed. Says the command that uploads again.
    """
    api = huggingface_hub.HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name} by megatier")
    except Exception as error:
        visibility = "--private" if private else "--no-private"
        command = ["hf", "upload", repository, str(folder), ".", visibility]
        raise UploadError(str(folder), repository, reason_of(error), shlex.join(command)) from error
    say(console, f"uploaded to {url}")
