"""Image files of strangers: each hostile one ends in one error with the record's name, soon and in little memory."""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatier.data import image_file
from megatier.data.conversation import Conversation
from megatier.data.image_file import BYTES_MAX, ImageBytes, decode_all, digest_of, read_bytes
from megatier.data.image_rows import raw_images
from megatier.errors import DataError

Image = pytest.importorskip("PIL.Image")

PLACE = "chats.jsonl, line 7"


def saved(kind: str, size: tuple[int, int] = (20, 10), **options: Any) -> bytes:
    """A picture of noise in a file of this format."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, *chunks: bytes, body: bytes = b"") -> bytes:
    """A PNG that announces so many pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


@cache
def bomb() -> bytes:
    """256 MiB of zeros, compressed."""
    return zlib.compress(bytes(1 << 28), 1)


def animated(kind: str) -> bytes:
    """Two frames."""
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


def resized_jpeg(width: int, height: int) -> bytes:
    """A JPEG that announces so many pixels."""
    raw = saved("JPEG")
    frame = raw.index(b"\xff\xc0")
    return raw[: frame + 5] + struct.pack(">HH", height, width) + raw[frame + 9 :]


def flipped(raw: bytes, place: int) -> bytes:
    return raw[:place] + bytes([raw[place] ^ 0xFF]) + raw[place + 1 :]


