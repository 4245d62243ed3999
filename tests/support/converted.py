"""Files of other trainers, as their users have them, and what a conversion makes of a file."""

from __future__ import annotations

import json
from pathlib import Path

from megatier.convert.conversion import Conversion
from megatier.convert.source import convert

EXAMPLES = Path(__file__).parents[2] / "examples" / "convert"
MEGATRAIN = (EXAMPLES / "megatrain.yaml").read_text()  # 2e-5 in it is text to plain YAML
LLAMA_FACTORY = (EXAMPLES / "llama_factory.yaml").read_text()
AXOLOTL = (EXAMPLES / "axolotl.yaml").read_text()
ACCELERATE = (EXAMPLES / "accelerate.yaml").read_text()
Z3_OFFLOAD = (EXAMPLES / "ds_z3_offload.json").read_text()  # goes with Hugging Face's Trainer and LLaMA-Factory
INFINITY = (EXAMPLES / "ds_z3_infinity.json").read_text()


def written(folder: Path, content: object) -> Path:
    """A file with text, or with JSON."""
    path = folder / "other.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def settings(folder: Path, content: object) -> dict[str, object]:
    """The settings that come of a file."""
    return convert(written(folder, content)).settings


def findings(made: Conversion, outcome: str) -> dict[str, str]:
    """What is said of the keys that have this outcome."""
    return {finding.key: finding.explanation for finding in made.findings if finding.outcome == outcome}
