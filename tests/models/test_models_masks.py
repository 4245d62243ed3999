"""Masks by blocks: made once for each length, and equal to those that PyTorch makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import masking_utils
from transformers.integrations import flex_attention as flex_integration
from transformers.masking_utils import causal_mask_function, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatier.engine.mask_answers import answering
from megatier.models.masks import CAUSAL_KERNEL_OPTIONS, MASKS_MAX, BlockMasks, causal, is_causal

CPU = torch.device("cpu")
Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def made(masks: BlockMasks, rows: int, tokens: int, positions: Tensor | None = None) -> BlockMask:
    """The mask that Hugging Face makes for a batch."""
    config = tiny_config("llama")
    config._attn_implementation = "flex_attention"
    hidden = torch.empty(rows, tokens, config.hidden_size)
    with answering({} if positions is None else {"position_ids": positions}, masks):
        found = create_causal_mask(config, hidden, None, None, position_ids=positions)
    assert isinstance(found, BlockMask)
    return found


def test_causal_mask_is_made_once_for_one_row_and_all_batches() -> None:
    masks = BlockMasks()
    before = masking_utils.create_block_mask  # type: ignore[attr-defined]
    first = made(masks, 3, 300)
    assert made(masks, 2, 300) is first
    assert made(masks, 3, 200) is not first
    assert first.kv_num_blocks.shape[0] == 1
    expected = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 300, 300, device=CPU)
    assert torch.equal(first.to_dense(), expected.to_dense())
    assert first.mask_mod is not causal, "the last block is not full"
    assert masking_utils.create_block_mask is before  # type: ignore[attr-defined]


def test_mask_of_documents_is_made_for_each_batch() -> None:
    masks = BlockMasks()
    positions = torch.cat([torch.arange(130), torch.arange(270)]).repeat(2, 1)
    first, second = (made(masks, 2, 400, positions) for _ in range(2))
    assert first is not second
    assert first.kv_num_blocks.shape[0] == 2
    # The blocks of the second document's end see nothing of the first document's whole block.
    assert first.to_dense()[0, 0].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert masks._made == {}
    assert first.mask_mod is not causal


def test_masks_are_held_for_a_few_lengths() -> None:
    masks = BlockMasks()
    for tokens in range(1, MASKS_MAX + 5):
        masks.create(causal_mask_function, None, None, tokens, tokens, CPU, _compile=True)
    assert len(masks._made) == MASKS_MAX


MASKS: dict[str, tuple[Mod, tuple[int, int], bool]] = {
    "causal": (lambda b, h, q, k: q >= k, (512, 512), True),
    "causal, written otherwise": (lambda b, h, q, k: ~(k > q), (512, 512), True),
    "one block": (lambda b, h, q, k: q >= k, (128, 128), True),
    "a last block that is not full": (lambda b, h, q, k: q >= k, (500, 500), False),
    "more keys": (lambda b, h, q, k: q >= k, (256, 512), False),
    "a window": (lambda b, h, q, k: (q >= k) & (q - k < 200), (512, 512), False),
    "a narrow window": (lambda b, h, q, k: (q >= k) & (q - k < 10), (512, 512), False),
    "a window that begins late": (lambda b, h, q, k: (q >= k) & (q - k < 500), (512, 512), False),
    "a diagonal that is seen whole": (lambda b, h, q, k: q // 128 >= k // 128, (512, 512), False),
    "a token that sees nothing": (lambda b, h, q, k: (q >= k) & (q != 130), (512, 512), False),
    "no mask": (lambda b, h, q, k: q >= 0, (512, 512), False),
    "the other way": (lambda b, h, q, k: q <= k, (512, 512), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_is_taken_for_causal_only_if_it_is_causal_in_whole_blocks(name: str) -> None:
    mask_mod, (queries, keys), expected = MASKS[name]
    made = BlockMasks().create(mask_mod, None, None, queries, keys, CPU)
    assert (made.mask_mod is causal) == expected == is_causal(made)


def test_mask_that_differs_from_head_to_head_is_not_taken_for_causal() -> None:
    made = BlockMasks().create(lambda b, h, q, k: (q >= k) & ((h == 0) | (q != 130)), None, 2, 256, 256, CPU)
    assert not is_causal(made)


def test_mask_that_hugging_face_makes_of_whole_blocks_is_causal_and_with_documents_is_not() -> None:
    assert made(BlockMasks(), 2, 256).mask_mod is causal
    positions = torch.cat([torch.arange(128), torch.arange(128)])[None]
    assert made(BlockMasks(), 1, 256, positions).mask_mod is not causal


@pytest.mark.parametrize("tokens", [256, 250])
def test_kernel_takes_for_granted_what_the_mask_guarantees_also_in_a_compiled_layer(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = made(BlockMasks(), 1, tokens)
    given: list[dict[str, Any] | None] = []
    real = flex_integration.compile_friendly_flex_attention

    def noted(*args: Any, kernel_options: dict[str, Any] | None = None, **others: Any) -> Any:
        given.append(kernel_options)
        return real(*args, kernel_options=kernel_options, **others)

    monkeypatch.setattr(flex_integration, "compile_friendly_flex_attention", noted)
    query, key, value = (torch.randn(1, 2, tokens, 16) for _ in range(3))
    run: Any = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    module = torch.nn.Module()
    torch.compile(lambda q, k, v: run(module, q, k, v, mask)[0], fullgraph=True, backend="eager")(query, key, value)
    assert given == [CAUSAL_KERNEL_OPTIONS if tokens == 256 else None]


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 128), ((4, 4), 64)])
def test_kernel_on_cuda_that_takes_it_for_granted_gives_the_same_bits(heads: tuple[int, int], size: int) -> None:
    tokens = 1024
    kind: Any = {"device": "cuda", "dtype": torch.bfloat16}
    query, key, value, slope = (
        torch.randn(2, count, tokens, size, **kind) for count in (heads[0], heads[1], heads[1], heads[0])
    )
    mask = BlockMasks().create(lambda b, h, q, k: q >= k, None, None, tokens, tokens, "cuda")
    assert mask.mask_mod is causal
    plain = create_block_mask(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device="cuda")
    leaves = [x.requires_grad_() for x in (query, key, value)]
    run: Any = torch.compile(flex_attention, dynamic=False)
    found: list[list[Tensor]] = []
    for block_mask, options in ((plain, None), (mask, CAUSAL_KERNEL_OPTIONS)):
        output = run(*leaves, block_mask=block_mask, enable_gqa=True, kernel_options=options)
        found.append([output, *torch.autograd.grad(output, leaves, slope)])
    assert all(map(torch.equal, *found))
