"""Opens tokenizers: the model's own, or one of bytes that is built on the spot.

The byte tokenizer needs no download and knows every text: token k is byte k, and token 256 ends a document. It saves as
any Hugging Face tokenizer does, and `AutoTokenizer` loads it again.
"""

from __future__ import annotations

import contextlib
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatier.config.data_section import BYTE_TOKENIZER, PROCESSOR_FILES
from megatier.config.schema import RunConfig
from megatier.errors import DataError
from megatier.foreign import (
    SETTINGS_BYTES_MAX,
    TABLE_BYTES_MAX,
    at_one_commit,
    printable,
    read_input,
    read_object,
    read_text,
    reading,
)

END_OF_TEXT = "<|endoftext|>"
"""Ends a document; token 256."""

OBJECTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
    "processor_config.json",
    "config.json",
)
"""Files in JSON that a tokenizer may be made of."""
TABLE_FILES = ("merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json")
"""Other files with tables of tokens."""
TEXTS = ("chat_template.jinja",)
"""Files of text."""
SMALL = ("special_tokens_map.json", "chat_template.json", "processor_config.json", "config.json", *TEXTS)
"""Files with settings, not with tables of tokens, which are small."""
SAMPLE = " ".join(string.printable[:95])
"""A text of all letters, figures and signs."""
SAMPLE_TOKENS = 500
"""Tokens of its own that a tokenizer is tried with besides."""
TOKENIZER_REMEDY = "Give data.tokenizer a folder, a hub id or bytes."

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
"""Writes each turn under its role, and an empty line after it."""


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Return the run's tokenizer: `data.tokenizer`, else the model's own; with `data.chat_template` if it is given.

    Raises:
        DataError: there is none at this path, it has no end-of-text token to put between documents, or the template
            cannot be read.
    """
    name = config.data.tokenizer or config.model.path
    tokenizer = byte_tokenizer() if name is None or name == BYTE_TOKENIZER else _load(name)
    if (path := config.data.chat_template) is not None:
        try:
            tokenizer.chat_template = read_text(Path(path).expanduser(), DataError, pipes=True)
        except FileNotFoundError as error:
            raise DataError(f"data.chat_template: cannot read {path}: {error.strerror}.") from error
    return tokenizer


def tokenizer_files(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[Path]:
    """Return the files that the run's tokenizer may be made of, by the names that Hugging Face gives them.

    Args:
        config: the run.
        tokenizer: as `load_tokenizer` gives it; its class may have names of its own.
    """
    name = config.data.tokenizer or config.model.path
    if name is None or name == BYTE_TOKENIZER:
        return []
    folder = folder_of(name)
    if folder is None:
        return []

    names = {*OBJECTS, *TABLE_FILES, *TEXTS, *tokenizer.vocab_files_names.values()}
    if config.data.images:
        names |= {*PROCESSOR_FILES}
    # A folder may have a tokenizer for each range of versions of transformers, and several templates.
    for pattern in ("tokenizer*.json", "additional_chat_templates/*.jinja"):
        names |= {str(path.relative_to(folder)) for path in folder.glob(pattern)}
    return [folder / name for name in sorted(names)]


def _load(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or of the hub, after a look at its files."""
    folder = folder_of(name)

    # A name on the hub has one slash at most, so these are paths.
    if folder is None and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise DataError(f"no tokenizer at {printable(name)}: there is no such folder. {TOKENIZER_REMEDY}")
    names = ", ".join(_check_files(folder))
    complaint = f"no tokenizer at {printable(name)}{f', made of {names}' if names else ''}"
    with reading(complaint, DataError, remedy=TOKENIZER_REMEDY):
        # Code that comes with a tokenizer is never run.
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)

        # Damage that no constructor looks at shows here, and not in the middle of the text.
        is_empty = _is_empty(tokenizer)
        end = tokenizer.eos_token_id
        template = tokenizer.chat_template

    # transformers makes a tokenizer without a vocabulary for some models whose folder has none.
    if is_empty:
        raise DataError(
            f"{complaint}: it knows {len(tokenizer)} tokens, and makes none of a text but special and unknown ones. "
            f"{TOKENIZER_REMEDY}"
        )
    if end is None:
        raise DataError(f"the tokenizer at {name} has no eos_token, which ends each document; set it in its config.")
    if type(end) is not int or not isinstance(template, str | dict | None):
        raise DataError(f"{complaint}: eos_token or chat_template is of another kind than text. {TOKENIZER_REMEDY}")
    return tokenizer


def find_special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that say nothing about a text: special ones, and the one for what is unknown."""
    return [number for number in {*tokenizer.all_special_ids, tokenizer.unk_token_id} if number is not None]


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the rows that an embedding needs for a tokenizer: one more than the largest id."""
    # Ids may have holes between them, and then there are fewer tokens than that. Two tokens that read the same are one
    # in `get_vocab`, so the last id may be missing there.
    largest = max(tokenizer.get_vocab().values(), default=-1)
    return max(len(tokenizer), largest + 1)


def _is_empty(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether nothing of a text survives: neither of all letters, nor of tokens of its own."""
    empty = set(find_special_tokens(tokenizer))

    # A vocabulary need not have letters at all, so tokens of its own are tried as well.
    most = min(len(tokenizer), SAMPLE_TOKENS)
    visible = [number for number in range(most) if number not in empty]
    sample = f"{SAMPLE} {tokenizer.decode(visible)}"
    encoded = tokenizer([sample], add_special_tokens=False, verbose=False)
    (ids,) = encoded["input_ids"]
    return empty.issuperset(ids)


def folder_of(name: str) -> Path | None:
    """Return the folder of a tokenizer, or the hub's cache of it; None: transformers is to say what is wrong."""
    folder = Path(name).expanduser()

    # A text that is no path at all, such as a name that is too long, is an error of the system.
    with contextlib.suppress(OSError):
        if folder.is_dir():
            return folder

    # Imported only here, because the client is slow to import and most runs never need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(OSError, HFValidationError):
        return at_one_commit(snapshot_download(name, allow_patterns=[*OBJECTS, *PROCESSOR_FILES, *TABLE_FILES, *TEXTS]))
    return None


def _check_files(folder: Path | None) -> list[str]:
    """Look at every file that a tokenizer is made of before its library does, and return the names.

    Raises:
        DataError: one is no plain file, too large or too deep, or its JSON is damaged.
    """
    if folder is None:
        return []
    present = []
    for name in (*OBJECTS, *TABLE_FILES, *TEXTS):
        with contextlib.suppress(FileNotFoundError):
            path = folder / name
            most = SETTINGS_BYTES_MAX if name in SMALL else TABLE_BYTES_MAX

            read = read_object if name in OBJECTS else read_input
            read(path, most, DataError)
            present.append(name)

    return present


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 257 tokens; decoding gives back any text, byte for byte."""
    alphabet = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))

    # A space put before a text would come back when it is decoded.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()

    # With split_special_tokens a text that spells the end token stays text.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        split_special_tokens=True,
        chat_template=BYTE_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _byte_characters() -> list[str]:
    """Return the printable character that byte-level tokenizers write for each byte, as GPT-2 chose them."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters = []
    others = 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
            continue

        # The rest have the characters from 256 on, in their order.
        characters.append(chr(256 + others))
        others += 1
    return characters
