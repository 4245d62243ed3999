"""Compares systems in one table of measured rows, each with a baseline of the same shape and tokens a step.

python bench/compare.py                                     the newest rows of every machine in bench/results/
python bench/compare.py A.json B.json --baseline fsdp2_offload
python bench/compare.py --run fsdp2_offload,deepspeed_zero3,megatier --shape 3b --batch 16 --seq 1024 --rounds 3

With --run each system runs in a process of its own, one after the other, and each round reverses their order. The
rounds of a system make one row in bench/results/<machine>/. A system that fails gets a row that says so. Rows with a
`source` are quoted, not run: the table marks them as stored. If no baseline is named, it is the fastest peer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from record import RESULTS, Row, RowError, default_output, failed_row, has_rows, read_rows, write_row

OURS = ("megatier", "bound")
"""Systems that are no peers: megatier, and the bound that no system can pass."""

BENCH = Path(__file__).parent
SCRIPTS = {
    "deepspeed_zero3": ("peers/deepspeed_zero3.py",),
    "deepspeed_zero3_nvme": ("peers/deepspeed_zero3.py", "--optimizer", "nvme"),
    "fsdp2_offload": ("peers/fsdp2_offload.py",),
    "megatier": ("bench_step.py",),
}
MEGATIER_ROWS = {("8b", 16, 1024): 1, ("8b", 64, 1024): 3, ("3b", 16, 1024): 5}
"""Row of `bench_step.py` with free budgets, by shape, sequences and tokens a sequence."""

SPEED_HEADINGS = ("tokens/s", "ratio", "s/step", "RAM GB", "ratio", "GPU GB", "ratio")
HEADINGS = ("shape", "tokens/step", "sequence", "system", *SPEED_HEADINGS, "clip, masters", "note")
NOTE_CHARACTERS = 100


# ---------------------------------------------------------------------- the table


def table(rows: Sequence[Row], baseline: str | None = None) -> str:
    """Make a Markdown table, ordered by shape, tokens a step and speed.

    Args:
        rows: rows as `read_rows` gives them.
        baseline: the name of a system; None means the fastest peer at each shape and tokens a step.

    Raises:
        RowError: there is no row, or none of that system.
    """
    if not rows:
        raise RowError("no rows to compare; measure some with --run, or name their JSON files")
    if baseline and not any(row["system"] == baseline and "error" not in row for row in rows):
        known = ", ".join(sorted({row["system"] for row in rows if "error" not in row})) or "none"
        raise RowError(f"no row of {baseline} has figures; systems that have some: {known}")
    lines = [_line(HEADINGS), _line(["---"] * len(HEADINGS))]
    for row in sorted(rows, key=_order):
        lines.append(_line(_cells(row, baseline_of(row, rows, baseline))))
    return "\n".join(lines)


def baseline_of(row: Row, rows: Sequence[Row], name: str | None) -> Row | None:
    """Return the fastest row of a system, or of any peer, at the shape, sequence length and tokens a step of a row."""
    alike = [
        other
        for other in rows
        if "error" not in other
        and all(other[key] == row[key] for key in ("shape", "tokens_per_step", "sequence_length"))
        and (other["system"] == name if name else other["system"] not in OURS)
    ]
    return max(alike, key=lambda other: float(other["tokens_per_s"]), default=None)


def _order(row: Row) -> tuple[str, int, int, float]:
    """Return the key of sorting: rows that can be compared come together, the fastest first."""
    return row["shape"], row["tokens_per_step"], row["sequence_length"], -row.get("tokens_per_s", 0.0)


def ratio(row: Row, baseline: Row | None, key: str) -> float | None:
    """Return a row's figure divided by the baseline's; None if one of them has none."""
    if baseline is None or not row.get(key) or not baseline.get(key):
        return None
    return float(row[key] / baseline[key])


def _cells(row: Row, baseline: Row | None) -> list[str]:
    """Return the cells of a row of the table."""
    tokens_per_s = row.get("tokens_per_s")
    cells = [
        row["shape"],
        f"{row['tokens_per_step']:,}",
        f"{row['sequence_length']:,}",
        row["system"] + (f" row {row['row']}" if "row" in row else ""),
        f"{tokens_per_s:,.0f}" if tokens_per_s else "-",
        _times(ratio(row, baseline, "tokens_per_s")),
        f"{row['tokens_per_step'] / tokens_per_s:.3f}" if tokens_per_s else "-",
    ]
    for key in ("peak_ram_bytes", "peak_gpu_bytes"):
        cells += [f"{row[key] / 1e9:.1f}" if row.get(key) else "-", _times(ratio(row, baseline, key))]
    clip = ("clip" if row["clip"] else "no clip") if "clip" in row else "-"
    return [*cells, f"{clip}, {row.get('master_dtype', '-')}", _note(row, baseline)]


def _times(value: float | None) -> str:
    """Return a ratio as text."""
    return "-" if value is None else f"{value:.2f}"


def _note(row: Row, baseline: Row | None) -> str:
    """Return the note on a row: what a reader must know to understand its figures."""
    notes = ["baseline"] if row is baseline else []
    notes += ["stored, not rerun"] if "source" in row else []
    notes += [str(row["note"])] if "note" in row else []
    notes += [f"could not run: {row['error']}"[:NOTE_CHARACTERS]] if "error" in row else []
    return "; ".join(notes).replace("|", "/")


def _line(cells: Sequence[str]) -> str:
    """Return a line of Markdown."""
    return f"| {' | '.join(cells)} |"


def sources(rows: Sequence[Row]) -> list[str]:
    """Return where the stored rows come from, a line each."""
    texts = dict.fromkeys(str(row["source"]) for row in rows if "source" in row)
    return [f"stored: {text}" for text in texts]


# ---------------------------------------------------------------------- side by side


def run_all(options: argparse.Namespace) -> list[Row]:
    """Measure every chosen system in alternated rounds; write and return one row of each."""
    names = [name for name in options.run.split(",") if name]
    commands = {name: command_of(name, options) for name in names}
    rounds: dict[str, list[Row]] = {name: [] for name in names}

    for index in range(options.rounds):
        # A machine's speed drifts, so no system may always come first.
        for name in names if index % 2 == 0 else reversed(names):
            print(f"round {index + 1} of {options.rounds}: {name}", flush=True)
            rounds[name].append(run_one(name, commands[name], options))

    rows = [merged(parts) for parts in rounds.values()]
    for row in rows:
        path = output_of(row, options.directory)
        write_row(row, path)
        print(f"written to {path}")

    return rows


def output_of(row: Row, directory: Path | None) -> Path:
    """File of a merged row, in the directory or else in its machine's folder.

    A row of `bench_step.py` gets another name than that script's own result, so that it does not take its place.
    """
    path = default_output(row)
    if "row" in row:
        path = path.with_stem(f"{path.stem}_beside_peers")
    return path if directory is None else directory / path.name


def command_of(name: str, options: argparse.Namespace) -> list[str]:
    """Return the command line that measures a system.

    Raises:
        RowError: the system is unknown, its script does not measure the shape, or an option is missing.
    """
    if name not in SCRIPTS:
        raise RowError(f"no script measures {name!r}; known: {', '.join(SCRIPTS)}")
    script, *fixed = SCRIPTS[name]
    command = [sys.executable, str(BENCH / script), *fixed]

    if name == "megatier":
        number = options.row or MEGATIER_ROWS.get((options.shape, options.batch, options.seq))
        if number is None:
            raise RowError("bench_step.py has no row of this shape and batch; name one of its rows with --row")
        return [*command, "--row", str(number)]

    if name.endswith("_nvme"):
        if options.path is None:
            raise RowError(f"{name} needs --path, a directory on a real drive")
        command += ["--path", str(options.path)]

    for option in ("shape", "batch", "seq", "steps", "device"):
        command += [f"--{option}", str(getattr(options, option))]
    return command


def run_one(name: str, command: Sequence[str], options: argparse.Namespace) -> Row:
    """Run a system once. If it leaves no row, make one that says how it ended."""
    with tempfile.TemporaryDirectory(prefix="compare_") as directory:
        output = Path(directory, "row.json")
        try:
            code = subprocess.run([*command, "--output", str(output)], check=False, timeout=options.timeout).returncode
            ending = f"killed by signal {-code} (9: mostly out of RAM)" if code < 0 else f"ended with status {code}"
        except subprocess.TimeoutExpired:
            ending = f"not done after {options.timeout} s"

        # A peer that finds no memory writes a row with its error before it ends, which says more than the exit status.
        if output.exists():
            return read_rows(output)[0]

    return failed_row(name, options.shape, batch=options.batch, sequence_length=options.seq, error=ending)


def merged(parts: Sequence[Row]) -> Row:
    """Merge a system's rounds into one row with all seconds and the highest peaks. Rounds that failed are left out."""
    good = [part for part in parts if "error" not in part]
    if not good:
        return parts[0]
    seconds = [value for part in good for value in part["seconds"]]
    middle = median(seconds)
    first = good[0]
    peaks = {
        key: max((part[key] for part in good if part[key] is not None), default=None)
        for key in ("peak_ram_bytes", "peak_gpu_bytes")
    }
    lost = {"note": f"{len(parts) - len(good)} of {len(parts)} rounds failed"} if len(good) < len(parts) else {}

    return {
        **first,
        **peaks,
        **lost,
        "seconds": seconds,
        "median_seconds": middle,
        "tokens_per_s": first["tokens_per_step"] / middle,
        # FLOPs of a step are the same in each round, so only the seconds change.
        "model_tflops": first["model_tflops"] * first["median_seconds"] / middle,
        "round_medians": [part["median_seconds"] for part in good],
        "command": " ".join(["python", *sys.argv]),
    }


