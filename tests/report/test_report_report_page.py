"""The page of a run: every section, from whatever its directory holds; nothing but itself; names are text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from small_commands import command
from test_report_history import BEGINS

from megatier.cli import main
from megatier.config.data_section import DataConfig
from megatier.config.file import to_dict
from megatier.config.schema import ModelConfig, RunConfig
from megatier.config.text import dump
from megatier.errors import ConfigError
from megatier.report.report_page import build
from megatier.trace.events import TraceEvent, write_trace

MS = 1_000_000
CONFIG = RunConfig(model=ModelConfig(config={"model_type": "llama"}), data=DataConfig(files=("a",), tokenizer="bytes"))
HOSTILE = '<script>alert("1")</script>&'
VOID = {"meta"}


class Page(HTMLParser):
    """A page's elements and its text, checked to be well nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.attributes: set[str] = set()
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self._open += [tag] if tag not in VOID else []

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"] and data.strip():
            self.words.append(data.strip())

    def section(self, heading: str) -> str:
        """Its words, up to the next section's."""
        headings = [
            "Loss and throughput",
            "The plan against what happened",
            "Memory",
            "What moved",
            "What compute waited for",
            "Ranks",
            "A step",
            "What lies where",
            "Checkpoints and savepoints",
            "Settings",
        ]
        assert [word for word in self.words if word in headings] == headings
        rest = self.words[self.words.index(heading) + 1 :]
        return "|".join(rest[: next((i for i, word in enumerate(rest) if word in headings), None)])


