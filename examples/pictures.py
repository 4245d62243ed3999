"""Makes what examples/images.yaml trains on: small pictures, conversations about their colours, and a processor.

    python examples/pictures.py [runs/pictures]

Each conversation has no, one or two pictures. The processor is LLaVA's, with a tokenizer of bytes.
"""

import argparse

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("folder", nargs="?", default="runs/pictures")
if __name__ == "__main__":
    GIVEN = PARSER.parse_args()  # before the imports that take long

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220), "yellow": (240, 220, 40)}
SIZE = 32
"""Width and height of a picture, in pixels."""
CHATS = 300
"""Conversations."""
TEMPLATE = """\
{%- for message in messages -%}
{{ message.role + ": " }}
{%- for part in message.content -%}
{%- if part.type == "image" -%}<image>
{%- elif message.role == "assistant" -%}{% generation %}{{ part.text + "<|end|>" }}{% endgeneration %}
{%- else -%}{{ part.text + "\\n" }}
{%- endif -%}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "assistant: " }}{%- endif -%}
"""


def draw(path: Path, colour: str, dice: random.Random) -> None:
    """Write a picture of a square or a circle of this colour, somewhere on grey."""
    image = Image.new("RGB", (SIZE, SIZE), (128, 128, 128))
    left, top, side = dice.randrange(4, 10), dice.randrange(4, 10), dice.randrange(12, 20)
    pen = ImageDraw.Draw(image)
    shape = dice.choice([pen.rectangle, pen.ellipse])
    shape((left, top, left + side, top + side), fill=COLOURS[colour])
    image.save(path)


def make_chats(folder: Path) -> None:
    """Write pictures, and conversations about them."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(0)
    records = []
    for chat in range(CHATS):
        colours = [dice.choice(list(COLOURS)) for _ in range(dice.choice([0, 1, 1, 1, 2]))]
        names = [f"{chat}-{number}.png" for number in range(len(colours))]
        for name, colour in zip(names, colours, strict=True):
            draw(folder / name, colour, dice)

        question = "<image>" * len(names) + "Which colour?"
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": " and ".join(colours) or "no picture"},
        ]
        records.append({"messages": turns, "images": names})
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))


def make_processor(folder: Path) -> None:
    """Write LLaVA's processor, for pictures of one size, with a tokenizer of bytes."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    of_bytes = Tokenizer(models.BPE(vocab=letters, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_bytes.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=of_bytes,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens={"image_token": "<image>"},  # token 258, after 256 bytes, end and pad
    )
    side = {"height": SIZE, "width": SIZE}
    LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=side),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def main(folder: str) -> None:
    """Write conversations and processor."""
    make_chats(Path(folder) / "chats")
    make_processor(Path(folder) / "processor")


if __name__ == "__main__":
    main(GIVEN.folder)
