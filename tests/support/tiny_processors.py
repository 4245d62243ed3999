"""Tiny processors of vision-language families, made on the spot, with models that fit them, and small pictures."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from composite_models import COMPOSITES
from tiny_models import known_config
from tiny_runs import plain_model
from tiny_vision import NUM_IMAGE_TOKENS, vision_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3Processor, LlavaProcessor, PretrainedConfig, PreTrainedTokenizerFast, ProcessorMixin

FAMILIES = ("gemma3", "llava", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
"""The families of `tiny_vision`. Processors of Qwen's take videos too, for which transformers needs torchvision."""
WITHOUT_TORCHVISION = ("deepseek_vl", "idefics3", "llava_next")
"""More families, whose processors need Pillow alone."""
TEMPLATE = """\
{%- for message in messages -%}
{{ message.role + ":" }}
{%- for part in message.content -%}
{%- if part.type == "image" -%}IMAGE
{%- elif message.role == "assistant" -%}{% generation %}{{ part.text + "<|end|>" }}{% endgeneration %}
{%- else -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}assistant:{%- endif -%}
"""
PINPOINTS = [[16, 16], [16, 32]]
"""Sizes in which LLaVA-NeXT has an image in pieces."""
SPECIAL = {"image_token": "<img>", "video_token": "<vid>", "vision_start_token": "<vs>", "vision_end_token": "<ve>"}


def has_torchvision() -> bool:
    return importlib.util.find_spec("torchvision") is not None


def families(*others: str) -> list[Any]:
    """All families but some, those of Qwen's marked to be left out where torchvision is missing."""
    skipped = pytest.mark.skipif(not has_torchvision(), reason="torchvision is not installed")
    chosen = [family for family in FAMILIES if family not in others]
    return [pytest.param(family, marks=skipped) if family.startswith("qwen") else family for family in chosen]


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """Bytes, special tokens of images, an end and a pad token."""
    alphabet = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=special,
        clean_up_tokenization_spaces=False,
    )


def processor(family: str) -> ProcessorMixin:
    """The processor of a family, for images of 16 x 16 pixels."""
    square = {"height": 16, "width": 16}
    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        tokens = tokenizer(boi_token="<boi>", eoi_token="<eoi>", image_token="<img>")
        template = TEMPLATE.replace("IMAGE", "<boi>")
        images = Gemma3ImageProcessorPil(size=square)
        return Gemma3Processor(images, tokens, chat_template=template, image_seq_length=NUM_IMAGE_TOKENS)
    if family == "deepseek_vl":
        from transformers import DeepseekVLProcessor
        from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil

        template = TEMPLATE.replace("IMAGE", "<img>")
        own_images = DeepseekVLImageProcessorPil(size=square, min_size=4)
        return DeepseekVLProcessor(own_images, tokenizer(image_token="<img>"), template, NUM_IMAGE_TOKENS)
    if family == "idefics3":
        from transformers import Idefics3Processor
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        edge = {"longest_edge": 16}
        small = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
        names = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
        tokens = tokenizer(**{f"token_{number}": name for number, name in enumerate(names)})
        template = TEMPLATE.replace("IMAGE", "<image>")
        return Idefics3Processor(small, tokens, image_seq_len=NUM_IMAGE_TOKENS, chat_template=template)
    if family in ("llava", "llava_next"):
        return of_llava(family)
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    cut: Any = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    sizes = {"shortest_edge": 64, "longest_edge": 512}
    template = TEMPLATE.replace("IMAGE", "<vs><img><ve>")
    kinds: Any = (Qwen3VLProcessor, Qwen3VLVideoProcessor)
    if family == "qwen2_5_vl":
        kinds = (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor)
    kind, videos = kinds
    made: ProcessorMixin = kind(
        Qwen2VLImageProcessor(**cut, size=sizes), tokenizer(**SPECIAL), videos(**cut), chat_template=template
    )
    return made


def of_llava(family: str) -> ProcessorMixin:
    """The processor of LLaVA, or of a family like it."""
    from transformers import LlavaNextProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    sizes: Any = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    kind: Any = LlavaProcessor
    images: Any = CLIPImageProcessorPil(**sizes)
    if family == "llava_next":
        kind = LlavaNextProcessor
        images = LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=PINPOINTS)
    made: ProcessorMixin = kind(
        images,
        tokenizer(image_token="<img>"),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<img>"),
    )
    return made


def other_config(family: str, image_token: int) -> PretrainedConfig:
    """The tiny model of a family of WITHOUT_TORCHVISION, with the special token of its processor."""
    options = dict(COMPOSITES[family])
    options["text_config"] = {**options["text_config"], "vocab_size": 320}
    options["image_token_id" if "image_token_id" in options else "image_token_index"] = image_token
    if family != "idefics3":
        options["vision_config"] = {**options["vision_config"], "patch_size": 8}
    if family == "llava_next":
        options |= {"image_grid_pinpoints": PINPOINTS, "vision_feature_select_strategy": "default"}
    return known_config(family, **options)


def config_of(family: str, own: Any) -> PretrainedConfig:
    """The tiny model of a family, with the special tokens of its processor."""

    def number(token: str) -> int:
        return int(own.tokenizer.convert_tokens_to_ids(token))

    if family in WITHOUT_TORCHVISION:
        return other_config(family, number("<image>" if family == "idefics3" else "<img>"))
    if family == "gemma3":
        tokens = {"boi_token_index": number("<boi>"), "eoi_token_index": number("<eoi>")}
    elif family == "llava":
        tokens = {}
    else:
        names = {"video_token_id": "<vid>", "vision_start_token_id": "<vs>", "vision_end_token_id": "<ve>"}
        tokens = {name: number(token) for name, token in names.items()}
    image = "image_token_id" if family.startswith("qwen") else "image_token_index"
    text = {"vocab_size": 320}
    return vision_config(family, text_config=text, **{image: number("<img>")}, **tokens)


def model_folder(family: str, folder: Path) -> Path:
    """A folder with the tiny model of a family and its processor."""
    own = processor(family)
    torch.manual_seed(0)
    plain_model(config_of(family, own)).save_pretrained(folder)
    own.save_pretrained(folder)
    return folder


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (24, 16)) -> Path:
    """A file with a picture of noise."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)
    return path


def chats(folder: Path, counts: Sequence[int]) -> Path:
    """A file of conversations, each with so many images, which lie beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    number = 0
    for chat, count in enumerate(counts):
        content: list[dict[str, str]] = []
        for _ in range(count):
            name = f"{number}.png"
            picture(folder / name, number, size=(16 + 8 * (number % 3), 16))
            content.append({"type": "image", "image": name})
            number += 1
        content.append({"type": "text", "text": f"q{chat}"})
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": f"yes {chat}"}]
        lines.append(json.dumps({"messages": turns}))
    path = folder / "chats.jsonl"
    path.write_text("\n".join(lines))
    return path
