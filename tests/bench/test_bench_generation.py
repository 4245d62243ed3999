"""The measurement of generation, by a tiny model on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_generation
import pytest
import transformers.generation

pytest.importorskip("trl")
pytest.importorskip("datasets")
if not hasattr(transformers.generation, "ContinuousBatchingConfig"):
    pytest.skip("this version of transformers has no such config", allow_module_level=True)


@pytest.mark.filterwarnings("default")  # of TRL and datasets
def test_all_parts_of_a_tiny_model_are_measured_and_a_part_that_fails_leaves_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Any = bench_generation.plain

    def failing(model: Any, way: str, options: Any) -> dict[str, Any]:
        if way == "generate":
            raise RuntimeError("no kernel")
        found: dict[str, Any] = plain(model, way, options)
        return found

    monkeypatch.setattr(bench_generation, "plain", failing)
    sizes = "--shape tiny --gpu 4MiB --ram 64MiB --texts 2 --tokens 5 --prompt 4 --few 1 "
    sizes += "--grpo --rows 2 --completion 3 --steps 1"
    output = tmp_path / "generation.json"
    found = bench_generation.measure(bench_generation.options_of([*sizes.split(), "--output", str(output)]))

    assert json.loads(output.read_text(encoding="utf-8"))["grpo"] == found["grpo"]
    assert {name for name, part in found.items() if "error" in str(part)} == {"plain generate"}
    assert found["plain generate"]["error"] == "RuntimeError: no kernel"
    assert found["ratios batch"]["equal_texts"] == 1
    assert found["lent batch"]["is_same"]
    assert found["sync"]["weight_bytes"] > 0
    assert found["streaming"]["is_extrapolated"]
    assert found["grpo"]["completion_tokens"] == [12]
