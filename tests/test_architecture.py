"""The shape of the code: what imports what, where the byte's journey is marked, and how long files are."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

FACTORIES = re.compile(
    "arange|as_tensor|asarray|empty|empty_permuted|empty_strided|eye|full|linspace|logspace|normal|ones|rand|randint|"
    "randn|randperm|range|scalar_tensor|tensor|tril_indices|triu_indices|zeros"
)
"""Functions of torch that take the default dtype, the default device or both where nobody names another one."""
POINTERS = {
    "address.py": 1,  # of native code
    "engine/activation.py": 4,  # whether one tensor lies in another
    "engine/call_arguments.py": 1,  # the same
    "engine/bound_module.py": 1,  # a key
    "guards/hidden_parts.py": 1,  # whether one tensor lies in another
    "optim/gradient_sums.py": 2,  # whether two tensors begin alike
    "ranks/peer_copies.py": 2,  # how far one tensor lies in another
    "ranks/shared_ram.py": 1,  # page-locking, which takes bytes whatever they are
    "store/arena.py": 1,  # page-locking, and the drive probes' own arithmetic
    "store/tier_queues.py": 1,  # where a copy is cut
}
"""Where `data_ptr` is called, and how often."""
OPENING = re.compile(
    r"(.*\.)?(?<!TieredStore\.)(?<!grads\.)(?<!_reader\.)(?<!_base\.)(open|stat)|os\.path\.get\w+|.*\.read_(text|bytes)|"
    r"(open|read)_regular|safe_open|load_file|torch\.load|.*\.(from_pretrained|load_dataset|ParquetFile|memory_map)"
)
"""Calls that open a file by its path, or ask what is there. Those of `foreign` do it by `opened`."""
COMPARED = {
    "foreign.py": 1,  # `opened`: noted for `one_version`
    "files.py": 5,  # `FileVersion.at`; regular files, of which each caller below has its own reason
    "models/weights.py": 1,  # with the version of the header
    "drives/base_files.py": 2,  # with the version of the header; each granule by its checksum
    "models/weight_files.py": 1,  # after `read_object` of the same file
    "plugins/program_trainer.py": 1,  # after `note`
    "setup/skeleton.py": 1,  # after `read_object` of the same file
    "data/tokenizer.py": 1,  # after `read_object` and `read_input` of its files
    "data/processor.py": 1,  # after `read_object` of its files
    "data/image_file.py": 2,  # by a digest; pixels come from bytes that were read
}
"""User's files that are opened more than once. What is read of them is compared."""
ONCE = {
    "data/encoded.py": 1,  # texts; a run keeps the tokens, and compares their checksum when it goes on
    "data/records.py": 4,  # tables, by the descriptor that was looked at; lists of files of a saved dataset
    "data/sources.py": 1,  # a look that a table is there, before the run begins
    "data/shards.py": 1,  # a streamed text, which a resumed run compares
    "data/hub.py": 1,  # a streamed text, at one commit of its repository
    "adapters/in_place.py": 1,  # the drive that a file is on
    "drives/gds.py": 1,  # the drive that a file is on
}
"""User's files of which one reading counts."""
OURS = {
    "adapters/adapter_folder.py": 1,  # written
    "checkpoint/chunk_access.py": 3,  # checkpoints and savepoints have manifests and checksums
    "checkpoint/manifest.py": 1,
    "checkpoint/run_directory.py": 3,
    "checkpoint/run_state.py": 2,
    "checkpoint/savepoint.py": 1,
    "data/token_range.py": 1,  # tokens have a checksum
    "data/image_rows.py": 1,  # rows too
    "data/token_note.py": 2,
    "drives/leftovers.py": 5,  # block files, by descriptors of their folders
    "drives/blockfile.py": 1,
    "drives/mounts.py": 2,
    "durable.py": 2,
    "tiered_adamw/state_file.py": 3,  # written
    "measure/drive_traffic.py": 1,
    "models/export.py": 1,  # written
    "private.py": 8,
    "ranks/shared_memory.py": 1,  # memory of another process
    "report/history.py": 1,  # records of a run
    "report/metrics.py": 3,
    "report/picture.py": 1,
    "trace/events.py": 1,  # written
    "saving/model_folder.py": 1,
    "train/shared_directory.py": 1,
    "saving/saves.py": 1,  # which directory it is
}
"""Files that megatier writes, most of them in a directory that is locked while the run goes on."""
OF_THE_SYSTEM = {
    "cli/__init__.py": 1,
    "cli/doctor.py": 1,
    "cli/output.py": 1,  # what a command was told to write
    "hardware.py": 1,
    "measure/block_device.py": 1,
    "measure/probe.py": 1,
    "ranks/peer_monitor.py": 1,
}
"""Files that say what the machine is, and places to write to."""
DRAWN = {"BAR", "LEFT", "PLOT", "ROW", "TOP", "WIDTH"}
"""Sizes that each drawing of a report has of its own."""
ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatier"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
JOURNEY = {
    1: "drives/blockfile.py",
    2: "store/tier_queues.py",
    3: "engine/bound_module.py",
    4: "store/tier_queues.py",
    5: "optim/optimizer.py",
    6: "drives/blockfile.py",
}


