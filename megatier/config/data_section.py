"""The section `data` of a run's configuration: which texts it learns from, and how they become sequences.

`config.schema` has the other sections. Pure: no torch, and no file is opened.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from megatier.config.values import ByteCount, read_text
from megatier.config.values import require as _require

PYTHON_STDLIB = "python-stdlib"
"""Entry of `data.files` that stands for the source files of Python's own standard library."""

DATASET_INFO = "dataset_info.json"
"""LLaMA-Factory's list of datasets; `<path>/dataset_info.json#<name>` is an entry of `data.files`."""

BYTE_TOKENIZER = "bytes"
"""Value of `data.tokenizer` that stands for the byte-level tokenizer, which needs no download."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The text to learn from."""

    files: tuple[str, ...] = ()
    """Files, folders or globs, a folder that Hugging Face's save_to_disk wrote, or PATH/dataset_info.json#NAME of
    LLaMA-Factory; "python-stdlib" is the Python standard library's own source. Exactly one of files and dataset is
    given."""
    dataset: str | None = None
    """Dataset that Hugging Face's `datasets` loads: a name on the hub, such as org/name, or a folder. Needs the extra
    datasets."""
    subset: str | None = None
    """Subset of data.dataset, where it has several."""
    split: str = "train"
    """Split of data.dataset to train on."""
    revision: str | None = None
    """Branch, tag or commit of data.dataset on the hub. None: its main branch."""
    streaming: bool = False
    """Read data.dataset while the run goes on; it never lies on a drive whole. False: all of it is tokenised first."""
    format: Literal["auto", "text", "jsonl", "json", "parquet", "arrow"] = "auto"
    """How a file is read: as one text, or as records: JSON objects, one a line or in an array, or a table (needs the
    extra data). auto goes by the suffix; .json is text unless chat is set."""
    text_field: str = "text"
    """Key of the text in each record."""
    chat: Literal["messages", "sharegpt", "alpaca"] | None = None
    """Records are conversations of this shape, of which the assistant's turns are learnt. None: they are texts."""
    chat_template: str | None = None
    """Jinja file that takes the place of the tokenizer's chat template. None: the tokenizer's own."""
    cross_documents: bool | None = None
    """Documents that share a sequence see each other. False: attention and positions start anew at each, which costs
    memory and time (docs/data.md). None: true for texts, false for conversations."""
    suffixes: tuple[str, ...] = (
        ".txt",
        ".md",
        ".rst",
        ".py",
        ".json",
        ".jsonl",
        ".parquet",
        ".arrow",
        ".html",
        ".tex",
        ".c",
        ".h",
        ".cpp",
        ".rs",
    )
    """Files taken from a folder, by suffix. Files and globs named in data.files are taken whatever their suffix."""
    tokenizer: str | None = None
    """Folder or hub id of a tokenizer, or "bytes" (257 tokens, no download). None: the model's own."""
    sequence_length: int = 1024
    """Tokens per sequence, at least 2."""
    holdout_fraction: float = 0.02
    """Share of the documents kept for evaluation, 0 to below 1. Not of a stream, nor beside data.holdout_split."""
    holdout_split: str | None = None
    """Split of data.dataset to evaluate on; nothing of data.split."""
    holdout_rows: int = 1000
    """Rows of a stream kept for evaluation, at least 0: its first, or the first of data.holdout_split."""
    window_rows: int = 1000
    """Rows of a stream that are read at a time and shuffled among themselves, and conversations that are packed at a
    time where they stay whole, at least 1; of these at least as many as fill about 32 sequences."""
    seed: int = 0
    """Of the hold-out split and of the order of sequences, at least 0."""
    max_bytes: ByteCount | None = None
    """Bytes of text to read at most, counted in file order, at least 1. None: all."""

    def __post_init__(self) -> None:
        """Check each value."""
        read_text(self, "data", sizes=("max_bytes",), lists=("files", "suffixes"))
        self._check_source()
        _require(
            all(s.startswith(".") for s in self.suffixes),
            "data.suffixes",
            list(self.suffixes),
            'suffixes such as ".txt"',
        )
        _require(self.sequence_length >= 2, "data.sequence_length", self.sequence_length, "at least 2 tokens")
        _require(0 <= self.holdout_fraction < 1, "data.holdout_fraction", self.holdout_fraction, "from 0 to below 1")
        _require(self.holdout_rows >= 0, "data.holdout_rows", self.holdout_rows, "at least 0")
        _require(self.window_rows >= 1, "data.window_rows", self.window_rows, "at least 1")
        _require(self.seed >= 0, "data.seed", self.seed, "at least 0")
        _require(self.max_bytes is None or self.max_bytes >= 1, "data.max_bytes", self.max_bytes, "at least 1 byte")

    def _check_source(self) -> None:
        """Files, or a dataset with what belongs to it."""
        if self.dataset is not None:
            _require(
                self.dataset != "", "data.dataset", self.dataset, "a name on the hub, such as org/name, or a folder"
            )
            _require(not self.files, "data.files", list(self.files), "empty beside data.dataset")
            if self.holdout_split is not None:
                self._check_holdout(self.holdout_split)
            is_whole = self.max_bytes is None or not self.streaming
            _require(
                is_whole, "data.max_bytes", self.max_bytes, "null with data.streaming: train.steps bounds a stream"
            )
            return
        bound = 'at least one path, glob or "python-stdlib", or data.dataset be given'
        _require(len(self.files) > 0, "data.files", list(self.files), bound)
        for name in ("subset", "revision", "streaming", "holdout_split"):
            value = getattr(self, name)
            _require(not value, f"data.{name}", value, "left out without data.dataset")

    def _check_holdout(self, split: str) -> None:
        """What is evaluated on must not be trained on."""
        _require(split.strip() != "", "data.holdout_split", split, "the name of a split, or null")
        bound = f"without what data.split, {self.split}, trains on"
        _require(not _overlap(split, self.split), "data.holdout_split", split, bound)

    @property
    def is_apart(self) -> bool:
        """Whether attention stops at the borders of documents."""
        if self.cross_documents is not None:
            return not self.cross_documents
        return self.chat is not None or any(f"{DATASET_INFO}#" in entry for entry in self.files)


def _overlap(split: str, other: str) -> bool:
    """Whether two splits such as train+test[:9] share one, or one has a slice of another's; slices are not compared."""
    pairs = itertools.product(*([part.strip() for part in name.split("+")] for name in (split, other)))
    return any(one == two or one.startswith(f"{two}[") or two.startswith(f"{one}[") for one, two in pairs)
