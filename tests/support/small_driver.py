"""A CUDA driver that pins little RAM, as those of WSL and of containers do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


class SmallDriver:
    """A stand-in for the CUDA driver, which pins a few bytes at once, and so many in all."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815 - CUDA's name

    def __init__(self, most_at_once: int, most: int) -> None:
        self.most_at_once = most_at_once
        self.most = most
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:  # noqa: N802
        if num_bytes > self.most_at_once or sum(self.locked.values()) + num_bytes > self.most:
            return 2
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if self.locked.pop(address, None) else 1

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return f"error {code}"


def check_codes_alone(patch: pytest.MonkeyPatch) -> None:
    """Fail for every code of an error, without a driver, which torch's own check asks."""
    patch.setattr(torch.cuda, "check_error", lambda code: pytest.fail(f"error {code}") if code else None)
