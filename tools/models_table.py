"""Write the list of models that docs/models.md calls proven: read from the tests, so that it says what they do.

python tools/models_table.py

A test that runs over families is parametrised by them; its parameters are the rows, and the columns are the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import transformers

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- made by tools/models_table.py: run it, do not edit -->\n"
END = "<!-- end of what tools/models_table.py made -->\n"
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "gradients": (
        "test_families.test_family_gradients_are_those_of_the_plain_model",
        "test_families.test_layers_that_return_nested_tensors_have_the_plain_gradients",
        "test_vision.test_vision_gradients_are_those_of_the_plain_model",
    ),
    "fused loss": (
        "test_families.test_family_fused_loss_gives_nearly_the_plain_gradients_and_no_whole_logits",
        "test_vision.test_vision_fused_loss_gives_nearly_the_plain_gradients",
    ),
    "slices": ("test_families.test_family_slices_give_nearly_the_plain_gradients",),
    "documents apart": ("test_families.test_family_gradients_of_a_document_do_not_depend_on_the_one_before",),
    "experts in parts": (
        "test_engine_expert_parts.test_family_in_parts_has_the_loss_and_nearly_the_gradients_of_the_plain_model",
    ),
    "folder in and out": (
        "test_models_weights.test_export_family_is_what_transformers_loads_and_saves",
        "test_vision.test_vision_export_is_what_transformers_loads_and_saves",
    ),
}
"""What is proven, by which tests. The first column has all families."""


def families_of(test: str) -> tuple[str, ...]:
    """The families that a test is parametrised by; raises LookupError when it is not."""
    module, _, function = test.partition(".")
    run: Callable[..., object] = getattr(import_module(module), function)
    for mark in getattr(run, "pytestmark", []):
        if mark.name == "parametrize" and mark.args[0] in ("family", "model_type"):
            # Those that slow tests run stand in a `pytest.param`.
            return tuple(getattr(value, "values", (value,))[0] for value in mark.args[1])
    raise LookupError(f"{test} does not run over families")


def proven() -> dict[str, dict[str, tuple[str, ...]]]:
    """By test module, then by column, the families in the order of the tests."""
    # As pytest finds them: each room's tests, and what they share, is imported by its own name.
    sys.path += [str(ROOT / "tests"), *(str(path) for path in (ROOT / "tests").iterdir() if path.is_dir())]
    found: dict[str, dict[str, tuple[str, ...]]] = {"text": {}, "text and images": {}}
    for column, tests in COLUMNS.items():
        for kind in found:
            chosen = [test for test in tests if test.startswith("test_vision.") == (kind != "text")]
            found[kind][column] = tuple(family for test in chosen for family in families_of(test))
    return found


def model_types(families: tuple[str, ...]) -> set[str]:
    """What they are called in transformers: a family may be another configuration of one."""
    options = import_module("tiny_models").FAMILIES
    return {options.get(family, {}).get("_t", family) for family in families}


def section(version: str) -> str:
    """The generated part of the page, with its markers; `version` of transformers."""
    kinds = proven()
    text, images = (kinds[kind]["gradients"] for kind in kinds)
    lines = [
        f"transformers {version}: {len(model_types(text))} types of text models in {len(text)} configurations, and "
        f"{len(images)} with images.",
        "",
        "| families | " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * (len(COLUMNS) + 1),
    ]
    for columns in kinds.values():
        # Families of which the same is proven share a row.
        rows: dict[tuple[str, ...], list[str]] = {}
        for family in columns["gradients"]:
            ticks = tuple("✓" if family in families else "" for families in columns.values())
            rows.setdefault(ticks, []).append(f"`{family}`")
        for ticks, alike in sorted(rows.items(), key=lambda row: -len(row[1])):
            lines.append(f"| {', '.join(alike)} | " + " | ".join(ticks) + " |")
    return BEGIN + "\n" + "\n".join(lines) + "\n\n" + END


def parts(page: str) -> tuple[str, str, str]:
    """What is before the generated part, it with its markers, and what is behind it."""
    before, begin, rest = page.partition(BEGIN)
    made, end, behind = rest.partition(END)
    if not (begin and end):
        raise LookupError(f"{PAGE} has no section between {BEGIN.strip()!r} and {END.strip()!r}")
    return before, begin + made + end, behind


def main() -> None:
    """Put the list into the page."""
    before, _, behind = parts(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(before + section(transformers.__version__) + behind, encoding="utf-8")


if __name__ == "__main__":
    main()
