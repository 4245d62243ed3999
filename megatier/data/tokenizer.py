"""Tokenizers: the model's own, or one of bytes that is built on the spot.

The byte tokenizer needs no download and has no unknown text: token k is byte k, token 256 ends a document. It saves as
any Hugging Face tokenizer does, and `AutoTokenizer` loads it again.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatier.config import BYTE_TOKENIZER, RunConfig
from megatier.errors import DataError

END_OF_TEXT = "<|endoftext|>"
"""Ends a document; token 256."""

BYTE_CHAT_TEMPLATE = """\
{% for message in messages %}
{{ message.role }}:
{% if message.role == "assistant" %}
{% generation %}{{ message.content + "\\n\\n" }}{% endgeneration %}
{% else %}
{{ message.content + "\\n\\n" }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}
assistant:
{% endif %}
"""
"""Each turn under its role, with an empty line behind it."""


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """The run's tokenizer: `data.tokenizer`, else the model's own; with `data.chat_template`, if that is given.

    Raises:
        DataError: there is none at this path, it has no end-of-text token to put between documents, or the template
            cannot be read.
    """
    name = config.data.tokenizer or config.model.path
    tokenizer = byte_tokenizer() if name is None or name == BYTE_TOKENIZER else _load(name)
    if (path := config.data.chat_template) is not None:
        try:
            tokenizer.chat_template = Path(path).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.chat_template: cannot read {path}: {error}.") from error
    return tokenizer


def _load(name: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"no tokenizer at {name}: {reason} Give data.tokenizer a folder, a hub id or bytes.") from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer at {name} has no eos_token, which ends each document; set it in its config.")
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 257 tokens; decoding gives back any text, byte for byte."""
    alphabet = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # split_special_tokens: a text that spells the end token stays text.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        split_special_tokens=True,
        chat_template=BYTE_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, as GPT-2 chose them."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    written = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [written[byte] for byte in range(256)]