def step(number: int, **figures: object) -> dict[str, Any]:
    moved = {"nvme_to_ram": number << 20, "ram_to_gpu": number << 19}
    record: dict[str, Any] = {
        "step": number,
        "loss": 3.0 / number,
        "tokens": 64,
        "seconds": 0.5,
        "attainment": 0.8,
        "skipped": None,
    }
    record |= {"stall_seconds": {"nvme_to_ram": 0.1, "update": 0.05}, "busy_seconds": {"compute": 0.3}}
    record |= {"moved_bytes": moved, "demanded_bytes": moved, "resident_bytes": 5 << 20, "gpu_bytes": 1 << 20}
    return {**record, **figures}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with a config alone."""
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "config.yaml").write_text(dump(to_dict(CONFIG)))
    return directory


def record(run: Path, *records: dict[str, Any]) -> Page:
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return Page(build(run))


def test_page_of_a_real_run_has_every_section(tmp_path: Path) -> None:
    settings = {"tiers.state": "nvme", "tiers.nvme": f"{tmp_path}:16MiB", "tiers.gpu": "512KiB"}
    output = {"output.trace": True, "output.checkpoint_every": 2, "train.steps": 4}
    assert main(command(tmp_path, {**settings, **output})) == 0
    page = Page(build(tmp_path / "run"))
    assert page.words[:2] == ["run run", "run run"]
    assert page.words[2].startswith("The run is whole: step 4 of 4. On cpu, begun 20")
    assert {"tokens/s", "a step", "compute waits", "loss", "held-out loss"} <= set(page.words)
    assert "attainment" not in page.words
    assert page.section("Loss and throughput").startswith("loss|training|held-out|")
    assert "`megatier bench` measures the machine" in page.section("The plan against what happened")
    assert "gpu|0 B|" in page.section("Memory")
    assert "resident in RAM" in page.section("Memory")
    assert "nvme_to_ram|" in page.section("What moved")
    assert page.section("What moved").count("|none|") == 4
    assert "compute busy" in page.section("A step")
    assert "lm_head" in page.section("What lies where")
    assert page.section("Checkpoints and savepoints").count("|yes") == 2
    assert "max_position_embeddings: 64" in page.section("Settings")


def test_page_needs_nothing_but_itself(run: Path) -> None:
    page = record(run, BEGINS, step(1), step(2))
    assert not page.tags & {"script", "link", "img", "iframe", "object", "image", "use"}
    assert not page.attributes & {"src", "href", "srcset", "xlink:href", "style"}
    assert not any(attribute.startswith("on") for attribute in page.attributes)
    assert "url(" not in build(run)
    assert "@import" not in build(run)
    assert "prefers-color-scheme: dark" in build(run)


def test_page_of_a_planned_run_compares_it_with_the_plan(run: Path) -> None:
    page = record(run, BEGINS, *(step(number) for number in range(1, 5)))
    assert "bound by nvme, as planned" in page.words
    assert page.words[page.words.index("attainment") + 1] == "80%"
    plan = page.section("The plan against what happened")
    assert "a step|400 ms|500 ms|+25.0%|compute busy|300 ms|300 ms|+0.0%" in plan
    assert "as planned" in page.section("Loss and throughput")
    assert "on the GPU, held by torch" in page.section("Memory")
    assert "nvme_to_ram|300 ms|20.0 %|100 ms" in page.section("What compute waited for")
    assert "nvme_to_ram|1.0 MiB|4.0 MiB|4.0 MiB|none" in page.section("What moved")
    assert "Units with two generations, updated in the backward: 1." in page.section("What lies where")


def test_page_shows_what_steps_waited_for_the_compiler_and_counts_it_in_none(run: Path) -> None:
    page = record(run, step(1, compile_seconds=7.25), step(2), step(3, compile_seconds=0.5))
    at = page.words.index("compiled")
    assert page.words[at + 1 : at + 3] == ["7.75 s", "in 2 of 3 steps, and in the time of none"]
    assert "500 ms" in page.words
    assert "compiled" not in record(run, step(1), step(2)).words


def test_page_says_how_long_the_host_worked_where_it_does_not_compute(run: Path) -> None:
    steps = [step(number, host_busy_seconds=0.03 * number) for number in (1, 2, 3)]
    said = "The host worked for 75 ms a step (median)"
    assert said in record(run, {**BEGINS, "device": "a GPU"}, *steps).section("What compute waited for")
    assert said not in record(run, {**BEGINS, "device": "cpu"}, *steps).section("What compute waited for")


def test_page_of_several_ranks_names_the_slowest_ones(run: Path) -> None:
    found = [(0, 2.0), (1, 1.5), (1, 1.25), (1, 1.125)]
    slowest = [{"rank": rank, "host": "<b>", "seconds": seconds, "least_seconds": 1.0} for rank, seconds in found]
    page = record(run, BEGINS, *(step(number, slowest_rank=one) for number, one in enumerate(slowest, 1)))

    # The first step learns the order of units, and does not count.
    ranks = page.section("Ranks")
    assert "|rank 1 on <b>|100.0 %|250 ms|" in ranks
    assert "rank 0" not in ranks
    alone = record(run, BEGINS, step(1), step(2, slowest_rank=None)).section("Ranks")
    assert alone == "One process trained alone."


def test_page_of_several_ranks_shows_what_each_waited_for_did_and_moved(run: Path) -> None:
    slowest = {"rank": 1, "host": "b", "seconds": 0.5, "least_seconds": 0.25}

    def other(number: int) -> dict[str, Any]:
        lanes = {"stall_seconds": {"update": 0.25}, "busy_seconds": {"compute": 0.125}}
        return {"rank": 1, "host": "<b>", **lanes, "moved_bytes": {"ram_to_gpu": number << 21}}

    steps = [step(number, slowest_rank=slowest, other_ranks=[other(number)]) for number in (1, 2, 3)]
    ranks = record(run, BEGINS, *steps).section("Ranks")
    assert "waited for|nvme_to_ram|update|rank 0|100 ms|50 ms|rank 1 on <b>|0 ms|250 ms|" in ranks
    assert "|rank 1 on <b>|125 ms|" in ranks

    # Records have sums since the process began; the table has what came in a step.
    assert ranks.endswith("moved|nvme_to_ram|ram_to_gpu|rank 0|1.0 MiB|512.0 KiB|rank 1 on <b>|0 B|2.0 MiB")


def test_page_of_a_run_that_went_on_says_where_and_compares_the_last_process(run: Path) -> None:
    moved = {"nvme_to_ram": 1 << 20}
    last = step(3, moved_bytes=moved, demanded_bytes={"nvme_to_ram": 1000}, skipped="loss", loss="nan")
    page = record(run, BEGINS, step(1), step(2), {**BEGINS, "step": 2}, last)
    assert "or was killed or ended by an error: step 3 of 1,000." in page.words[2]
    assert "It went on after step 2. Steps skipped because they were not finite: 1." in page.words[2]
    assert "went on|skipped" in page.section("Loss and throughput")
    assert "nvme_to_ram|1.0 MiB|1.0 MiB|1000 B|+1,047,576 B" in page.section("What moved")


@pytest.mark.parametrize(("last", "is_said"), [(0.0, True), (0.5, False)])
def test_page_of_a_run_whose_first_steps_have_no_gradient_says_so(last: float, is_said: bool, run: Path) -> None:
    page = record(run, BEGINS, *(step(number, grad_norm=norm) for number, norm in enumerate((0.0, 0.0, last), 1)))
    words = "The norm of the gradients was 0 in each of the first 3 steps, so no step has learnt anything yet."
    assert (words in page.words[2]) is is_said


def test_page_of_a_run_that_just_went_on_compares_nothing_yet(run: Path) -> None:
    page = record(run, BEGINS, step(1), {**BEGINS, "step": 1})
    assert page.section("What moved") == "No step of the last process is on file yet."
    page = record(run, BEGINS, {"step": 0, "run": "stopped", "moved_bytes": {"ram_to_gpu": 5}})
    assert page.section("What moved") == "No step is on file yet."


def test_page_of_a_killed_run_leaves_out_half_a_line(run: Path) -> None:
    (run / "metrics.jsonl").write_text(json.dumps(BEGINS) + "\n" + json.dumps(step(1)) + '\n{"step": 2, "lo')
    status = Page(build(run)).words[2]
    assert "killed or ended by an error: step 1 of" in status
    assert "The last line of metrics.jsonl is cut" in status
    (run / "metrics.jsonl").write_text(json.dumps(BEGINS) + "\n" + json.dumps(step(1)))  # whole but for its end
    assert "is cut" not in Page(build(run)).words[2]


def test_page_of_a_real_run_with_savepoints(tmp_path: Path) -> None:
    tiers = {"tiers.state": "nvme", "tiers.nvme": f"{tmp_path}:16MiB", "tiers.gpu": "512KiB", "tiers.generations": 2}
    assert main(command(tmp_path, {**tiers, "output.savepoint_every": 2, "train.steps": 4})) == 0
    section = Page(build(tmp_path / "run")).section("Checkpoints and savepoints")
    assert section.startswith("savepoint of step|written|in|training waited|still there|2|")
    assert section.endswith("in all.")
    assert "|no|" in section
    assert "yes" not in section


def test_page_shows_checkpoints_and_savepoints_apart(run: Path) -> None:
    (run / "savepoints" / "step-00000014").mkdir(parents=True)
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    written = {"checkpoint_bytes": 3 << 20, "checkpoint_seconds": 2.0, "checkpoint_pause_seconds": 0.5}
    kept = [{"step": n, "savepoint_bytes": 1 << 20, "savepoint_seconds": 0.25} for n in range(3, 15)]
    section = record(run, BEGINS, step(1), {"step": 2, **written}, *kept).section("Checkpoints and savepoints")
    assert "2|3.0 MiB|2.00 s|500 ms|yes|checkpoints written: 1, for which training waited 500 ms in all.|" in section
    assert "|14|1.0 MiB|250 ms|250 ms|yes|savepoints written: 12, for which training waited 3.00 s in all." in section
    assert section.endswith(" The last 10 are shown.")
    assert "|13|1.0 MiB|250 ms|250 ms|no|" in section
    assert "|4|" not in section


def test_page_before_the_first_step_says_why_sections_are_empty(run: Path) -> None:
    for page in (Page(build(run)), record(run)):
        assert page.section("Loss and throughput") == "No step is on file yet."
        assert page.section("What moved") == "No step is on file yet."
        assert page.section("A step").startswith("No trace: ")
        assert page.section("Checkpoints and savepoints").startswith("None was written: ")
    page = record(run, BEGINS)
    assert "Planned: 400 ms a step, bound by nvme. No step" in page.section("The plan against what happened")
    assert "gpu|84 B|0 B|100 B|84.0 %" in page.section("Memory")
    assert "weight|a weight: gpu|gpu|" in page.section("What lies where")


def test_page_of_an_older_run_shows_what_there_is(run: Path) -> None:
    page = record(run, *({"step": n, "loss": 1.0, "tokens": 8, "seconds": 0.1} for n in (1, 2)))
    older = "The run was recorded by an older version"
    for heading in ("The plan against what happened", "Memory", "What lies where"):
        assert page.section(heading).startswith(older)
    assert page.section("Loss and throughput").startswith("loss|training|")
    assert page.section("What moved") == "Nothing moved: all state is at home on the GPU."
    assert page.section("What compute waited for") == "Compute waited for nothing."


def test_page_settings_are_a_config_again(run: Path) -> None:
    config = replace(CONFIG, output=replace(CONFIG.output, directory="2e-5"))
    (run / "config.yaml").write_text(dump(to_dict(config)))
    assert dump(to_dict(config)).strip() in Page(build(run)).section("Settings")


def test_page_says_how_the_run_corrected_its_plan(run: Path) -> None:
    made = {"planned_seconds": 0.4, "planned_bytes_per_s": 2.2e9, "seconds": 0.5, "measured_bytes_per_s": 1.9e9}
    wavers = {**BEGINS, "expected": {**BEGINS["expected"], "seconds_range": [0.3, 0.6]}}
    planned = record(run, wavers).section("The plan against what happened")
    assert "Planned: 400 ms a step (0.3 to 0.6 as the drives waver), bound by nvme." in planned
    section = record(run, wavers, step(1), step(2), {"step": 2, "correction": made}).section(
        "The plan against what happened"
    )
    assert "(0.3 to 0.6 as the drives waver)" in section
    assert "drives that do 1.9 GB/s in this run, not 2.2, make it 500 ms a step" in section


def test_page_hostile_names_are_text(tmp_path: Path) -> None:
    directory = tmp_path / HOSTILE.replace("/", "")
    directory.mkdir()
    model = ModelConfig(config={"model_type": HOSTILE})
    config = to_dict(RunConfig(model=model, data=DataConfig(tokenizer="bytes", files=(HOSTILE,))))
    (directory / "config.yaml").write_text(dump(config))
    begins = {**BEGINS, "device": HOSTILE, "time": HOSTILE, "homes": {HOSTILE: {"weight": HOSTILE, HOSTILE: "ram"}}}
    amounts = {HOSTILE: 1e6}
    begins["expected"] = {"seconds": 1, "bound_by": HOSTILE, "busy_seconds": amounts, "moved_bytes": amounts}
    begins["tiers"] = [{"tier": HOSTILE, "state_bytes": 1, "other_bytes": 1, "budget_bytes": 1}]
    made = step(1, stall_seconds=amounts, busy_seconds=amounts, moved_bytes=amounts, skipped=HOSTILE)
    events = [
        TraceEvent(lane=HOSTILE, name=HOSTILE, start_ns=0, end_ns=MS),
        TraceEvent(lane="stall", name=HOSTILE, start_ns=0, end_ns=MS, cause=HOSTILE),
    ]
    write_trace(directory / "trace.json", [(1, events)])
    page = record(directory, begins, made)
    assert "script" not in page.tags
    assert not any(attribute.startswith("on") for attribute in page.attributes)
    assert any(HOSTILE in word for word in page.words)


@pytest.mark.parametrize("figure", [0, 1e-300, 9e17])
@pytest.mark.parametrize("loss", [1e308, -1e308, "inf", "-inf", "nan", 0])
def test_page_of_odd_figures_is_still_whole(figure: float, loss: object, run: Path) -> None:
    odd = {"loss": loss, "tokens": figure, "seconds": figure, "attainment": figure, "resident_bytes": figure}
    amounts = {"ram_to_gpu": figure}
    odd |= {"stall_seconds": amounts, "busy_seconds": amounts, "moved_bytes": amounts, "demanded_bytes": amounts}
    page = record(run, BEGINS, *(step(number, **odd) for number in range(1, 4)))
    assert page.section("What compute waited for")


def test_page_of_a_long_run_is_small(run: Path) -> None:
    skipped: Iterator[int] = iter(range(10, 20_000, 3))
    left_out = set(skipped)
    records = (step(n, skipped="loss" if n in left_out else None, loss=1 + n % 7) for n in range(1, 20_001))
    record(run, BEGINS, *records)
    assert len(build(run)) < 400_000


def test_page_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run: config\.yaml is missing\. Give a run's output\.directory"):
        build(tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "trace.json"])
def test_page_of_a_damaged_file_is_refused(name: str, run: Path) -> None:
    (run / name).write_text("[3]\n")
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        build(run)
