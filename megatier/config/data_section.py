"""The section `data` of a run's configuration: which texts it learns from, and how they become sequences.

`config.schema` has the other sections. Pure: no torch, and no file is opened.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from megatier.config.section import Section, explained
from megatier.config.values import ByteCount

PYTHON_STDLIB = "python-stdlib"
"""The entry of `data.files` that stands for the source files of Python's own standard library."""

DATASET_INFO = "dataset_info.json"
"""The file of LLaMA-Factory that lists datasets. `<path>/dataset_info.json#<name>` is an entry of `data.files`."""

PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json")
"""Files of a processor of images that no tokenizer has."""
BYTE_TOKENIZER = "bytes"
"""The value of `data.tokenizer` that stands for the byte-level tokenizer, which needs no download."""

Chat = Literal["messages", "sharegpt", "alpaca", "prompt_completion"]
"""The shapes of conversations."""


@explained
@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Section):
    """The texts to learn from, and how they become sequences."""

    NAME = "data"

    files: tuple[str, ...] = ()
    """Files, folders or globs; a folder written by Hugging Face's save_to_disk; or PATH/dataset_info.json#NAME of
    LLaMA-Factory. "python-stdlib" stands for the source of Python's standard library. An entry that is named twice
    counts twice. Give either this or data.dataset."""
    dataset: str | None = None
    """Dataset that Hugging Face's `datasets` loads: a name on the hub, such as org/name, or a folder. This needs the
    extra megatier[datasets]."""
    subset: str | None = None
    """Subset of data.dataset, if it has several."""
    split: str = "train"
    """Split of data.dataset to train on."""
    revision: str | None = None
    """Branch, tag or commit of data.dataset on the hub. None: its main branch."""
    streaming: bool = False
    """Read data.dataset while the run goes on, so that no drive has to hold it. False: tokenise it whole before the
    first step."""
    format: Literal["auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"] = "auto"
    """How files are read: as one text each, or as records. Records are JSON objects, one a line or in an array, or rows
    of a table; parquet and arrow need the extra megatier[data]. auto: by the suffix, before that of a compression (.gz,
    .bz2, .xz, .zst). A .json file is one text unless chat is set or it begins with a record."""
    skip_bad: bool = False
    """Leave out records that cannot be read or that the chat template refuses. The run prints their number and where
    the first ones are; with data.streaming at its end. False: the first such records end the run."""
    text_field: str = "text"
    """Key of the text in each record."""
    chat: Chat | None = None
    """Shape of records that are conversations; only the assistant's turns are learnt. None: records are texts."""
    chat_template: str | None = None
    """Jinja file to use instead of the tokenizer's chat template. None: the tokenizer's own."""
    images: bool = False
    """Read the images of conversations. The model's own processor makes pixels and tokens of them. This needs the extra
    megatier[images]. False: a conversation with images is refused."""
    max_patches: int | None = None
    """Most image patches in a sequence, at least 1. It lets conversations with images share a sequence, without seeing
    each other. If the processor makes all images equally large, it counts images instead. None: each conversation is a
    padded sequence."""
    cross_documents: bool | None = None
    """Whether documents in one sequence see each other. False: attention and positions start anew at each document,
    which costs memory and time (docs/data.md). None: true for texts, false for conversations."""
    suffixes: tuple[str, ...] = (
        ".txt",
        ".md",
        ".rst",
        ".py",
        ".json",
        ".jsonl",
        ".ndjson",
        ".csv",
        ".tsv",
        ".parquet",
        ".arrow",
        ".html",
        ".tex",
        ".c",
        ".h",
        ".cpp",
        ".rs",
    )
    """Suffixes of the files that are taken from a folder; hidden files (a dot begins their name) are not. Files and
    globs named in data.files are taken whatever their suffix."""
    tokenizer: str | None = None
    """Folder or hub id of a tokenizer, or "bytes" (257 tokens, no download). None: the model's own."""
    sequence_length: int = 1024
    """Tokens in a sequence, at least 2. The default is lower if the model was made for fewer positions."""
    holdout_fraction: float = 0.02
    """Share of the documents that is kept for evaluation, from 0 to below 1. With data.streaming or data.holdout_split
    it is not used."""
    holdout_split: str | None = None
    """Split of data.dataset to evaluate on. Nothing of data.split is then kept for evaluation."""
    holdout_rows: int = 1000
    """With data.streaming, rows that are kept for evaluation, at least 0: the first ones, or the first of
    data.holdout_split."""
    window_rows: int = 1000
    """With data.streaming, rows that are read at a time and shuffled among themselves, at least 1. Where conversations
    stay whole, it is also how many are packed at a time, but at least as many as fill about 128 sequences."""
    seed: int = 0
    """Seed of the hold-out split and of the order of sequences, at least 0."""
    max_bytes: ByteCount | None = None
    """Most bytes of text to read, in the order of the files, at least 1. None: all."""
    max_samples: int | None = None
    """Most documents (texts, records or conversations) to read, in the order of the files, at least 1. None: all."""

    def __post_init__(self) -> None:
        """Check each value."""
        self.read()
        self._check_source()
        self.need("max_patches", self.max_patches is None or self.images, "null without data.images")
        if self.images:
            self._check_images()

        # Without its dot a suffix would match no file, and the folder would be empty.
        has_dots = all(suffix.startswith(".") for suffix in self.suffixes)
        self.need("suffixes", has_dots, 'suffixes such as ".txt"')

        # Nothing predicts the first token of a sequence.
        self.need("sequence_length", self.sequence_length >= 2, "at least 2 tokens")
        self.need("holdout_fraction", 0 <= self.holdout_fraction < 1, "from 0 to below 1")
        self.need_least(holdout_rows=0, window_rows=1, seed=0)
        is_some = self.max_bytes is None or self.max_bytes >= 1
        self.need("max_bytes", is_some, "at least 1 byte")
        self.need("max_samples", self.max_samples is None or self.max_samples >= 1, "at least 1, or null")

    def _check_source(self) -> None:
        """Refuse anything but files alone, or a dataset with the settings that belong to it."""
        # Refused and not passed over: the user means a dataset that is not there.
        if self.dataset is None:
            has_files = len(self.files) > 0
            bound = 'at least one path, glob or "python-stdlib", or data.dataset be given'
            self.need("files", has_files, bound)
            for name in ("subset", "revision", "streaming", "holdout_split"):
                is_left_out = not getattr(self, name)
                self.need(name, is_left_out, "left out without data.dataset")
            return

        bound = "a name on the hub, such as org/name, or a folder"
        self.need("dataset", self.dataset != "", bound)
        self.need("files", not self.files, "empty if data.dataset is given")
        if self.holdout_split is not None:
            self._check_holdout(self.holdout_split)

        bound = "null with data.streaming: train.steps bounds a stream"
        for name in ("max_bytes", "max_samples"):
            self.need(name, getattr(self, name) is None or not self.streaming, bound)

    def _check_images(self) -> None:
        """Refuse settings that conversations with images have no use for."""
        for_images = "with data.images"
        self.need("images", self.is_chat, "false without data.chat: images are parts of conversations")

        # All rows are written to files before the first step, and a stream is there to avoid that.
        self.need("streaming", not self.streaming, f"false {for_images}")

        # The byte tokenizer has no processor, which makes the pixels.
        self.need("tokenizer", self.tokenizer != BYTE_TOKENIZER, f"a folder or hub id of a processor {for_images}")
        bound = f"null {for_images}: no conversation sees another"
        self.need("cross_documents", self.cross_documents is None, bound)
        self.need("max_patches", self.max_patches is None or self.max_patches >= 1, "at least 1, or null")

    def _check_holdout(self, split: str) -> None:
        """Refuse to evaluate on what is trained on."""
        is_named = split.strip() != ""
        self.need("holdout_split", is_named, "the name of a split, or null")

        is_apart = not _overlap(split, self.split)
        bound = f"a split that shares nothing with data.split, which is {self.split}"
        self.need("holdout_split", is_apart, bound)

    @property
    def holdout_setting(self) -> str:
        """The name of the setting that says how much text is held out."""
        if self.holdout_split is not None:
            return "holdout_split"
        return "holdout_rows" if self.streaming else "holdout_fraction"

    @property
    def holds_out(self) -> bool:
        """Whether text is kept for evaluation."""
        return bool(getattr(self, self.holdout_setting))

    @property
    def is_apart(self) -> bool:
        """Whether attention stops at the borders of documents that share a sequence."""
        # With images they share one only if patches are bounded.
        if self.images:
            return self.max_patches is not None
        if self.cross_documents is not None:
            return not self.cross_documents

        # An answer is not to be learnt from another conversation.
        return self.is_chat

    @property
    def is_chat(self) -> bool:
        """Whether records are conversations. Those that LLaMA-Factory describes have their shape in its file."""
        return self.chat is not None or any(f"{DATASET_INFO}#" in entry for entry in self.files)


def _overlap(split: str, other: str) -> bool:
    """Return whether two splits such as train+test[:9] share a split, or one has a slice of a split of the other.

    Two slices of one split are not compared.
    """
    # `datasets` takes sums of splits, and a slice in brackets behind each.
    ones = [name.strip() for name in split.split("+")]
    twos = [name.strip() for name in other.split("+")]
    for one, two in itertools.product(ones, twos):
        one_is_slice = one.startswith(f"{two}[")
        two_is_slice = two.startswith(f"{one}[")
        if one == two or one_is_slice or two_is_slice:
            return True
    return False