# ---------------------------------------------------------------------- the command


def load(files: Sequence[Path]) -> list[Row]:
    """Read the rows of the files; without any, the newest results of all machines, and the quoted ones.

    Files deeper in `bench/results/` are not read: they are plans, and the experiments of the log.

    Raises:
        RowError: a file cannot be read, or a row of it lacks something.
    """
    newest = sorted([*RESULTS.glob("*.json"), *RESULTS.glob("*/*.json")])
    chosen = files or [path for path in newest if has_rows(path)]
    return [row for path in chosen for row in read_rows(path)]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="RESULT.json", help="default: all newest results")
    parser.add_argument("--baseline", metavar="NAME", help="system that ratios refer to (default: the fastest peer)")
    parser.add_argument("--run", metavar="NAMES", help=f"measure first; of {', '.join(SCRIPTS)}, with commas between")
    parser.add_argument("--rounds", type=int, default=1, help="with --run: alternated rounds (default 1)")
    parser.add_argument("--shape", default="3b", help="3b, 8b, tiny ... (default 3b)")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step (default 16)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens a sequence (default 1024)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a peer in a round (default 4)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the peers (default cuda)")
    parser.add_argument("--row", type=int, help="row of bench_step.py (default: free budgets at the shape)")
    parser.add_argument("--path", type=Path, help="a directory on a real drive, for NVMe")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a run may take (default 1800)")
    parser.add_argument("--directory", type=Path, help="where --run writes (default bench/results/<machine>/)")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main(argv: Sequence[str]) -> None:
    """Measure if asked to, then print the table.

    Raises:
        SystemExit: there is nothing to compare, or a row is none; the text says which.
    """
    options = parse(argv)
    try:
        stored = load(options.files) if options.files or not options.run else []
        rows = stored + (run_all(options) if options.run else [])
        print("\n".join([table(rows, options.baseline), *sources(rows)]))
    except RowError as error:
        raise SystemExit(f"compare: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
