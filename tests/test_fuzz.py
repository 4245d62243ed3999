"""Whatever is in a file, its reader takes it or refuses it by an error of ours: no other error, hang, or memory."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
import torch
import yaml
from mutations import harmed_bytes, harmed_tree
from test_checkpoint_chunkfile import numbers, read, write
from test_checkpoint_run_state import CONFIG, CPU, TEXT
from test_report_history import BEGINS, STEP
from test_schedule_rates import RATES

from megatier.checkpoint import checkpoint, savepoint
from megatier.checkpoint.grid import Grid
from megatier.checkpoint.manifest import METADATA_FILE, digest_of
from megatier.checkpoint.run_directory import SAVEPOINT_FOLDER
from megatier.checkpoint.run_state import RunState
from megatier.cli import convert
from megatier.config.file import load, to_dict
from megatier.config.schema import TiersConfig
from megatier.config.text import dump
from megatier.errors import MegatierError
from megatier.models.safetensors_format import read_header, write_header
from megatier.report.metrics import MetricsLog
from megatier.report.report_page import build
from megatier.schedule.rates_file import as_dict, read_rates

SEED = 20261121
SECONDS = 10
"""No reader may take that long for one small file."""
ROOM = 1 << 30
"""Bytes of address space that readers may add."""

SHAPE = (30, 40)
GRID = Grid.of(SHAPE, 400)
TENSORS = [
    ("a", torch.float32, (2, 3)),
    ("b", torch.bfloat16, (0, 4)),
    ("c", torch.uint8, ()),
    ("d", torch.int64, (1,)),
]
RECORDS = [{"step": step, "loss": 1.5, "moved_bytes": {"ram_to_gpu": step}} for step in range(1, 7)]

EXAMPLES = Path(__file__).parent.parent / "examples" / "convert"
FOREIGN = [yaml.safe_load(path.read_text()) for path in sorted(EXAMPLES.iterdir())]
"""Configs of other trainers."""

Draw = random.Random


class TooSlow(BaseException):
    """A reader did not come back in SECONDS. No Exception, so that no reader catches it."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Limited memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    handler = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)


def as_text(draw: Draw, tree: dict[str, Any], dumps: Callable[[Any], str] = json.dumps) -> bytes:
    """A harmed file that was the text of a tree."""
    if draw.random() < 0.4:
        return harmed_bytes(draw, dumps(tree).encode())
    return json.dumps(harmed_tree(draw, tree)).encode()


def fuzz_config(draw: Draw, folder: Path) -> None:
    path = folder / "config.yaml"
    config = replace(CONFIG, tiers=TiersConfig(ram=1 << 30, nvme=("/mnt/a:5GiB", "/mnt/b"), chunk=1 << 20))
    path.write_bytes(as_text(draw, to_dict(config), dump))
    load(path)


def fuzz_override(draw: Draw, folder: Path) -> None:
    words = ["--model.config.model_type=llama", "--data.files=a,b", "--data.tokenizer=bytes", "--tiers.ram", "1.5GiB"]
    words += ["--train.steps=7", "--train.clip=null", "--tiers.nvme=/mnt/a:5GiB,/mnt/b", "--model.config.a.b=[1, 2]"]
    for _ in range(draw.randint(1, 2)):
        index = draw.randrange(len(words))
        words[index] = os.fsdecode(harmed_bytes(draw, os.fsencode(words[index])))
    load(None, words)


def fuzz_convert(draw: Draw, folder: Path) -> None:
    source, output = folder / "source", folder / "run.yaml"
    output.unlink(missing_ok=True)
    source.write_bytes(as_text(draw, draw.choice(FOREIGN)))
    convert.run([str(source), "--output", str(output)])
    try:
        load(output, ["--model.path=m", "--data.files=a"])
    except MegatierError as error:
        raise AssertionError("what was written is a config") from error


def fuzz_state(draw: Draw, folder: Path) -> None:
    state = RunState.of(3, CONFIG, CPU, TEXT).to_dict()
    if draw.random() < 0.6:  # by somebody who knows how to make the digest fit
        state = json.loads(json.dumps(harmed_tree(draw, state)))
    held: dict[str, Any] = {"state": state, "manifest": {"step": 3, "checksums": {"params/a": "00112233aabbccdd"}}}
    if draw.random() < 0.3:
        held = json.loads(json.dumps(harmed_tree(draw, held)))
    held |= {"format": checkpoint.CHECKPOINT_FORMAT, "digest": digest_of(held)}
    tree = {"zarr_format": 3, "node_type": "group", "attributes": {"megatier": held}}
    raw = json.dumps(tree).encode() if draw.random() < 0.5 else as_text(draw, tree)
    (folder / METADATA_FILE).write_bytes(raw)
    found = RunState.read(checkpoint.read_state(folder))
    found.check_text(TEXT)
    found.check(found.changes(CONFIG, CPU))