PNG = saved("PNG")
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(/tmp/out) (w) file closefile\n"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "zeros": lambda: bytes(4096),
    "noise": lambda: bytes(torch.randint(0, 256, (4096,), dtype=torch.uint8).tolist()),
    "text": lambda: b"a cat",
    "html": lambda: b"<!doctype html><title>404</title>",
    "svg": lambda: SVG,
    "eps": lambda: EPS,
    "pdf": lambda: b"%PDF-1.7\n1 0 obj\n",
    "zip": lambda: b"PK\x03\x04" + bytes(64),
    "lfs": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
    "tiff": lambda: saved("TIFF"),
    "ico": lambda: saved("ICO", (16, 16)),
    "ppm": lambda: saved("PPM"),
    "tga": lambda: saved("TGA"),
    "head_of_png": lambda: PNG[:8],
    "head_of_jpeg": lambda: saved("JPEG")[:20],
    "half_a_png": lambda: PNG[: len(PNG) // 2],
    "half_a_jpeg": lambda: saved("JPEG", (200, 200))[:3000],
    "half_a_gif": lambda: saved("GIF", (200, 200))[:2000],
    "half_a_webp": lambda: saved("WEBP", (200, 200))[:2000],
    "half_a_bmp": lambda: saved("BMP")[:200],
    "png_without_pixels": lambda: png(8, 8),
    "png_of_no_width": lambda: png(0, 8),
    "png_with_few_pixels": lambda: png(64, 64, body=bytes(99)),
    "png_whose_head_is_flipped": lambda: flipped(PNG, 20),
    "png_whose_pixels_are_flipped": lambda: flipped(PNG, 60),
    "png_with_no_head": lambda: b"\x89PNG\r\n\x1a\n" + chunk(b"IEND", b""),
    "png_with_a_long_chunk": lambda: PNG[:33] + struct.pack(">I", 0x7FFFFFFF) + b"tEXt" + PNG[33:],
    "png_bomb": lambda: png(60_000, 60_000, body=bytes(1 << 20)),
    "png_bomb_below_pillows_limit": lambda: png(9_000, 9_000, body=bytes(1 << 20)),
    "png_bomb_of_text": lambda: png(8, 8, chunk(b"zTXt", b"a\0\0" + bomb())),
    "png_bomb_of_a_profile": lambda: png(8, 8, chunk(b"iCCP", b"a\0\0" + bomb())),
    "gif_bomb": lambda: b"GIF89a" + struct.pack("<HH", 65535, 65535) + saved("GIF")[10:],
    "bmp_bomb": lambda: saved("BMP")[:18] + struct.pack("<ii", 1 << 20, 1 << 20) + saved("BMP")[26:],
    "bmp_of_negative_width": lambda: saved("BMP")[:18] + struct.pack("<ii", -20, 10) + saved("BMP")[26:],
    "jpeg_bomb": lambda: resized_jpeg(65_500, 65_500),
    "jpeg_of_no_width": lambda: resized_jpeg(0, 10),
    "webp_bomb": lambda: b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + b"\xff\xff\xff" * 2 + b"VP8 " + bytes(4),
    "webp_with_a_long_chunk": lambda: (webp := saved("WEBP"))[:16] + b"\xff\xff\xff\x7f" + webp[20:60],
    "png_of_unknown_depth": lambda: b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 7, 9, 0, 0, 0)),
    "png_with_a_wrong_checksum": lambda: flipped(PNG, 30),
    "gif_without_frames": lambda: saved("GIF")[:13] + b";",
    "gzip_of_a_png": lambda: gzip.compress(PNG),
    "pickle": lambda: b"cos\nsystem\n(S'touch executed'\ntR.",
    "script": lambda: b"#!/bin/sh\ntouch executed\n",
    "avif": lambda: b"\0\0\0\x1cftypavif" + bytes(64),
    "psd": lambda: b"8BPS\0\x01" + bytes(64),
    "gif_animated": lambda: animated("GIF"),
    "png_animated": lambda: animated("PNG"),
    "webp_animated": lambda: animated("WEBP"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("default")  # Pillow warns of bombs, as errors only here
def test_hostile_image_is_one_error_with_the_record(name: str) -> None:
    with pytest.raises(DataError, match=f"^{PLACE}: ") as raised:
        decode_all([HOSTILE[name]()], PLACE)
    assert "\n" not in str(raised.value)
    assert "object at 0x" not in str(raised.value)
    assert len(str(raised.value)) < 600


DECODE_ALL = """
import pathlib, resource, sys, warnings
from megatier.data.image_file import decode_all
from megatier.errors import DataError

warnings.simplefilter("ignore")
refused = 0
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in pathlib.Path(sys.argv[1]).iterdir():
    try:
        decode_all([path.read_bytes()], "a")
    except DataError:
        refused += 1
print(refused, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
"""Counts refused files, and the KiB by which the memory of the process grew."""


def test_hostile_images_of_one_process_take_little_memory(tmp_path: Path) -> None:
    for name, make in HOSTILE.items():
        (tmp_path / name).write_bytes(make())
    done = subprocess.run([sys.executable, "-c", DECODE_ALL, str(tmp_path)], capture_output=True, text=True, check=True)
    refused, grown_kib = map(int, done.stdout.split())
    assert refused == len(HOSTILE)

    # Images of 64M pixels, which are the most, would take 192 MiB.
    assert grown_kib < 192 << 10


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "WEBP"])
def test_image_of_a_known_format_is_decoded_to_rgb(kind: str) -> None:
    [image] = decode_all([saved(kind)], PLACE)
    assert (image.mode, image.size) == ("RGB", (20, 10))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_image_of_another_mode_becomes_rgb(mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (4, 4)).save(file, "PNG")
    assert decode_all([file.getvalue()], PLACE)[0].mode == "RGB"


def test_image_is_turned_as_its_camera_was_held() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    [image] = decode_all([saved("JPEG", exif=exif)], PLACE)
    assert image.size == (10, 20)


def test_photo_with_a_preview_behind_it_is_its_first_picture() -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 6), "red").save(file, "MPO", save_all=True, append_images=[Image.new("RGB", (4, 3))])
    [image] = decode_all([file.getvalue()], PLACE)
    assert image.size == (8, 6)


def test_images_of_a_record_share_one_bound_of_pixels() -> None:
    file = io.BytesIO()
    Image.new("1", (6_000, 6_000)).save(file, "PNG")
    assert decode_all([file.getvalue()], PLACE)[0].size == (6_000, 6_000)
    with pytest.raises(DataError, match=f"^{PLACE}: its images have 72,000,000 pixels or more"):
        decode_all([file.getvalue()] * 2, PLACE)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device", "dangling", "large", "long", "nul"])
def test_file_that_is_no_image_is_refused_before_it_is_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "large":
        path.touch()
        os.truncate(path, BYTES_MAX + 1)
    elif kind == "long":
        path = tmp_path / ("a" * 5000)
    elif kind == "nul":
        path = tmp_path / "a\0b"
    with pytest.raises(DataError, match=f"^{PLACE}: "):
        read_bytes(path, PLACE)


@pytest.mark.parametrize("in_files", [1, 2, 0])
def test_images_of_a_record_are_bounded_together_wherever_they_lie(
    in_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_file, "BYTES_MAX", 2 * len(PNG) - 1)
    (tmp_path / "a.png").write_bytes(PNG)
    images: tuple[str | bytes, ...] = (PNG,) * (2 - in_files) + ("a.png",) * in_files
    conversation = Conversation([], None, PLACE, images, tmp_path)
    with pytest.raises(DataError, match=f"^{PLACE}: the files of its images have more than"):
        list(raw_images(conversation))


def test_image_that_is_another_one_now_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    noted = ImageBytes(str(path), 0, len(PNG), digest_of(PNG))
    assert noted.read(tmp_path, PLACE) == PNG
    for other in (flipped(PNG, 70), PNG[:-1], b""):
        path.write_bytes(other)
        with pytest.raises(DataError, match=f"^{PLACE}: the image {path} is not the one that the run began with"):
            noted.read(tmp_path, PLACE)
    path.unlink()
    with pytest.raises(DataError, match=f"^{PLACE}: cannot read the image"):
        noted.read(tmp_path, PLACE)
