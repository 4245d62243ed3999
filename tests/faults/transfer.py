"""One write and one read of a file in a fresh process, so that a test can preload faults or set limits around them.

Usage: transfer.py NATIVE_MODULE_FILE TARGET_FILE [FILE_SIZE_LIMIT]. Writes JSON: the error of the write, the error of
the read, and whether the bytes came back. Loads the extension by its path: the package would import torch.
"""

import ctypes
import importlib.util
import json
import mmap
import os
import resource
import sys
from pathlib import Path
from typing import Any

GRANULE_BYTES = 16384
NUM_BYTES = 16 * GRANULE_BYTES
REQUEST_BYTES = 4 * GRANULE_BYTES


def load_native(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("megatier._native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def main(native_path: str, target: Path, file_size_limit: int | None) -> None:
    native = load_native(native_path)
    if file_size_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_limit, file_size_limit))
    fd = open_direct(target)
    memory = [mmap.mmap(-1, NUM_BYTES) for _ in range(2)]
    source, copy = (ctypes.addressof(ctypes.c_char.from_buffer(area)) for area in memory)
    memory[0][:] = os.urandom(NUM_BYTES)
    checksums = (ctypes.c_uint32 * (NUM_BYTES // GRANULE_BYTES))()
    pool = native.ThreadPool(1, 8)
    errors = []
    for write, address in ((True, source), (False, copy)):
        segments = [(fd, 0, address, NUM_BYTES // 2), (fd, NUM_BYTES // 2, address + NUM_BYTES // 2, NUM_BYTES // 2)]
        batch = pool.submit_io(write, segments, ctypes.addressof(checksums), GRANULE_BYTES, REQUEST_BYTES)
        assert batch.wait(60)
        errors.append(batch.error())
    pool.close()
    json.dump({"write": errors[0], "read": errors[1], "same": memory[0][:] == memory[1][:]}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