def test_the_bytes_journey_is_marked_once_per_hop() -> None:
    marks = [
        (int(hop), str(path.relative_to(PACKAGE)))
        for path in FILES
        for hop in re.findall(r"HOP (\d)", path.read_text())
    ]
    assert sorted(marks) == sorted(JOURNEY.items())
    assert all(re.search(rf"# HOP {hop}/6: \S", (PACKAGE / name).read_text()) for hop, name in JOURNEY.items())


@pytest.mark.parametrize(
    "module",
    [
        "megatier.schedule.placement",
        "megatier.schedule.slots",
        "megatier.schedule.budgets",
        "megatier.schedule.policy",
        "megatier.schedule.sizes",
        "megatier.schedule.unit_spec",
        "megatier.schedule.timeline",
        "megatier.schedule.rates",
        "megatier.schedule.rates_file",
        "megatier.forecast.simulate",
        "megatier.forecast.forecast",
        "megatier.config.schema",
        "megatier.config.file",
        "megatier.tier",
    ],
)
def test_planning_runs_without_torch(module: str) -> None:
    heavy = "('torch', 'numpy', 'transformers', 'megatier._native', 'megatier.store.store')"
    script = f"import {module}, sys; sys.exit(str([name for name in {heavy} if name in sys.modules] or ''))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == ""


def test_table_of_rooms_names_every_room_and_files_that_are_there() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Rooms")[2].partition("\n## ")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines() if row.startswith("| ")][1:]
    told = {room.strip(" `"): set(re.findall(r"`(\w+)`", files)) for room, _, files in rows}
    told.pop("native/")
    found = {room.name: {path.stem for path in room.glob("*.py")} for room in ROOMS}
    found["ground"] = {path.stem for path in PACKAGE.glob("*.py")}
    assert told.keys() == found.keys()
    assert all(told.values())
    assert {room: files - found[room] for room, files in told.items() if files - found[room]} == {}


def test_public_constants_of_one_name_are_one_number() -> None:
    values: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and _is_number(node.value):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                for name in names:
                    values.setdefault(name, set()).add(ast.unparse(node.value))
    several = {name: found for name, found in values.items() if len(found) > 1 and name[0] != "_"}
    assert several.keys() <= DRAWN, several


def _is_number(value: ast.expr) -> bool:
    """Return whether a value is a number or a tuple of numbers, without names of others."""
    parts = (ast.Tuple, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)
    return all(
        isinstance(node.value, int | float) if isinstance(node, ast.Constant) else isinstance(node, parts)
        for node in ast.walk(value)
    )


def test_no_two_rooms_have_a_file_of_one_name() -> None:
    # A command, a section of the config and a program are called the same wherever they are.
    rooms = [room for room in ROOMS if room.name not in {"cli", "config", "convert", "plugins"}]
    names = Counter(path.stem for room in rooms for path in room.glob("*.py") if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_small_and_their_packages_import_nothing(room: Path) -> None:
    files = [path for path in room.glob("*.py") if path.name != "__init__.py"]
    assert num_lines(files) <= num_lines(FILES) / 8
    assert "import" not in (room / "__init__.py").read_text().split('"""')[2] or room.name == "cli"


def test_tests_of_a_room_lie_in_a_folder_of_its_name() -> None:
    tests = ROOT / "tests"
    rooms = {room.name for room in ROOMS} | {"native", "bench"}
    for path in tests.rglob("test_*.py"):
        named = [room for room in rooms if path.stem == f"test_{room}" or path.stem.startswith(f"test_{room}_")]
        assert path.parent.name in (named or ["tests"]), f"{path.relative_to(tests)} is of {named}"


def num_lines(files: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files)


def test_streams_events_and_threads_are_named_where_bytes_move_and_by_what_watches() -> None:
    pattern = re.compile(r"threading\.Thread\b|torch\.cuda\.(Event|Stream|stream)\b")
    found = {str(path.relative_to(PACKAGE)) for path in FILES if pattern.search(path.read_text())}
    queues = {"store/stream_clock.py", "store/queue.py", "store/tier_queues.py", "store/ring.py"}
    # Bytes go to shared RAM and from there at once, so a collective has a stream besides that of its queue. Two queues
    # share one for the matrices that they carry.
    others = {"play/matrix_carrier.py", "ranks/shared_ram.py", "workers.py", "watch/watchdog.py"}
    others.add("ranks/peer_monitor.py")
    others.add("finalizer.py")  # a collection of cycles may come in any thread, and some cannot close an object
    others.add("session/hub_weights.py")  # whoever takes weights does so on streams or threads of its own
    others.add("report/trackers.py")  # a server may take for ever, and whoever waits for it must be able to leave
    assert found == queues | others


def test_results_of_compute_are_read_past_no_copy_that_leaves() -> None:
    rooms = ("engine", "play", "store", "optim", "compute", "guards", "models")
    pattern = re.compile(r"\.(item|tolist|cpu)\(\)")
    lines = [line for room in rooms for path in (PACKAGE / room).glob("*.py") for line in path.read_text().splitlines()]
    found = [line.strip() for line in lines if pattern.search(line) and "on_host(" not in line]

    # A number that was made on the host.
    assert found == ['rounded = torch.tensor(share, dtype=torch.float32, device="cpu").item()']


def test_generators_are_seeded_where_their_owner_is_known() -> None:
    """`torch.manual_seed` seeds every GPU's too, whose states a loop around us would not get back."""
    pattern = re.compile(r"\b(torch|cuda)\.(manual_seed|manual_seed_all|seed)\(")
    found = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if pattern.search(path.read_text())]
    assert found == ["compute/seeds.py"]