def fuzz_savepoint(draw: Draw, folder: Path) -> None:
    state = RunState.of(3, CONFIG, CPU, TEXT).to_dict()
    part: dict[str, Any] = {"placement": "0" * 32, "generations": {"model.layers.0": 1, "lm_head": 0}}
    part["manifest"] = {"step": 3, "checksums": {"state/lm_head/weight": "00112233"}}
    tree: dict[str, Any] = {"state": state, "hosts": 1, "parts": [part]}
    if draw.random() < 0.6:  # by somebody who knows how to make the digest fit
        tree = json.loads(json.dumps(harmed_tree(draw, tree)))
    tree |= {"format": savepoint.SAVEPOINT_FORMAT, "digest": digest_of(tree)}
    raw = json.dumps(tree).encode() if draw.random() < 0.5 else as_text(draw, tree)
    path = folder / SAVEPOINT_FOLDER / "step-00000003" / savepoint.MANIFEST_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    found = savepoint.Savepoint.last(folder)
    assert found is not None
    found.state.changes_of_blocks(CONFIG)
    found.state.check(found.state.changes(CONFIG, CPU))
    found.check_ranks(None)


def fuzz_array(draw: Draw, folder: Path) -> None:
    chunks = {"name": "regular", "configuration": {"chunk_shape": list(Grid.of(SHAPE).chunk_shape)}}
    keys = {"name": "default", "configuration": {"separator": "/"}}
    tree = {"zarr_format": 3, "node_type": "array", "shape": list(SHAPE), "data_type": "float32", "attributes": {}}
    tree |= {"codecs": checkpoint.CODECS, "chunk_grid": chunks, "chunk_key_encoding": keys, "fill_value": 0.0}
    (folder / METADATA_FILE).write_bytes(as_text(draw, tree))
    checkpoint._grid(folder, SHAPE)


def fuzz_chunks(draw: Draw, folder: Path) -> None:
    write(folder / "a", GRID, numbers(SHAPE), piece=1200)
    try:
        files = sorted(path for path in (folder / "a").rglob("*") if path.is_file())
        for path in draw.sample(files, draw.randint(0, 2)):
            path.write_bytes(harmed_bytes(draw, path.read_bytes()))
        assert torch.equal(read(folder / "a", GRID), numbers(SHAPE)), "what was harmed is refused"
    finally:
        shutil.rmtree(folder / "a")


def fuzz_metrics(draw: Draw, folder: Path) -> None:
    path, lines = folder / "metrics.jsonl", [json.dumps(record).encode() + b"\n" for record in RECORDS]
    harmed = b"".join(as_text(draw, record) + b"\n" for record in draw.sample(RECORDS, 3))
    path.write_bytes(b"".join(lines) + harmed)
    with MetricsLog(path) as log:
        log.cut_after(4)
        log.write({"step": 5})
    assert path.read_bytes().startswith(b"".join(lines[:4]))
    assert path.read_bytes().endswith(b'{"step": 5}\n')


def fuzz_report(draw: Draw, folder: Path) -> None:
    records = [BEGINS, *({**STEP, **record} for record in RECORDS), {"step": 6, "heldout_loss": 2.5}]
    lines = [as_text(draw, record) if draw.random() < 0.2 else json.dumps(record).encode() for record in records]
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines))
    (folder / "config.yaml").write_text(dump(to_dict(CONFIG)))
    build(folder)


def fuzz_rates(draw: Draw, folder: Path) -> None:
    path = folder / "machine.yaml"
    path.write_bytes(as_text(draw, as_dict(RATES), yaml.safe_dump))
    found = read_rates(path)
    assert all(Path(drive.directory) and 0 < drive.read_bytes_per_s < math.inf for drive in found.drives)


def fuzz_header(draw: Draw, folder: Path) -> None:
    raw = write_header(TENSORS)
    if draw.random() < 0.3:
        raw = harmed_bytes(draw, raw)
    else:
        header = as_text(draw, json.loads(raw[8:]))
        raw = len(header).to_bytes(8, "little") + header
    path = folder / "model.safetensors"
    path.write_bytes(raw + bytes(33))
    for tensor in read_header(path).values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.num_bytes <= path.stat().st_size


READERS = (
    (fuzz_config, 30),
    (fuzz_override, 50),
    (fuzz_convert, 15),
    (fuzz_state, 80),
    (fuzz_savepoint, 80),
    (fuzz_array, 300),
    (fuzz_chunks, 40),
    (fuzz_metrics, 100),
    (fuzz_report, 10),
    (fuzz_rates, 60),
    (fuzz_header, 600),
)
"""Each with as many inputs as run in about half a second."""


def fuzz(reader: Callable[[Draw, Path], None], first: int, count: int, folder: Path) -> tuple[int, int]:
    """Try inputs first, first + 1, ...; returns how many were read and how many refused."""
    num_read = 0
    with bounded():
        for number in range(first, first + count):
            signal.alarm(SECONDS)
            try:
                reader(Draw(SEED + number), folder)
                num_read += 1
            except MegatierError:
                pass
            except BaseException as error:
                error.add_note(f"input {number} of {reader.__name__}")
                raise
            finally:
                signal.alarm(0)
    return num_read, count - num_read


@pytest.mark.parametrize(("reader", "count"), READERS, ids=lambda value: getattr(value, "__name__", ""))
def test_harmed_input_is_read_or_refused(reader: Callable[[Draw, Path], None], count: int, tmp_path: Path) -> None:
    num_read, num_refused = fuzz(reader, 0, count, tmp_path)
    assert num_read, "some harm does not matter"
    assert num_refused or reader is fuzz_metrics, "most harm does"


@pytest.mark.slow
@pytest.mark.parametrize(("reader", "count"), READERS, ids=lambda value: getattr(value, "__name__", ""))
def test_much_harmed_input_is_read_or_refused(reader: Callable[[Draw, Path], None], count: int, tmp_path: Path) -> None:
    fuzz(reader, count, 120 * count, tmp_path)
