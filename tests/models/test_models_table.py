"""The documented list of models is what the tests run over."""

from __future__ import annotations

import re

import models_table
import pytest
import transformers
from test_docs import ROOT


def documented_version() -> str:
    found = re.search(
        r"^transformers ([\d.]+):", models_table.parts(models_table.PAGE.read_text(encoding="utf-8"))[1], re.MULTILINE
    )
    assert found is not None
    return found[1]


def older() -> bool:
    """Whether the installed transformers has not all families."""
    versions = (transformers.__version__, documented_version())
    here, documented = (tuple(int(part) for part in version.split(".")[:2]) for version in versions)
    return here < documented


def test_documented_models_are_those_of_the_tests() -> None:
    if older():
        pytest.skip(f"made with transformers {documented_version()}, which has more models")
    made = models_table.parts(models_table.PAGE.read_text(encoding="utf-8"))[1]
    assert made == models_table.section(documented_version()), "run tools/models_table.py"


def test_readme_has_the_numbers_of_the_tests() -> None:
    if older():
        pytest.skip(f"counted with transformers {documented_version()}, which has more models")
    kinds = models_table.proven()
    text, images = (kinds[kind]["gradients"] for kind in kinds)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    types = len(models_table.model_types(text))
    wanted = f"{types} types of text models ({len(text)} configurations) and {len(images)} with images"
    assert wanted in readme


def test_test_that_runs_over_no_families_has_no_column() -> None:
    with pytest.raises(LookupError, match="does not run over families"):
        models_table.families_of("test_families.test_batch_larger_than_what_offload_has_room_for_is_named")


def test_page_without_its_section_is_named() -> None:
    with pytest.raises(LookupError, match=r"models\.md has no section"):
        models_table.parts("# Models\n")
