"""Wheels, the image, the recipe for conda and the release notes: that they say the same of versions and needs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OF_CONDA = {"torch": "pytorch", "huggingface-hub": "huggingface_hub"}
"""Names of packages that conda spells in another way."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def recipe() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text_of("packaging/recipe.yaml"))
    return found


def test_release_notes_begin_with_the_version_of_the_project() -> None:
    newest = re.search(r"^## (\S+), (unreleased|\d{4}-\d{2}-\d{2})$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == PROJECT["version"]


def test_recipe_has_the_version_license_and_summary_of_the_project() -> None:
    found = recipe()
    assert found["context"]["version"] == PROJECT["version"]
    assert found["about"]["license"] == PROJECT["license"]
    assert found["about"]["summary"] == PROJECT["description"]
    assert (ROOT / found["about"]["license_file"]).is_file()


def test_recipe_needs_what_the_project_needs() -> None:
    needed = [f"python {PROJECT['requires-python']}"]
    for dependency in PROJECT["dependencies"]:
        name, bounds = re.fullmatch(r"([\w-]+)(.*)", dependency).groups()  # type: ignore[union-attr]
        needed.append(f"{OF_CONDA.get(name, name)} {bounds}")

    requirements = recipe()["requirements"]
    assert requirements["run"] == needed
    assert needed[0] in requirements["host"]
    build_system = tomllib.loads(text_of("pyproject.toml"))["build-system"]["requires"]
    assert {name.replace(" ", "") for name in requirements["host"]} >= set(build_system)


def test_image_has_a_python_and_extras_that_the_project_knows() -> None:
    image = text_of("packaging/Dockerfile")
    base = re.search(r"^FROM python:3\.(\d+)-", image, re.MULTILINE)
    extras = re.search(r"^ARG EXTRAS=(\S+)$", image, re.MULTILINE)
    assert base is not None
    assert extras is not None
    assert int(base[1]) >= int(PROJECT["requires-python"].rpartition(".")[2])
    assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])


def test_image_and_wheel_are_built_of_the_same_files() -> None:
    kept = re.findall(r"^!(\S+)$", text_of("packaging/Dockerfile.dockerignore"), re.MULTILINE)
    copied = re.search(r'^cp -R (.*) "\$scratch/source"$', text_of("tools/build_wheel.sh"), re.MULTILINE)
    assert copied is not None
    assert kept == copied[1].split()
    assert all((ROOT / name).exists() for name in kept)
