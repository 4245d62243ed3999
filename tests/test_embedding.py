"""The Python of the documents runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["docs/embedding.md", "docs/trainers.md", "README.md"])
def test_python_of_a_document_runs_as_it_stands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "docs/trainers.md":
        pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((ROOT / name).read_text())
    assert blocks
    names: dict[str, object] = {"__name__": name}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
