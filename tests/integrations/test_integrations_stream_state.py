"""The state of a streamed model: read between steps, saved whole or not at all, restored on other tiers."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from streamed_loops import loop, rate_of, streamed_on, train_config
from test_durable import watched
from tiny_models import BASE
from tiny_runs import exactness_config, outcome
from transformers import AutoConfig, AutoModelForCausalLM

import megatier
from megatier import durable
from megatier.checkpoint import chunkfile
from megatier.engine import unit_model
from megatier.errors import BlockNotFoundError, CheckpointError, StreamedModelError, TransferError
from megatier.integrations.streamed import Streamed
from megatier.models.decoder import build_skeleton


def test_read_and_state_dict_wait_for_the_updates_that_are_due(tmp_path: Path) -> None:
    train = train_config("tied", groups=1)
    with streamed_on("ram_nvme", tmp_path, train) as (_, streamed):
        before = streamed.state_dict()
        loop(streamed, train, 160, last=1)
        after = streamed.state_dict()
        assert all(torch.equal(streamed.read(name), value) for name, value in after.items())
        assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])
        with pytest.raises(BlockNotFoundError, match="lm_head"):
            streamed.read("lm_head.weight")


def test_weights_in_the_model_are_refused_and_the_error_says_where_they_are(tmp_path: Path) -> None:
    with streamed_on("ram", tmp_path, train_config("tied")) as (_, streamed):
        with pytest.raises(StreamedModelError, match=r"Streamed\.state_dict\(\)"):
            streamed.model.state_dict()
        with pytest.raises(StreamedModelError, match=r"Streamed\.state_dict\(\)"):
            streamed.model.save_pretrained(tmp_path / "saved")
        # Before transformers makes a repository, for which it would need a network.
        push: Any = streamed.model.push_to_hub
        with pytest.raises(StreamedModelError, match=r"push_to_hub .* Streamed\.export\(folder\)"):
            push("somebody/model")
        parameter = next(streamed.model.parameters())
        for read in (parameter.cpu, parameter.tolist, parameter.numpy):
            with pytest.raises(StreamedModelError, match=r"Streamed\.read"):
                read()


@pytest.mark.parametrize("target", ["ram", "nvme"])
def test_save_and_restore_on_other_tiers_goes_on_bit_by_bit(target: str, tmp_path: Path) -> None:
    train = train_config("untied")
    with streamed_on("gpu_ram", tmp_path, train, model="untied") as (session, streamed):
        torch.manual_seed(5)
        loop(streamed, train, 2112, last=3)
        streamed.save(tmp_path / "saved")
        torch.manual_seed(6)
        expected = outcome(session, loop(streamed, train, 2112, first=4))
    with streamed_on(target, tmp_path, train, model="untied") as (session, streamed):
        streamed.restore(tmp_path / "saved")
        assert streamed.steps == 3
        assert streamed.optimizer.param_groups[0]["lr"] == rate_of(4)
        torch.manual_seed(6)
        assert outcome(session, loop(streamed, train, 2112, first=4)) == expected


@pytest.mark.parametrize(("name", "value", "other"), [("moments", "bf16", "fp32"), ("optimizer", "muon", "adamw")])
def test_restore_of_what_changes_the_state_goes_on_bit_by_bit_and_with_another_is_refused(
    name: str, value: str, other: str, tmp_path: Path
) -> None:
    changed: dict[str, Any] = {name: value}
    train = replace(train_config("plain", groups=1), seed=3, **changed)
    with streamed_on("ram", tmp_path, train, model="plain") as (session, streamed):
        loop(streamed, train, 160, last=2)
        streamed.save(tmp_path / "saved")
        expected = outcome(session, loop(streamed, train, 160, first=3))
    with streamed_on("nvme", tmp_path, train, model="plain") as (session, streamed):
        streamed.restore(tmp_path / "saved")
        assert outcome(session, loop(streamed, train, 160, first=3)) == expected
    changed = {name: other}
    with streamed_on("ram", tmp_path, replace(train, **changed), model="plain") as (_, streamed):
        words = rf"has {name} {value}, .* has {other}\. .* megatier\.stream\(\.\.\., {name}='{value}'\)"
        with pytest.raises(CheckpointError, match=words):
            streamed.restore(tmp_path / "saved")
        assert streamed.steps == 0


def test_loop_in_tiles_of_tokens_has_nearly_the_numbers_of_a_whole_one_and_goes_on_with_the_same_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = train_config("untied")
    options: dict[str, Any] = {"model": "untied", "compute_dtype": "fp32"}
    with streamed_on("ram", tmp_path, train, **options) as (_, streamed):
        torch.manual_seed(5)
        whole = loop(streamed, train, 2112, last=3)
    with streamed_on("gpu_ram", tmp_path, train, tile_tokens=20, **options) as (session, streamed):
        torch.manual_seed(5)
        found = loop(streamed, train, 2112, last=3)
        streamed.save(tmp_path / "saved")
        torch.manual_seed(6)
        expected = outcome(session, loop(streamed, train, 2112, first=4))

    # The first step alone: AdamW turns roundings of small gradients into whole steps.
    assert found != whole
    assert found[0].loss == pytest.approx(whole[0].loss, rel=1e-6)
    assert found[0].grad_norm == pytest.approx(whole[0].grad_norm, rel=1e-5)

    # Tried again, all would run whole.
    monkeypatch.setattr(unit_model, "why_joined", lambda *_: "the test says so")
    with streamed_on("ram_nvme", tmp_path, train, tile_tokens=20, **options) as (session, streamed):
        streamed.restore(tmp_path / "saved")
        torch.manual_seed(6)
        assert outcome(session, loop(streamed, train, 2112, first=4)) == expected


@pytest.mark.parametrize("switches", [True, False])
def test_save_in_the_place_of_one_of_its_step_leaves_one_that_restores_wherever_it_is_killed(
    switches: bool, tmp_path: Path
) -> None:
    train, folder, seen = train_config("tied"), tmp_path / "saved", list[Path]()

    def see(name: str, args: tuple[Any, ...]) -> None:
        """What a kill before this call would leave."""
        seen.append(shutil.copytree(folder, tmp_path / f"{len(seen)} {name}"))

    with streamed_on("ram", tmp_path, train) as (_, streamed):
        loop(streamed, train, 160, last=1)
        streamed.save(folder)
        old = weights_of(streamed)
        loop(streamed, train, 160, first=2, last=2)
        new, streamed.steps = weights_of(streamed), 1
        with pytest.MonkeyPatch.context() as patch:
            if not switches:
                patch.setattr(durable, "exchange_names", lambda first, second: False)
            watched(patch, see)
            streamed.save(folder)
        assert [path.name for path in folder.iterdir()] == ["step-00000001"]
        found = []
        for snapshot in seen:
            streamed.restore(snapshot)
            assert weights_of(streamed) in (old, new)
            found.append(weights_of(streamed) == new)
    assert found == sorted(found)
    assert {False, True} == set(found)


def weights_of(streamed: Streamed) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in streamed.state_dict().items()}


@pytest.mark.parametrize("what", ["bytes", "sync_tree", "exchange_names"])
def test_save_that_a_full_drive_refuses_leaves_the_one_of_its_step(what: str, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    train = train_config("tied")
    with streamed_on("ram", tmp_path, train) as (_, streamed):
        loop(streamed, train, 160, last=1)
        streamed.save(tmp_path / "saved")
        old = weights_of(streamed)
        loop(streamed, train, 160, first=2, last=2)
        streamed.steps = 1
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TransferError, match="Free space"):
            if what == "bytes":
                patch.setattr(chunkfile, "create", lambda _: os.open("/dev/full", os.O_WRONLY))
            else:
                patch.setattr(durable, what, refuse)
            streamed.save(tmp_path / "saved")
        assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-00000001"]
        streamed.restore(tmp_path / "saved")
        assert weights_of(streamed) == old


def test_restore_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with (
        streamed_on("ram", tmp_path, train_config("tied")) as (_, streamed),
        pytest.raises(CheckpointError, match="holds no checkpoint"),
    ):
        streamed.restore(tmp_path)


def test_restore_where_layers_are_compiled_in_another_way_says_so(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tiers": {"device": "cpu", "gpu": "2MiB", "ram": "8MiB"}, "compute_dtype": "fp32"}
    model = build_skeleton(exactness_config("tied"), "sdpa").to_empty(device="cpu")
    model.init_weights()
    with megatier.stream(model, compile=True, **options) as streamed:
        streamed.save(tmp_path)
        streamed.restore(tmp_path)
    with megatier.stream(model, compile=False, **options) as streamed:
        with pytest.warns(UserWarning, match="compiled for batches of any size, and here they are compiled not at all"):
            streamed.restore(tmp_path)
        streamed.save(tmp_path)
        streamed.restore(tmp_path)


def test_restore_where_other_layers_take_their_products_in_fp8_says_so(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tiers": {"device": "cpu", "gpu": "2MiB", "ram": "8MiB"}, "compile": False}
    model = build_skeleton(exactness_config("untied"), "sdpa").to_empty(device="cpu")
    model.init_weights()
    with megatier.stream(model, products="fp8", **options) as streamed:
        streamed.save(tmp_path)
        streamed.restore(tmp_path)
    others: list[dict[str, Any]] = [{}, {"products": "fp8", "products_except": "*.o_proj"}]
    for products in others:
        with (
            megatier.stream(model, **options, **products) as streamed,
            pytest.warns(UserWarning, match="modules take their products in FP8, and here"),
        ):
            streamed.restore(tmp_path)


@pytest.mark.parametrize("what", ["restore", "restore_weights"])
def test_restore_in_another_environment_says_what_differs(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed_on("ram", tmp_path, train_config("tied")) as (_, streamed):
        streamed.save(tmp_path / "saved")
        restore = getattr(streamed, what)
        restore(tmp_path / "saved")
        monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
        with pytest.warns(
            UserWarning, match=r"mkldnn\.enabled was 'True' and is 'False'; variables was {} and is {'MKL_"
        ):
            restore(tmp_path / "saved")


def test_restore_under_other_settings_of_torch_says_which(tmp_path: Path) -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    with streamed_on("ram", tmp_path, train_config("tied")) as (_, streamed):
        streamed.save(tmp_path / "saved")
        with pytest.warns(UserWarning, match=r"attention by products was 'True' and is 'False'"):
            torch.backends.cuda.enable_math_sdp(False)
            try:
                streamed.restore(tmp_path / "saved")
            finally:
                torch.backends.cuda.enable_math_sdp(True)
        with pytest.warns(UserWarning, match=r"deterministic algorithms was '\d' and is '\d'"):
            torch.use_deterministic_algorithms(not deterministic)
            try:
                streamed.restore(tmp_path / "saved")
            finally:
                torch.use_deterministic_algorithms(deterministic)
        streamed.restore(tmp_path / "saved")


def of_layers(count: int, *, tied: bool = False) -> Any:
    config = AutoConfig.for_model("llama", **BASE)
    config.num_hidden_layers, config.tie_word_embeddings = count, tied
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("saved", "other", "what"),
    [
        ({"count": 2}, {"count": 1}, r"this model has no model\.layers\.1\.\S+ and \d+ more"),
        ({"count": 1}, {"count": 2}, r"it has no model\.layers\.1\.\S+ and \d+ more"),
        ({"count": 1}, {"count": 1, "tied": True}, r"this model has no lm_head\.weight\."),
    ],
)
def test_restore_of_a_model_with_other_parameters_is_refused_and_leaves_the_state(
    saved: dict[str, Any], other: dict[str, Any], what: str, tmp_path: Path
) -> None:
    tiers = {"device": "cpu", "ram": 64 << 20, "state": ["ram"]}
    with megatier.stream(of_layers(**saved), tiers=tiers) as model:
        model.save(tmp_path)
    with megatier.stream(of_layers(**other), tiers=tiers) as model:
        before = model.state_dict()
        for restore in (model.restore, model.restore_weights):
            with pytest.raises(CheckpointError, match=f"is of another model: {what}"):
                restore(tmp_path)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