def test_locks_are_those_that_an_interrupt_cannot_leave_locked() -> None:
    pattern = re.compile(
        r"threading\.(Event|Condition|Semaphore|BoundedSemaphore|Barrier)\b|^import queue|^from queue import .*\bQueue"
        r"|concurrent\.futures",
        re.M,
    )
    assert [str(path) for path in FILES if pattern.search(re.sub(r"`[^`]*`", "", path.read_text()))] == []


def test_kvikio_is_imported_in_gds_alone() -> None:
    pattern = re.compile(r"import_module\(f?\"kvikio|^\s*(import|from) kvikio", re.MULTILINE)
    found = {str(path.relative_to(PACKAGE)) for path in FILES if pattern.search(path.read_text())}
    assert found == {"drives/gds.py"}


def test_imports_are_absolute() -> None:
    relative = [str(path) for path in FILES if re.search(r"^\s*from \.", path.read_text(), re.MULTILINE)]
    assert not relative


@pytest.mark.parametrize("room", ["store", "drives", "measure"])
def test_files_of_a_room_are_short(room: str) -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in (PACKAGE / room).glob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


@pytest.mark.skipif(importlib.util.find_spec("importlinter") is None, reason="import-linter is a development tool")
def test_imports_point_one_way() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_tensors_are_made_with_the_dtype_and_the_device_that_their_maker_names() -> None:
    """A user may have set other defaults, and C code takes tensors for what their maker meant."""
    found = [
        f"{path.relative_to(PACKAGE)}:{call.lineno} {ast.unparse(call)}"
        for path in FILES
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and (keywords := {each.arg for each in call.keywords}) is not None
        # The function itself, or what calls it later: partial(torch.zeros, ...).
        for made in (call.func, *call.args)
        if isinstance(made, ast.Attribute) and ast.unparse(made.value) == "torch" and FACTORIES.fullmatch(made.attr)
        if not {"dtype", "device"} <= keywords
    ]
    assert found == []


def test_addresses_of_tensors_leave_for_native_code_in_one_place() -> None:
    counts = {str(path.relative_to(PACKAGE)): path.read_text().count(".data_ptr()") for path in FILES}
    assert {name: count for name, count in counts.items() if count} == POINTERS


def test_calls_that_open_a_file_by_its_path_are_known_and_say_what_compares_it() -> None:
    """A file that is opened twice may be two files (docs/decisions/0043)."""
    calls = [(path, call) for path in FILES for call in ast.walk(ast.parse(path.read_text()))]
    found = Counter(
        str(path.relative_to(PACKAGE))
        for path, call in calls
        if isinstance(call, ast.Call) and OPENING.fullmatch(ast.unparse(call.func))
    )
    assert found == {**COMPARED, **ONCE, **OURS, **OF_THE_SYSTEM}


def test_names_of_tests_hold_no_bytes(request: pytest.FixtureRequest) -> None:
    """Workers refuse to run tests whose names differ, and bytes may hold the time at which they were made."""
    found = (
        item.nodeid
        for item in request.session.items
        for value in getattr(getattr(item, "callspec", None), "params", {}).values()
        if isinstance(value, bytes) and len(value) > 8 and repr(value)[2:-1] in item.nodeid
    )
    assert list(found) == []
