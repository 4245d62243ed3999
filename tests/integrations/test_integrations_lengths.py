"""Compiled loops whose batches differ: how much code serves them, and that a batch has its bits whatever came before.

torch's kernels run the compiler's graphs here. Which graph a batch gets is asked for by guards, as it is on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import tiny_config
from tiny_quantised import quantised_folders
from tiny_runs import plain_model
from tiny_vision import IMAGE_TOKEN, NUM_IMAGE_TOKENS, vision_config
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch.utils._pytree import tree_leaves

import megatier
from megatier.integrations.streamed import Streamed
from megatier.optim.gradient_sums import GradientSums
from megatier.optim.optimizer import RunOptimizer

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 24, "head_dim": 8}
SHAPES = [(2, 7), (3, 12), (2, 40), (4, 33)]
"""Rows and tokens of batches, none of which has one row or one token."""
Step = Callable[[Streamed, Tensor], Tensor]
Model = Callable[[Path], Any]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Notes each graph that is compiled."""
    found: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        found.append(graph)
        return aot_eager_decomp_partition(graph, examples)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


def ids_of(rows: int, length: int) -> Tensor:
    return torch.randint(3, 140, (rows, length), generator=torch.Generator().manual_seed(rows * 99 + length))


def loss_of(streamed: Streamed, ids: Tensor, **others: Any) -> Tensor:
    loss: Tensor = streamed.model(input_ids=ids, labels=ids, **others).loss
    return loss


# ---------------------------------------------------------------------- what a step may be


def padded(streamed: Streamed, ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[0, : ids.shape[1] // 3] = 0
    return loss_of(streamed, ids, attention_mask=mask, num_items_in_batch=ids.numel())


def apart(streamed: Streamed, ids: Tensor) -> Tensor:
    """Two documents a row."""
    half = ids.shape[1] // 2
    order = torch.cat([torch.arange(half), torch.arange(ids.shape[1] - half)])
    return loss_of(streamed, ids, position_ids=order.expand(ids.shape).contiguous())


def forwards(streamed: Streamed, ids: Tensor) -> Tensor:
    """Several forwards of other lengths, some without gradients, an evaluation before, and the last tokens alone."""
    streamed.model.eval()
    with torch.no_grad():
        loss_of(streamed, ids[:, :-1])
    streamed.model.train()
    first = loss_of(streamed, ids)
    with torch.no_grad():
        reference = loss_of(streamed, ids[:, 1:])
    kept = streamed.model(input_ids=ids, labels=ids[:, -3:], logits_to_keep=3).loss
    loss: Tensor = first + kept - loss_of(streamed, ids[:2]) - reference
    return loss


def generating(streamed: Streamed, ids: Tensor) -> Tensor:
    streamed.model.eval()
    with torch.no_grad():
        streamed.model.generate(  # type: ignore[operator]
            input_ids=ids[:1], max_new_tokens=2, do_sample=False
        )
    streamed.model.train()
    return loss_of(streamed, ids)


def with_images(streamed: Streamed, ids: Tensor) -> Tensor:
    """An image in each row, whose tokens see each other."""
    ids = ids.clone()
    ids[:, 1 : 1 + NUM_IMAGE_TOKENS] = IMAGE_TOKEN
    pixels = torch.randn(len(ids), 3, 16, 16, generator=torch.Generator().manual_seed(len(ids)))
    kinds = (ids == IMAGE_TOKEN).long()
    return loss_of(streamed, ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, token_type_ids=kinds)


def in_groups(streamed: Streamed, ids: Tensor) -> Tensor:
    """Two groups, of which one has fewer rows and tokens."""
    loss_of(streamed, ids[:2, :-2]).backward()
    return loss_of(streamed, ids)


LORA = partial(LoraConfig, r=4, target_modules=["q_proj", "down_proj"])
EXPERTS: dict[str, Any] = {**SMALL, "num_experts": 4, "moe_intermediate_size": 8}
KINDS = ["sliding_attention", "full_attention"]
PARTS: dict[str, Any] = {
    "text_config": {"num_hidden_layers": 2, "layer_types": KINDS},
    "vision_config": {"num_hidden_layers": 2},
}


def llama(_: Path) -> Any:
    return plain_model(tiny_config("llama", **SMALL))


def experts(_: Path) -> Any:
    return plain_model(tiny_config("qwen3_moe", **EXPERTS))


def vision(_: Path) -> Any:
    return plain_model(vision_config("gemma3", **PARTS))


def quantised(kind: str, folder: Path) -> Any:
    return quantised_folders(folder, kind, num_hidden_layers=2)[0]


CASES: dict[str, tuple[Model, dict[str, Any], Step, int]] = {
    "padded": (llama, {}, padded, 3),
    "apart": (llama, {}, apart, 3),
    "forwards": (llama, {}, forwards, 3),
    "in_groups": (llama, {"accumulation_steps": 2}, in_groups, 3),
    "tiles": (llama, {"tile_tokens": 16}, loss_of, 5),
    "generating": (llama, {"fused_loss": False}, generating, 3),
    "recomputed": (llama, {"activations": "recompute"}, loss_of, 3),
    "adapters": (llama, {"peft_config": LORA(use_dora=True)}, loss_of, 4),
    "nf4": (partial(quantised, "nested"), {"peft_config": LORA()}, loss_of, 4),
    "fp8": (partial(quantised, "block"), {"peft_config": LORA()}, loss_of, 4),
    "experts": (experts, {"expert_parts": 2}, loss_of, 5),
    "images": (vision, {}, with_images, 7),
}
"""The model, options of `megatier.stream`, a step, and how many graphs serve all batches."""
QUICK = {"padded", "forwards"}


def losses_of(streamed: Streamed, shapes: list[tuple[int, int]], step: Step, graphs: list[Any]) -> list[Any]:
    """The loss and the norm of steps that change no weight, and how many graphs there were after each."""
    found = []
    for rows, length in shapes:
        loss = step(streamed, ids_of(rows, length))
        loss.backward()
        norm = streamed.grad_norm()
        streamed.optimizer.step()
        found.append((loss.item(), norm, len(graphs)))
    return found


def opened(model: Any, **options: Any) -> Streamed:
    tiers = {"device": "cpu", "gpu": "64MiB", "ram": "64MiB"}
    return megatier.stream(model, tiers=tiers, **{"compute_dtype": "fp32", "lr": 0.0, "weight_decay": 0.0, **options})


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES])
def test_loop_with_any_lengths_is_compiled_once_and_a_batch_has_its_bits_whatever_came_before(
    name: str, graphs: list[Any], tmp_path: Path
) -> None:
    made, options, step, count = CASES[name]
    model = made(tmp_path)
    with opened(model, compile=True, **options) as streamed:
        found = losses_of(streamed, SHAPES, step, graphs)
        again = losses_of(streamed, SHAPES[::-1], step, graphs)
    # The first batch has fewer tokens than a tile, so what serves tiles comes with the second one.
    assert [graphs for *_, graphs in found[1:] + again] == [count] * (2 * len(SHAPES) - 1)
    assert [figures[:2] for figures in again[::-1]] == [figures[:2] for figures in found]
    with opened(model, compile=False, **options) as streamed:
        plain = losses_of(streamed, SHAPES, step, graphs)
    for one, other in zip(found, plain, strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "parts", "count"), [("llama", 1, 3), ("qwen3_moe", 2, 5)])
