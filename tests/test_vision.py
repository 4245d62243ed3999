"""Vision-language models: streamed with images in the batch, every number is that of the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import some
from safetensors.torch import load_file, save_file
from tiny_gradients import far, plain_gradients, streamed_gradients
from tiny_runs import PLACES, ModelWeights, Outcome, opened, outcome, plain_model, read_parameters
from tiny_vision import VISION_FAMILIES, image_batch, text_batch, vision_config
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlavaForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
)

import megatier
from megatier.config.schema import TiersConfig, TrainConfig
from megatier.engine.head import check_calls_loss_function
from megatier.errors import TimelineError, UnsupportedModelError
from megatier.integrations.streamed import Streamed
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.frozen_parameters import freeze
from megatier.models.initialiser import Initialiser
from megatier.tier import Kind

MIB = 1 << 20
TIERS = TiersConfig(device="cpu", gpu=8 * MIB, ram=64 * MIB, io_threads=2, update_threads=2)
VISION = ("visual", "vision_tower", "multi_modal_projector")
BATCH = 2


def of_vision(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if any(part in name.split(".") for part in VISION)}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}


def skip_own_loss(config: PretrainedConfig) -> None:
    """Where this version of transformers has the loss in the model's own forward (Gemma 3 in 5.6): refused."""
    try:
        check_calls_loss_function(build_skeleton(config, "sdpa"), "")
    except UnsupportedModelError as refusal:
        pytest.skip(str(refusal))


def streamed(model: Path | PreTrainedModel, **options: Any) -> Streamed:
    return megatier.stream(model, **{"tiers": TIERS, "compute_dtype": "fp32", "fused_loss": False, **options})


def step(model: Streamed, *batches: dict[str, Tensor]) -> list[float]:
    losses = []
    for batch in batches:
        loss = model.model(**batch).loss
        loss.backward()
        losses.append(loss.item())
    model.optimizer.step()
    return losses


# ---- the model and its units


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_vision_skeleton_has_the_buffers_and_parameters_of_a_normal_model(family: str) -> None:
    config = vision_config(family)
    normal = plain_model(config)
    model = build_skeleton(config, "sdpa")
    assert type(model) is type(normal)
    expected, found = dict(normal.named_buffers()), dict(model.named_buffers())
    assert found.keys() == expected.keys()
    assert [name for name, buffer in expected.items() if not torch.equal(found[name], buffer)] == []
    units = find_units(model)
    placed = {tensor.name: tensor.shape for unit in units for tensor in unit.layout.tensors}
    assert placed == {name: tuple(parameter.shape) for name, parameter in normal.named_parameters()}
    source = Initialiser(model, 0)
    assert all(bool(values.isfinite().all()) for unit in units for _, values in source.read(unit))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3_vl", ["patch_embed", "pos_embed", "blocks.0", "blocks.1", "blocks.2", "merger"]),
        ("llava", ["embeddings", "pre_layrnorm", *(f"encoder.layers.{n}" for n in range(3)), "post_layernorm"]),
    ],
)
def test_vision_blocks_and_what_is_round_them_are_units(family: str, expected: list[str]) -> None:
    units = find_units(build_skeleton(vision_config(family), "sdpa"))
    prefix = {"qwen3_vl": "model.visual.", "llava": "model.vision_tower."}[family]
    names = [unit.name.removeprefix(prefix) for unit in units if unit.name.startswith(prefix)]
    assert [name.removeprefix("vision_model.") for name in names if "deepstack" not in name] == expected
    assert [name for name in names if "deepstack" in name] == [
        f"deepstack_merger_list.{n}" for n in range(2 if family == "qwen3_vl" else 0)
    ]
    assert [unit.name for unit in units if "projector" in unit.name] == ["model.multi_modal_projector"] * (
        family == "llava"
    )
    assert sum(unit.is_layer for unit in units) == 4


# ---- gradients


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_vision_gradients_are_those_of_the_plain_model(family: str, tmp_path: Path) -> None:
    config, batch = vision_config(family), image_batch(family)
    loss, expected, source = plain_gradients(config, "sdpa", batch)
    assert any(bool(grad.any()) for grad in of_vision(expected).values())
    for activations in ("keep", "recompute"):
        found_loss, found = streamed_gradients(config, tmp_path, source, activations, batch=batch)
        assert found_loss == loss
        assert found.keys() == expected.keys()
        different = [name for name, grad in expected.items() if not torch.equal(found[name], grad)]
        assert different == [], activations


def test_vision_model_with_experts_in_parts_has_nearly_the_gradients_of_the_plain_model(tmp_path: Path) -> None:
    config, batch = vision_config("qwen3_vl_moe"), image_batch("qwen3_vl_moe")
    loss, expected, source = plain_gradients(config, "sdpa", batch)
    for parts, activations in ((2, "keep"), (3, "recompute")):
        found_loss, found = streamed_gradients(config, tmp_path, source, activations, batch=batch, expert_parts=parts)
        assert found_loss == loss
        assert far(found, expected, 1e-5) == {}


