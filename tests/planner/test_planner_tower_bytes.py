"""Memory and time of images in plans: pixels, vision towers, and what is said where nothing is known of them."""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from image_runs import COUNTS, run_command
from tiny_processors import families
from tiny_vision import vision_config
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionBlock

from megatier.cli import main
from megatier.compute.compilation import Compilation
from megatier.models.tower_attention import TowerAttention
from megatier.planner.tower_bytes import bytes_in_backward
from megatier.setup.tower import Sizes, TowerUnit

pytest.importorskip("PIL")

CPU = [ProfilerActivity.CPU]
WIDTH = 128
MACHINE = Path(__file__).parents[2] / "examples" / "machines" / "h200.yaml"
KEEP = {"train.activations": "keep", "model.compile": False}


def planned(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    settings: Mapping[str, Any] | None = None,
    family: str = "gemma3",
    counts: Sequence[int] = COUNTS,
) -> dict[str, Any]:
    """The plan of a run on conversations with so many images."""
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text("{}")
    words = run_command(folder, family, settings or KEEP, counts)[1:]
    capsys.readouterr()
    assert main(["plan", str(folder / "run.yaml"), *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def said_by_plan(folder: Path, words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the plan of a run says, in one line."""
    (folder / "run.yaml").write_text("{}")
    capsys.readouterr()
    assert main(["plan", str(folder / "run.yaml"), *words]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("family", families())
def test_plan_counts_pixels_tower_and_images(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_images = planned(tmp_path / "images", capsys, family=family)
    without = planned(tmp_path / "text", capsys, family=family, counts=(0,) * 6)
    tower = with_images["tower_bytes"]["saved"]
    pixels = with_images["pixel_bytes"]["gpu"]
    assert min(tower, pixels, with_images["pixel_bytes"]["ram"]) > 0
    assert without["tower_bytes"] == {"saved": 0, "in_unit": 0}
    assert without["pixel_bytes"] == {}

    # Six conversations have seven images.
    assert with_images["images_per_step"] == pytest.approx(2 * 7 / 6)
    more = {
        name: with_images["activation_bytes"][name] - without["activation_bytes"][name]
        for name in ("saved", "at_loss", "in_backward")
    }
    assert more["saved"] == pytest.approx(tower)
    assert more["at_loss"] == more["in_backward"] == pytest.approx(tower + pixels)
    assert with_images["seconds"] > without["seconds"]


def test_plan_of_a_tower_that_computes_again_saves_its_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = planned(tmp_path, capsys)["tower_bytes"]
    again = planned(tmp_path, capsys, {**KEEP, "train.activations": "recompute"})["tower_bytes"]
    assert again["saved"] < kept["saved"] / 3
    assert again["in_unit"] > kept["in_unit"]


def test_plan_of_a_compiled_tower_saves_the_share_that_its_layers_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = planned(tmp_path, capsys)["tower_bytes"]
    again = planned(tmp_path, capsys, {**KEEP, "train.activations": "recompute"})["tower_bytes"]

    def of_share(share: float) -> dict[str, Any]:
        settings = {"train.activations": "keep", "model.compile": True, "model.saved_share": share}
        found: dict[str, Any] = planned(tmp_path, capsys, settings)["tower_bytes"]
        return found

    none, half, whole = map(of_share, (0, 0.5, 1))
    assert kept["saved"] <= whole["saved"] < 1.05 * kept["saved"]
    assert again["saved"] <= none["saved"] < half["saved"] < whole["saved"]

    # What is not saved is made in the backward.
    assert none["in_unit"] > half["in_unit"] > whole["in_unit"]


def test_plan_of_a_frozen_tower_saves_nothing_below_its_projector(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = planned(tmp_path, capsys)
    frozen = planned(tmp_path, capsys, {**KEEP, "model.frozen": "*vision_tower*"})
    assert 0 < frozen["tower_bytes"]["saved"] < whole["tower_bytes"]["saved"] / 4
    assert frozen["seconds"] < whole["seconds"]


def test_plan_says_why_nothing_is_known_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, capsys)
    words = run_command(tmp_path, "gemma3", KEEP)[1:]
    words = ["--data.files=/nowhere/chats.jsonl" if word.startswith("--data.files") else word for word in words]
    assert main(["plan", str(tmp_path / "run.yaml"), "--machine", str(MACHINE), *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Images are not counted: data.files: /nowhere/chats.jsonl matches no file or folder" in said


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("counts", [(1, 1), (0, 1, 1)])
def test_plan_says_that_images_are_damaged(
    counts: tuple[int, ...], skips: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = run_command(tmp_path, "gemma3", {**KEEP, "data.skip_bad": skips}, counts)[1:]
    for path in (tmp_path / "data").glob("*.png"):
        path.write_bytes(b"a cat")
    assert said_by_plan(tmp_path, words, capsys).count("an image cannot be decoded") == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data.max_patches": 2}, "has 3 images, and data.max_patches is 2, which bounds their number"),
        ({"data.sequence_length": 16}, "data.sequence_length is 16"),
    ],
)
def test_plan_names_the_conversation_that_a_run_would_refuse(
    settings: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = run_command(tmp_path, "llava", {**KEEP, **settings})[1:]
    found = said_by_plan(tmp_path, words, capsys)
    assert "Images are not counted: " in found
    assert said in found


def test_plan_of_packed_conversations_has_room_for_all_patches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = planned(tmp_path, capsys, family="llava")
    packed = planned(tmp_path, capsys, {**KEEP, "data.max_patches": 12}, family="llava")

    # The conversation with most images has three, and four of it share a sequence.
    assert packed["tower_bytes"]["saved"] == 4 * alone["tower_bytes"]["saved"]
    assert packed["pixel_bytes"]["gpu"] == 4 * alone["pixel_bytes"]["gpu"]
    assert packed["images_per_step"] > 2 * alone["images_per_step"]


def test_plan_tells_what_images_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, capsys)
    assert main(["plan", str(tmp_path / "run.yaml"), *run_command(tmp_path, "gemma3", KEEP)[1:]]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Of this vision towers save" in said
    assert "A step has 2.33 images" in said


class _PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside have at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._watch(tensor.untyped_storage())
        self.peak = max(self.peak, sum(self._live.values()))
        return found

    def _watch(self, storage: UntypedStorage) -> None:
        number = storage._cdata
        if number not in self._live:
            self._live[number] = storage.nbytes()
            weakref.finalize(storage, self._live.pop, number, None)


def vision_block() -> Qwen3VLVisionBlock:
    """So wide that what a patch takes is much more than what all of them share, and in a real tower's proportions."""
    vision = vision_config("qwen3_vl").vision_config
    vision.hidden_size, vision.intermediate_size, vision.num_heads = WIDTH, 480, 2
    vision._attn_implementation = "sdpa"
    return Qwen3VLVisionBlock(vision).to(torch.bfloat16)


def block_arguments(num_images: int, patches: int) -> dict[str, Any]:
    total = num_images * patches
    rotary = (torch.randn(total, 64, dtype=torch.bfloat16),) * 2
    return {
        "hidden_states": torch.randn(total, WIDTH, dtype=torch.bfloat16, requires_grad=True),
        "cu_seqlens": torch.arange(0, total + 1, patches, dtype=torch.int32),
        "position_embeddings": rotary,
    }


def saved_by(block: Qwen3VLVisionBlock, given: dict[str, Any]) -> tuple[Tensor, TowerUnit]:
    """What a block that is not compiled gives, and what it saves."""
    saved: Sizes = {}
    others = (*block.parameters(), *given["position_embeddings"])
    own = {tensor.untyped_storage()._cdata for tensor in others}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        result = block(**given)
    hidden = given["hidden_states"]
    return result, TowerUnit(inputs={hidden.untyped_storage()._cdata: hidden.nbytes}, saved=saved)


def test_plan_of_a_block_that_is_not_compiled_holds_its_peak() -> None:
    block, given = vision_block(), block_arguments(4, 512)
    hidden = given["hidden_states"]
    gradient = torch.ones_like(hidden)
    with _PeakBytes() as made:
        result, unit = saved_by(block, given)
        result.backward(gradient)
        del result
    weights = sum(parameter.nbytes for parameter in block.parameters())

    # What came from outside is no part of what was made: the input, and the gradient of the output.
    peak = made.peak + hidden.nbytes + gradient.nbytes
    assert 1.0 <= (bytes_in_backward(unit) + weights) / peak <= 1.2


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.4, 0.0])
def test_plan_of_a_compiled_block_holds_its_peak(share: float) -> None:
    block, given = vision_block(), block_arguments(8, 1024)
    _, unit = saved_by(block, given)
    hidden = given["hidden_states"]
    gradient = torch.ones_like(hidden)
    torch.compiler.reset()
    attention = TowerAttention([block.attn.config])
    compiled = Compilation(saved_share=share, any_shape=True)(block.forward, "block")
    given["max_seqlen"] = torch.tensor(1024)

    def step() -> tuple[int, int]:
        """What is there after the forward, and the most in the backward. The first call compiles."""
        with attention.applied(), profile(activities=CPU, profile_memory=True) as forward:
            result = compiled(**given)
        with profile(activities=CPU, profile_memory=True) as backward:
            result.backward(gradient)
        saved, _ = _allocated(forward)
        _, made = _allocated(backward)
        block.zero_grad()
        return saved - result.nbytes, saved + made

    step()
    saved, peak = step()
    torch.compiler.reset()
    assert not compiled.is_refused
    of_inputs, of_all = (sum(sizes.values()) for sizes in (unit.inputs, unit.saved))
    assert saved + hidden.nbytes <= 1.05 * (of_inputs + share * (of_all - of_inputs))
    weights = sum(parameter.nbytes for parameter in block.parameters())
    assert 1.0 <= (bytes_in_backward(unit) + weights) / (peak + hidden.nbytes) <= 1.3


def _allocated(run: profile) -> tuple[int, int]:
    """Bytes that are there after what was profiled, and at most meanwhile, beside those from before."""
    result: Any = run.profiler
    of_memory = (event for event in result.kineto_results.events() if event.name() == "[memory]")
    events = sorted(of_memory, key=lambda event: event.start_ns())
    present = list(itertools.accumulate((event.nbytes() for event in events), initial=0))
    return present[-1], max(present)
