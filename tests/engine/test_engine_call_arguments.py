from __future__ import annotations

import gc
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_gradients import attention_of, far, padded_batch, plain_gradients, streamed_gradients
from tiny_models import FAMILIES, SHARED_KV, known_config, tiny_config
from tiny_runs import BATCH, PLACES, opened
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from megatier.config.schema import TrainConfig
from megatier.engine.call_arguments import Arguments
from megatier.errors import ConfigError, UnsupportedModelError

SHARING = [name for name, options in FAMILIES.items() if options.get("num_kv_shared_layers")]


# ---------------------------------------------------------------------- models that share keys and values


def test_families_that_share_keys_and_values_are_tried_as_they_ship() -> None:
    assert {"gemma3n_text", "gemma4_text"} <= set(SHARING)
    for name in SHARING:
        modes = getattr(tiny_config(name), "kv_sharing_modes", None)
        if modes is None:
            pytest.skip("older versions of transformers do not say which layers share")
        assert (modes.count("store"), modes.count("reuse")) == (2, SHARED_KV["num_kv_shared_layers"])


@pytest.mark.parametrize("family", SHARING)
def test_shared_keys_and_values_with_offload_give_the_plain_gradients(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    loss, expected, source = plain_gradients(config, attention_of(config))
    found_loss, found = streamed_gradients(config, tmp_path, source, "offload")
    assert found_loss == loss
    assert [name for name, grad in expected.items() if not torch.equal(found[name], grad)] == []


@pytest.mark.parametrize("frozen", [["model.layers.[0-1]"], ["model.embed_tokens", "model.layers.[0-2]"]])
@pytest.mark.parametrize("slices", [1, 2])
def test_shared_keys_and_values_of_frozen_layers_give_the_plain_gradients(
    frozen: list[str], slices: int, tmp_path: Path
) -> None:
    config = tiny_config("gemma4_text")
    loss, expected, source = plain_gradients(config, attention_of(config), frozen=frozen)
    found_loss, found = streamed_gradients(config, tmp_path, source, "recompute", slices, frozen=frozen)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert found.keys() == expected.keys()
    assert far(found, expected) == {}


@pytest.mark.usefixtures("compiled")
def test_shared_keys_and_values_of_compiled_layers_give_nearly_the_plain_gradients(tmp_path: Path) -> None:
    sharing = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "num_kv_shared_layers": 2}
    config = tiny_config("gemma4_unified_text", **sharing)
    loss, expected, source = plain_gradients(config, attention_of(config))
    results = [
        streamed_gradients(config, tmp_path, source, policy, compile=True, saved_share=0.5)
        for policy in ("keep", "recompute")
    ]
    assert results[0][0] == pytest.approx(loss, rel=1e-6)
    assert far(results[0][1], expected) == {}
    assert results[0][0] == results[1][0]
    assert [name for name, grad in results[0][1].items() if not torch.equal(results[1][1][name], grad)] == []


def test_shared_keys_and_values_of_layers_in_parts_give_nearly_the_plain_gradients(tmp_path: Path) -> None:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    config = tiny_config("gemma4_text", **experts)
    loss, expected, source = plain_gradients(config, attention_of(config))
    found_loss, found = streamed_gradients(config, tmp_path, source, "recompute", slices=2, expert_parts=2)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert far(found, expected, 1e-5) == {}


def mistral_large4() -> PretrainedConfig:
    """Six layers, of which four read the latent keys and values of the first two."""
    text = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "index_topk": 64,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "max_position_embeddings": 128,
        "no_rope_layers": [1, 0] * 3,
        "kv_source_layers": [0, 1] * 3,
    }
    vision = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "head_dim": 16}
    return known_config("mistral_large4", text_config=text, vision_config=vision)


@pytest.mark.parametrize("slices", [1, 2])
def test_shared_latents_of_mistral_large_4_give_the_plain_gradients(slices: int, tmp_path: Path) -> None:
    config = mistral_large4()
    loss, expected, source = plain_gradients(config, attention_of(config))
    found_loss, found = streamed_gradients(config, tmp_path, source, "recompute", slices)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert far(found, {name: grad for name, grad in expected.items() if name in found}) == {}


# ---------------------------------------------------------------------- any container


class Shelf(UserDict[str, Any]):
    """A mapping that is no dict."""


class Strict(dict[str, Any]):
    """A dict that counts how it is written to, and holds a field beside its items."""

    writes = 0

    def __setitem__(self, key: str, value: Any) -> None:
        self.writes += 1
        super().__setitem__(key, value)