@pytest.mark.parametrize("family", some(VISION_FAMILIES, by=2))
def test_vision_fused_loss_gives_nearly_the_plain_gradients(family: str, tmp_path: Path) -> None:
    config, batch = vision_config(family), image_batch(family)
    skip_own_loss(config)
    loss, expected, source = plain_gradients(config, "sdpa", batch)
    found_loss, found = streamed_gradients(config, tmp_path, source, fused_loss=True, batch=batch)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    rounding = {name for name, grad in expected.items() if name.endswith("k_proj.bias") and grad.abs().max() < 1e-6}
    assert far(found, expected).keys() - rounding == set()  # a key's bias has a gradient of 0, but for rounding


@pytest.mark.parametrize("family", some(VISION_FAMILIES, by=2, first=1))
def test_vision_in_bf16_has_nearly_the_loss_of_fp32(family: str, tmp_path: Path) -> None:
    config, batch = vision_config(family), image_batch(family)
    loss, _, source = plain_gradients(config, "sdpa", batch)
    found_loss, found = streamed_gradients(config, tmp_path, source, compute_dtype="bf16", batch=batch)
    assert found_loss == pytest.approx(loss, rel=1e-2)
    assert any(bool(grad.any()) for grad in of_vision(found).values())


# ---- steps, some of them without images


def mixed_run(
    family: str, mount: Path, place: str, activations: Any = "keep", clip: float | None = 0.5, **options: Any
) -> Outcome:
    """Six steps of two groups; all groups of the first have images, those of the others some or none."""
    train = TrainConfig(steps=6, batch=2 * BATCH, groups=2, activations=activations, weight_decay=0.1, clip=clip)
    config = vision_config(family)
    with opened(config, mount, PLACES[place], train, compute_dtype="bf16", **options) as session:
        results, before = [], session.store.moved_bytes.copy()
        kinds = [(True, True), (False, True), (False, False), (True, False), (False, False), (True, True)]
        for number, images in enumerate(kinds):
            groups = [
                image_batch(family, seed=2 * number + k) if has_image else text_batch(seed=2 * number + k)
                for k, has_image in enumerate(images)
            ]
            results.append(session.engine.train_step(number + 1, 1e-2, groups))
        session.player.drain()
        assert session.store.moved_bytes - before == session.player.demanded
        return outcome(session, results)


@pytest.mark.parametrize(
    ("family", "clip", "places"),
    [
        ("llava", 0.5, ("ram_streamed", "nvme_twice")),
        pytest.param("qwen3_vl", None, ("nvme", "gpu_ram_nvme"), marks=pytest.mark.slow),
        pytest.param("llava", 0.5, ("gpu_ram_nvme",), marks=pytest.mark.slow),
        pytest.param("qwen3_vl", None, ("ram",), marks=pytest.mark.slow),
    ],
)
def test_steps_with_and_without_images_equal_every_bit_wherever_the_state_lies(
    family: str, clip: float | None, places: Sequence[str], tmp_path: Path
) -> None:
    expected = mixed_run(family, tmp_path, "gpu", clip=clip)
    for place in places:
        assert mixed_run(family, tmp_path, place, "recompute", clip=clip) == expected, place


@pytest.mark.gpu
# torch 2.11 refuses to compile some vision blocks: Qwen3-VL's, by lengths that depend on data, and CLIP's, by hooks
# that capture outputs. They run uncompiled by design.
@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
@pytest.mark.parametrize(
    ("family", "compiles"), [*((family, False) for family in VISION_FAMILIES), ("qwen3_vl", True), ("llava", True)]
)
def test_steps_with_and_without_images_on_a_gpu_equal_every_bit_wherever_the_state_lies(
    family: str, compiles: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"device": "cuda", "compile": compiles, "tokens": text_batch()["input_ids"].shape[1]}
    places = [("gpu", "keep"), ("ram", "recompute"), ("ram_streamed", "offload"), ("nvme_twice", "keep")]
    expected, *found = [mixed_run(family, tmp_path, place, policy, **options) for place, policy in places]
    assert [place for place, other in zip(places[1:], found, strict=True) if other != expected] == []
    assert expected.losses == pytest.approx(mixed_run(family, tmp_path, "gpu").losses, rel=1e-2)


def test_step_without_images_leaves_the_vision_tower_and_its_moments_as_they_are() -> None:
    with streamed(plain_model(vision_config("qwen2_5_vl")), weight_decay=0.1) as model:
        step(model, image_batch("qwen2_5_vl"))
        before = model.state_dict()
        step(model, text_batch())
        after = model.state_dict()
        assert changed(before, after) == before.keys() - of_vision(before).keys()
        step(model, image_batch("qwen2_5_vl", seed=2))
        assert changed(after, model.state_dict()) == before.keys()


