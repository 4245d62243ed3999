"""Configs of `accelerate config` become ours, key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from converted import ACCELERATE, findings, settings, written

from megatier.convert.source import convert


def test_convert_accelerate(tmp_path: Path) -> None:
    made = convert(written(tmp_path, ACCELERATE))
    assert made.trainer == "accelerate"
    assert made.settings == {
        "model.compute_dtype": "bf16",
        "model.compile": True,
        "train.clip": 0.5,
        "tiers.nvme": ["/mnt/a", "/mnt/b"],
        "output.export": True,
        "output.export_dtype": "bf16",
    }
    assert "torchrun" in findings(made, "left")["num_processes"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"mixed_precision": "no", "use_cpu": True}, {"model.compute_dtype": "fp32", "tiers.device": "cpu"}),
        ({"mixed_precision": False}, {"model.compute_dtype": "fp32"}),
        ({"mixed_precision": "fp8"}, {"model.compute_dtype": "bf16", "numerics.products": "fp8"}),
        ({"mixed_precision": "fp16"}, {}),
        ({"fsdp_config": {"fsdp_activation_checkpointing": True}}, {"train.activations": "recompute"}),
        ({"deepspeed_config": {"offload_param_nvme_path": "none", "gradient_clipping": "auto"}}, {}),
        ({"dynamo_config": {"dynamo_backend": "EAGER"}}, {}),
    ],
)
def test_convert_accelerate_values(more: dict[str, Any], expected: dict[str, object], tmp_path: Path) -> None:
    content = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", **more}
    assert settings(tmp_path, content) == expected
