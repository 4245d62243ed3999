"""The documented list of models is what the tests run over."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest
import transformers
from test_docs import ROOT


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_table", ROOT / "tools" / "models_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented_version(table: ModuleType) -> str:
    found = re.search(r"^transformers ([\d.]+):", table.parts(table.PAGE.read_text(encoding="utf-8"))[1], re.MULTILINE)
    assert found is not None
    return found[1]


def older(table: ModuleType) -> bool:
    """Whether the installed transformers has not all families."""
    versions = (transformers.__version__, documented_version(table))
    here, documented = (tuple(int(part) for part in version.split(".")[:2]) for version in versions)
    return here < documented


def test_documented_models_are_those_of_the_tests(table: ModuleType) -> None:
    if older(table):
        pytest.skip(f"made with transformers {documented_version(table)}, which has more models")
    made = table.parts(table.PAGE.read_text(encoding="utf-8"))[1]
    assert made == table.section(documented_version(table)), "run tools/models_table.py"


def test_readme_has_the_numbers_of_the_tests(table: ModuleType) -> None:
    if older(table):
        pytest.skip(f"counted with transformers {documented_version(table)}, which has more models")
    kinds = table.proven()
    text, images = (kinds[kind]["gradients"] for kind in kinds)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    types = len(table.model_types(text))
    wanted = f"{types} types of text models ({len(text)} configurations) and {len(images)} with images"
    assert wanted in readme


def test_test_that_runs_over_no_families_has_no_column(table: ModuleType) -> None:
    with pytest.raises(LookupError, match="does not run over families"):
        table.families_of("test_families.test_batch_larger_than_what_offload_has_room_for_is_named")


def test_page_without_its_section_is_named(table: ModuleType) -> None:
    with pytest.raises(LookupError, match=r"models\.md has no section"):
        table.parts("# Models\n")
