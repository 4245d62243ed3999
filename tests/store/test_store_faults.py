"""Faults below the C code: a preloaded shim, a file size limit, a small file system, a killed process."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from crossed import some
from from_outside import FAULTS
from small_drive import NO_NAMESPACES
from warm_python import WarmPython

from megatier.drives.blockfile import IoOptions
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Tier

NAMES = re.findall(r"@scenario\ndef (\w+)", (FAULTS / "store.py").read_text())


@pytest.fixture(scope="module", params=some(range(5), by=3), ids=lambda look: f"look-{look}" if look else "as-it-comes")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, python: WarmPython
) -> dict[str, str]:
    """How each scenario of faults/store.py went, in one process, where moves end at that look for it."""
    place = tmp_path_factory.mktemp("drives")
    done = python.run([FAULTS / "store.py", place, str(request.param)])
    assert done.returncode == 0, done.stderr
    report: dict[str, str] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("name", NAMES)
def test_fault(found: dict[str, str], name: str) -> None:
    assert found[name] == ""


SMALL_DISK = """
import os, sys
from small_drive import mount_small_drive
from megatier import hardware
from megatier.errors import CapacityError
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Tier
hardware.MEMORY_FILE_SYSTEMS.clear()  # the small drive lies in RAM
directory = sys.argv[1]
mount_small_drive(directory, "size=4m")
with open(f"{directory}/other", "wb") as other:
    other.write(bytes(2 << 20))
store = TieredStore.open(ram="1MiB", nvme=[f"{directory}:4MiB"])
store.register(BlockSpec("a", 3 << 20, Tier.NVME))
try:
    store.seal()
except CapacityError as error:
    print(error.tier, error.needed_bytes, error.free_bytes, error)
store.close()
print(os.listdir(directory))
with TieredStore.open(ram="1MiB", nvme=[f"{directory}:1MiB"]) as store:
    store.register(BlockSpec("a", 64 << 10, Tier.NVME))
    with store.lease("a", Tier.RAM) as block:
        block.bytes.fill_(7)
        store.mark_dirty("a", Tier.RAM)
    store.write_back("a", Tier.RAM)
    store.settle("a")
    print(store.is_direct is not None)
"""


def test_disk_smaller_than_the_plan_is_refused_with_figures(tmp_path: Path, python: WarmPython) -> None:
    done = python.run(["-c", SMALL_DISK, tmp_path])
    if done.returncode == NO_NAMESPACES:
        pytest.skip("no mount namespaces for this user")
    assert done.returncode == 0, done.stderr
    refusal, left, works = done.stdout.splitlines()
    tier, needed, free, *sentence = refusal.split(" ")
    assert (tier, int(needed)) == ("nvme", 3 << 20)
    assert 1 << 20 < int(free) <= 2 << 20
    assert f"Give {tmp_path} a smaller size in tiers.nvme or free space on it." in " ".join(sentence)
    assert left == "['other']"
    assert works == "True"


KILLED = """
import os, signal, sys
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Tier
store = TieredStore.open(ram="1MiB", nvme=[f"{sys.argv[1]}:1MiB"], run_id="run")
store.register(BlockSpec("a", 64 << 10, Tier.NVME))
store.prefetch("a", Tier.RAM)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_run_id_of_a_killed_process_can_be_used_again(tmp_path: Path, python: WarmPython) -> None:
    done = python.run(["-c", KILLED, tmp_path])
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["megatier-run"]
    options = IoOptions(num_threads=1)
    with TieredStore.open(ram="1MiB", nvme=[f"{tmp_path}:1MiB"], run_id="run", options=options) as store:
        store.register(BlockSpec("a", 64 << 10, Tier.NVME))
        store.lease("a", Tier.RAM).release()
    assert not list(tmp_path.iterdir())