@pytest.mark.parametrize("frozen", [(), ("*vision_tower*",)])
def test_step_without_images_does_not_load_the_tower(frozen: Sequence[str]) -> None:
    tiers = replace(TIERS, state=("ram",))
    with streamed(plain_model(vision_config("gemma3")), frozen=frozen, tiers=tiers) as model:
        loaded = []
        for batch in (image_batch("gemma3"), text_batch(), text_batch(seed=2), image_batch("gemma3", seed=2)):
            before = model._session.store.moved_bytes.copy()
            step(model, batch)
            loaded.append((model._session.store.moved_bytes - before)["ram_to_gpu"])
        seen = of_vision(model.state_dict())

    # In the first step of text it is not known yet that the tower is left out. Afterwards it comes for no pass.
    assert loaded[1] - loaded[2] >= sum(4 * tensor.numel() for tensor in seen.values())
    assert loaded[3] > loaded[2]


def test_evaluations_of_batches_with_and_without_images_come_in_any_order(tmp_path: Path) -> None:
    text, image = text_batch(), image_batch("llava")
    found = []
    for batches in ([text, image], [image, text]):
        train = TrainConfig(batch=BATCH)
        with opened(vision_config("llava"), tmp_path, PLACES["ram"], train, compute_dtype="fp32") as session:
            found += [session.engine.evaluate(batches) for _ in range(2)]
    assert found.count(found[0]) == len(found)


def test_block_whose_output_nobody_uses_is_not_updated_as_in_torch() -> None:
    with streamed(plain_model(vision_config("llava")), weight_decay=0.1) as model:
        before = model.state_dict()
        for seed in (1, 2):
            step(model, image_batch("llava", seed=seed))
        kept = before.keys() - changed(before, model.state_dict())
    assert kept == {name for name in before if ("layers.2." in name and "vision" in name) or "post_layernorm" in name}


@pytest.mark.parametrize("has_image", [(True, False), (False, True)])
def test_group_without_images_adds_nothing_to_the_gradients_of_one_with_images(has_image: tuple[bool, bool]) -> None:
    config, batch, found = vision_config("gemma3"), image_batch("gemma3", seed=2), []
    for groups in ([batch], [batch if has else text_batch() for has in has_image]):
        options = {"accumulation_steps": len(groups), "betas": (0.0, 0.999), "clip": None, "lr": 0.0}
        with streamed(plain_model(config), **options) as model:
            step(model, *[image_batch("gemma3")] * len(groups))
            step(model, *groups)
            found.append(of_vision(read_parameters(model._session, Kind.EXP_AVG)))
    assert changed(*found) == set()


PROJECTOR = ("*", "!*multi_modal_projector*")
LOWER = ("model.language_model.embed_tokens", "model.language_model.layers.[01]")


def trained_names(frozen: Sequence[str]) -> set[str]:
    model = build_skeleton(vision_config("llava"), "sdpa")
    freeze(model, frozen)
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("frozen", [PROJECTOR, (*PROJECTOR, "!lm_head")])
def test_groups_with_and_without_images_train_the_projector_in_any_order(frozen: Any, fused: bool) -> None:
    image, text, found = image_batch("llava"), text_batch(), []
    for groups in ((image, text), (text, image)):
        options = {"accumulation_steps": 2, "frozen": frozen, "fused_loss": fused}
        with streamed(plain_model(vision_config("llava")), **options) as model:
            before = model.state_dict()
            for _ in range(2):
                step(model, *groups)
            found.append(model.state_dict())
            assert changed(before, found[-1]) == trained_names(frozen)
    assert changed(*found) == set()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("frozen", [PROJECTOR, LOWER])
def test_step_without_images_goes_on_where_lower_layers_are_frozen(frozen: Any, fused: bool) -> None:
    with streamed(plain_model(vision_config("llava")), frozen=frozen, fused_loss=fused) as model:
        step(model, image_batch("llava"))
        before = model.state_dict()
        step(model, text_batch())
        after = model.state_dict()
        of_images = trained_names(frozen) & of_vision(before).keys()
        assert changed(before, after) == trained_names(frozen) - of_images
        step(model, image_batch("llava", seed=2))
        assert of_images and of_images & changed(after, model.state_dict())


def test_first_step_without_images_is_named_when_images_come() -> None:
    with streamed(plain_model(vision_config("llava"))) as model:
        step(model, text_batch())
        with pytest.raises(TimelineError, match=r"vision_tower\.embeddings .*image into each batch of the first step"):
            model.model(**image_batch("llava"))
        step(model, text_batch(seed=2))


