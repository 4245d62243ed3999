"""Values as text: sizes with units, and mounts."""

from __future__ import annotations

import pytest

from megatier.config.values import parse_bytes, parse_mount
from megatier.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("96GiB", 96 << 30),
        ("500 MB", 500_000_000),
        ("4096", 4096),
        ("1.5g", 3 << 29),
        (" 2TiB ", 2 << 40),
        ("7B", 7),
        ("1e9", 10**9),
    ],
)
def test_parse_bytes_units_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e999", "5 bananas", "1,000", "9" * 5000, "9" * 400 + ".5"])
def test_parse_bytes_other_text_raises(text: str) -> None:
    with pytest.raises(ConfigError, match="no byte size"):
        parse_bytes(text)


def test_parse_mount_without_directory_raises() -> None:
    with pytest.raises(ConfigError, match="DIR or DIR:SIZE"):
        parse_mount(":3GiB")