def test_loop_with_products_in_fp8_is_compiled_twice_and_a_batch_has_its_bits_whatever_came_before(
    family: str, parts: int, count: int, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatier.setup.machine.cpu_has_bf16", lambda: True)
    experts = {"num_experts": 4, "moe_intermediate_size": 16} if parts > 1 else {}
    model = plain_model(tiny_config(family, **{**SMALL, "intermediate_size": 48, **experts}))
    options = {"compute_dtype": "bf16", "products": "fp8", "expert_parts": parts}
    with opened(model, compile=True, **options) as streamed:
        found = losses_of(streamed, SHAPES, loss_of, graphs)
        again = losses_of(streamed, SHAPES[::-1], loss_of, graphs)
    # The third batch alone has a number of tokens that is a multiple of 16, and needs no rows that fill it up.
    assert [graphs for *_, graphs in found + again] == [count] * 2 + [count + 1] * 6
    assert [figures[:2] for figures in again[::-1]] == [figures[:2] for figures in found]


def test_optimizer_sees_nothing_of_the_lengths_of_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So its kernels, which are compiled for what they are given, serve all of them."""
    seen: list[Any] = []
    for kind, name in ((GradientSums, "measure"), (RunOptimizer, "apply")):
        whole = getattr(kind, name)

        def noting(*args: Any, name: str = name, whole: Any = whole, **kwargs: Any) -> Any:
            flat = tree_leaves((args[1:], kwargs))
            seen.append((name, *((x.shape, x.dtype) for x in flat if isinstance(x, Tensor))))
            return whole(*args, **kwargs)

        monkeypatch.setattr(kind, name, noting)
    found = []
    with opened(llama(tmp_path), compile=False) as streamed:
        for shape in [*SHAPES, (1, 1)]:
            loss_of(streamed, ids_of(*shape)).backward()
            streamed.optimizer.step()
            found.append(sorted(map(str, seen)))
            seen.clear()
    assert found[0]
    assert found[2:] == found[1:2] * (len(found) - 2)  # in the first step there is nothing to update yet