def test_evaluations_with_and_without_images_do_not_disturb_each_other() -> None:
    with streamed(plain_model(vision_config("gemma3"))) as model, torch.no_grad():
        batches = [text_batch(), image_batch("gemma3"), text_batch(), image_batch("gemma3")]
        losses = [model.model(**batch).loss.item() for batch in batches]
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_step_of_several_groups_has_the_mean_loss_over_all_its_tokens(family: str, tmp_path: Path) -> None:
    balance = {"text_config": {"router_aux_loss_coef": 0.0}} if family == "qwen3_vl_moe" else {}
    config = vision_config(family, **balance)
    skip_own_loss(config)
    model = plain_model(config)
    groups = [image_batch(family), image_batch(family, rows=1, seed=2)]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in groups]
    with torch.no_grad():
        means = [model(**batch).loss.item() for batch in groups]
    train = TrainConfig(steps=1, batch=2, groups=2)
    with opened(config, tmp_path, PLACES["ram"], train, source=ModelWeights(model), compute_dtype="fp32") as session:
        loss = session.engine.train_step(1, 0.0, groups).loss
    expected = sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)
    assert loss == pytest.approx(expected, rel=1e-5)


# ---- weights in and out


@pytest.mark.parametrize("family", some(VISION_FAMILIES, by=2))
def test_vision_export_is_what_transformers_loads_and_saves(family: str, tmp_path: Path) -> None:
    plain_model(vision_config(family)).save_pretrained(tmp_path / "theirs")
    expected = AutoModelForImageTextToText.from_pretrained(tmp_path / "theirs").state_dict()
    with streamed(tmp_path / "theirs") as model:
        model.export(tmp_path / "ours", dtype="fp32")
        step(model, image_batch(family))
        model.export(tmp_path / "trained", dtype="fp32")
        masters = model.state_dict()
    result: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours", output_loading_info=True)
    loaded, report = result
    assert not any(report.values()), report
    assert changed(expected, loaded.state_dict()) == set()
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert ours.keys() == theirs.keys()
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "trained").state_dict()
    assert changed(masters, trained) == set()
    assert changed(expected, trained)


@pytest.mark.parametrize("parts", [1, 3])
def test_vision_experts_stored_transposed_as_on_the_hub_are_read(parts: int, tmp_path: Path) -> None:
    model = plain_model(vision_config("qwen3_vl_moe"))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    experts = [name for name in stored if ".experts." in name]
    assert len(experts) == 8
    hub = {n: t.transpose(1, 2).contiguous() if n in experts else t for n, t in stored.items()}
    save_file(hub, file, metadata={"format": "pt"})
    assert (
        changed(dict(model.named_parameters()), AutoModelForImageTextToText.from_pretrained(tmp_path).state_dict())
        == set()
    )
    with streamed(tmp_path, expert_parts=parts) as found:
        assert changed(dict(model.named_parameters()), found.state_dict()) == set()
        found.export(tmp_path / "ours", dtype="fp32")
    ours = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours").state_dict()
    assert changed(dict(model.named_parameters()), ours) == set()


# ---- what is refused


def test_part_of_a_vision_language_model_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"LlavaModel is neither .* \(LlavaForConditionalGeneration\)"):
        streamed(plain_model(vision_config("llava")).get_submodule("model"))  # type: ignore[arg-type]


def test_language_model_of_a_vision_language_model_is_streamed_alone() -> None:
    model = AutoModelForCausalLM.from_config(vision_config("qwen3_5").get_text_config())
    with streamed(model) as found:
        assert of_vision(found.state_dict()) == {}
        step(found, text_batch())


@pytest.mark.parametrize("training", [True, False])
def test_weight_that_is_read_outside_its_module_is_refused_by_name(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed(plain_model(vision_config("llava"))) as model:
        inner = model.model.get_submodule("model")

        def forward(input_ids: Tensor, **_: Any) -> Tensor:
            return input_ids[..., None] * inner.get_parameter("multi_modal_projector.linear_2.bias")

        with (
            monkeypatch.context() as patch,
            torch.set_grad_enabled(training),
            pytest.raises(UnsupportedModelError, match="LlavaForConditionalGeneration computes with a weight outside"),
        ):
            patch.setattr(inner, "forward", forward)
            model.model(**image_batch("llava"))
        step(model, text_batch())


def test_model_that_takes_its_loss_by_itself_is_refused_by_name_with_a_fused_loss() -> None:
    class OwnLoss(LlavaForConditionalGeneration):  # as Gemma 3 did in transformers 5.6
        def forward(self, **batch: Any) -> Any:
            return super().forward(**batch)

    config: Any = vision_config("llava")
    model = OwnLoss(config)
    with pytest.raises(UnsupportedModelError, match=r"OwnLoss of transformers .* set model\.fused_loss to false"):
        check_calls_loss_function(model, "set model.fused_loss to false")
