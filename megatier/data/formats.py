"""The formats of data files, and how each is told: by the suffixes of its name, and by what it may not begin with.

Every door asks here: files of a run, of `init` and of `plan`, entries of a `dataset_info.json`, folders and globs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatier.errors import DataError

RECORD_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""The formats of files of records, by suffix. Whatever has another suffix is one text."""
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
"""The compressions that are read, by the last suffix."""
TABLE_FORMATS = ("parquet", "arrow")
"""Formats that are read out of order, so they lie on the drive as they are, and that compress their own columns."""

MAGIC = (
    (b"\x1f\x8b", "is compressed by gzip: end its name in .gz"),
    (b"BZh", "is compressed by bzip2: end its name in .bz2"),
    (b"\xfd7zXZ\x00", "is compressed by xz: end its name in .xz"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd: end its name in .zst"),
    (b"PAR1", "is a Parquet file: end its name in .parquet, or set data.format to parquet"),
    (b"ARROW1", "is an Arrow file: end its name in .arrow, or set data.format to arrow"),
    (b"PK\x03\x04", "is a zip archive: unpack it, and name the files in it"),
    (b"%PDF-", "is a PDF: take its text out first"),
    (b"SQLite format 3\x00", "is a database: write its texts to a file of JSON lines first"),
)
"""How files begin that are no text, and what to do about each."""
TAR = b"ustar"
"""Stands at byte 257 of a tar archive."""


@dataclass(frozen=True, slots=True)
class Format:
    """The format of a file, by which its bytes become documents."""

    name: str
    """`text`, or one of the values of `RECORD_FORMATS`."""
    compression: str | None
    """One of the values of `COMPRESSIONS`; None: the bytes are as they are."""
    suffix: str
    """The suffix that says so, in small letters and without that of the compression."""


def find_format(path: Path, declared: str = "auto") -> Format:
    """Return the format of a file.

    Args:
        path: the file, of which only the name counts.
        declared: `data.format`, which overrides the suffix of the format, but not that of the compression.

    Raises:
        DataError: nothing reads this combination.
    """
    last = path.suffix.lower()
    compression = COMPRESSIONS.get(last)

    # The suffix of "a.jsonl.gz" that tells its format is the one before.
    suffix = Path(path.stem).suffix.lower() if compression else last

    # A user who names a format knows better than the suffix.
    name = declared

    # Unknown suffixes are texts, since texts have any: .txt, .md, .py.
    if declared == "auto":
        name = RECORD_FORMATS.get(suffix, "text")
    if compression and name in TABLE_FORMATS:
        raise DataError(f"{path}: a {name} file compresses its own columns. Unpack the {compression} around it.")
    # An archive would be read as one text, names and padding included.
    if suffix in (".tar", ".zip") or last in (".tgz", ".7z", ".rar"):
        raise DataError(f"{path} is an archive. Unpack it, and name the files in it.")
    return Format(name, compression, suffix)


def describe_format(head: bytes) -> str | None:
    """Return the format of a file that begins with these bytes, and a remedy; None: it may be a text."""
    # The only one whose mark is not at its beginning.
    if head[257:262] == TAR:
        return "is a tar archive: unpack it, and name the files in it"
    for magic, said in MAGIC:
        if head.startswith(magic):
            return said
    return None