@dataclass(slots=True)
class Slotted:
    kept: Any = None


@dataclass
class Plain:
    kept: Any = None


def put_item(container: Any, tensor: Tensor) -> None:
    container["kept"] = (tensor, {"twice": tensor})


def put_field(container: Any, tensor: Tensor) -> None:
    container.kept = (tensor, {"twice": tensor})


def put_last(container: Any, tensor: Tensor) -> None:
    container.append((tensor, {"twice": tensor}))


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], None], Callable[[Any], Any]]] = {
    "dict": (dict, put_item, lambda c: c["kept"]),
    "mapping": (Shelf, put_item, lambda c: c["kept"]),
    "dict of its own kind": (Strict, put_item, lambda c: c["kept"]),
    "ordered": (OrderedDict, put_item, lambda c: c["kept"]),
    "default": (lambda: defaultdict(list), lambda c, t: put_last(c["kept"], t), lambda c: c["kept"][-1]),
    "list": (list, put_last, lambda c: c[-1]),
    "deque": (lambda: deque(maxlen=3), put_last, lambda c: c[-1]),
    "namespace": (SimpleNamespace, put_field, lambda c: c.kept),
    "dataclass": (Plain, put_field, lambda c: c.kept),
    "slots": (Slotted, put_field, lambda c: c.kept),
    "model output": (BaseModelOutput, lambda c, t: setattr(c, "hidden_states", (t, {"twice": t})), lambda c: c[0]),
    "inside another": (lambda: Plain(Shelf()), lambda c, t: put_item(c.kept, t), lambda c: c.kept["kept"]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_container_written_in_a_forward_takes_the_nodes_output_in_its_place(kind: str) -> None:
    make, put, get = CONTAINERS[kind]
    outside, inner, outer = make(), torch.ones(2), torch.zeros(2)
    arguments = Arguments((outside,), {"same": outside, "scale": 2.0})
    copy = arguments.copy(arguments.leaves)
    assert type(copy.args[0]) is type(outside)
    assert copy.args[0] is copy.kwargs["same"]
    assert copy.args[0] is not outside
    put(copy.args[0], inner)
    written, tensors = copy.written("probe")
    assert [id(tensor) for tensor in tensors] == [id(inner)]
    assert written.is_like(arguments_written(make, put))
    arguments.write(written, [outer])
    found, inside = get(outside)
    assert found is outer
    assert inside["twice"] is outer


def arguments_written(make: Callable[[], Any], put: Callable[[Any, Tensor], None]) -> Any:
    """What another run writes."""
    outside = make()
    arguments = Arguments((outside,), {"same": outside, "scale": 2.0})
    copy = arguments.copy(arguments.leaves)
    put(copy.args[0], torch.ones(3))
    return copy.written("probe")[0]


def test_container_that_a_forward_only_reads_is_not_written() -> None:
    held = torch.ones(2)
    outside = Strict(kept=(held, 3))
    arguments = Arguments((), {"shared": outside})
    assert [arguments.leaves[position] for position in sorted(arguments.in_containers)] == [held, 3]
    copy = arguments.copy([torch.zeros(2) if torch.is_tensor(x) else x for x in arguments.leaves])
    assert copy.kwargs["shared"]["kept"][0].sum() == 0
    written, tensors = copy.written("probe")
    assert (written.changed, tensors) == ({}, [])
    arguments.write(written, [])
    assert outside["kept"][0] is held
    assert outside.writes == 0


def test_container_entry_that_is_moved_or_removed_goes_past_the_node() -> None:
    held, hidden = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    outside: dict[str, Any] = {"old": held, "gone": 1}
    arguments = Arguments((hidden,), {"shared": outside})
    copy = arguments.copy([x.detach() if torch.is_tensor(x) else x for x in arguments.leaves])
    shared = copy.kwargs["shared"]
    shared["new"], shared["hidden"] = shared.pop("old"), copy.args[0]
    del shared["gone"]
    written, tensors = copy.written("probe")
    assert tensors == []
    arguments.write(written, [])
    assert list(outside) == ["new", "hidden"]
    assert outside["new"] is held
    assert outside["hidden"] is hidden


def test_container_that_holds_itself_is_copied() -> None:
    outside: list[Any] = [torch.ones(1)]
    outside.append(outside)
    arguments = Arguments((outside,), {})
    copy = arguments.copy(arguments.leaves)
    assert copy.args[0][1] is copy.args[0]
    assert copy.args[0] is not outside


def test_modules_configs_and_functions_are_handed_on_as_they_are() -> None:
    given = [nn.Linear(1, 1), PretrainedConfig(), print, torch.float32, "text", None]
    arguments = Arguments(given, {})
    assert [x is y for x, y in zip(arguments.copy(arguments.leaves).args, given, strict=True)] == [True] * len(given)


# ---------------------------------------------------------------------- made-up ways between layers


def hands_on(monkeypatch: pytest.MonkeyPatch, way: Callable[[nn.Module, Tensor, Any], Tensor | None]) -> None:
    """Layers of Llama that hand something on: `way` takes layer, hidden states and container, and gives a summand."""
    forward = LlamaDecoderLayer.forward

    def handing(self: Any, hidden_states: Tensor, shared: Any = None, **kwargs: Any) -> Tensor:
        result = forward(self, hidden_states, **kwargs)
        assert isinstance(result, Tensor)
        summand = way(self, torch.tanh(result), shared)
        return result if summand is None else result + summand

    monkeypatch.setattr(LlamaDecoderLayer, "forward", handing)


def batch_with(shared: Any) -> dict[str, Any]:
    """A batch that brings the container along, which the model hands to its layers."""
    return {**padded_batch(), "shared": shared}


def by_dict(layer: nn.Module, hidden: Tensor, shared: Any) -> Tensor | None:
    before = shared.get("kept")
    shared["kept"] = hidden if before is None else before + hidden
    return before  # type: ignore[no-any-return]


def by_namespace(layer: nn.Module, hidden: Tensor, shared: Any) -> Tensor | None:
    shared.kept = [*getattr(shared, "kept", []), hidden]
    return shared.kept[0] if len(shared.kept) > 2 else None


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize(("make", "way"), [(Shelf, by_dict), (dict, by_dict), (SimpleNamespace, by_namespace)])
def test_tensors_that_layers_hand_on_in_a_container_have_their_gradients(
    make: Callable[[], Any], way: Any, activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands_on(monkeypatch, way)
    config = tiny_config("llama")
    loss, expected, source = plain_gradients(config, "sdpa", batch_with(make()))
    batch = batch_with(make())
    found_loss, found = streamed_gradients(config, tmp_path, source, activations, batch=batch)
    assert found_loss == loss
    assert [name for name, grad in expected.items() if not torch.equal(found[name], grad)] == []


def by_writing(layer: nn.Module, hidden: Tensor, shared: Any) -> Tensor | None:
    with torch.no_grad():
        shared["sum"] += hidden.mean()
    return None


def by_drawing_in(layer: nn.Module, hidden: Tensor, shared: Any) -> Tensor | None:
    shared["sum"].add_(hidden.mean())
    return None


@pytest.mark.parametrize("way", [by_writing, by_drawing_in])
def test_tensor_of_a_container_that_is_written_into_is_refused(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands_on(monkeypatch, way)
    config = tiny_config("llama")
    source = plain_gradients(config, "sdpa", batch_with({"sum": torch.zeros(())}))[2]
    batch = batch_with({"sum": torch.zeros(())})
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0 writes into a tensor \(\) that it was given"):
        streamed_gradients(config, tmp_path, source, batch=batch)


def test_container_whose_tensors_have_no_batch_dimension_refuses_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_sum(layer: nn.Module, hidden: Tensor, shared: Any) -> Tensor | None:
        shared["sum"] = hidden.sum((0, 1))
        return None

    hands_on(monkeypatch, by_sum)
    monkeypatch.setattr(Shelf, "__getitem__", lambda self, key: Shelf() if isinstance(key, slice) else self.data[key])
    config = tiny_config("llama")
    source = plain_gradients(config, "sdpa", batch_with(Shelf()))[2]
    with pytest.raises(ConfigError, match=r"what model\.layers\.0 writes to shared\.data cannot be cut"):
        streamed_gradients(config, tmp_path, source, slices=2, batch=batch_with(Shelf()))


@pytest.mark.parametrize("activations", [pytest.param("keep", marks=pytest.mark.slow), "recompute"])
def test_tensors_in_containers_do_not_outlive_their_step(activations: Any, tmp_path: Path) -> None:
    config, counts = tiny_config("gemma4_text"), []
    train = TrainConfig(steps=3, batch=BATCH, activations=activations)
    with opened(config, tmp_path, PLACES["ram"], train, tokens=24) as session:
        for step in (1, 2, 3):
            session.engine.train_step(step, 1e-3, [padded_batch()])
            session.player.drain()
            session.player.take_events()
            gc.collect()
            counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
    assert counts[2] <= counts[1]
