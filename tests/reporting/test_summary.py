"""The numbers behind a report: totals over restarts, predictions against what came, what the writes mean for a disk."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lowtide.reporting.charts import Chart, Level, Series, chart_sheet, round_numbers, thinned
from lowtide.reporting.extras import read_extras
from lowtide.reporting.findings import find
from lowtide.reporting.machine_view import free_text, machine_charts
from lowtide.reporting.predictions import predictions
from lowtide.reporting.summary import counted_bytes, summarise
from lowtide.reporting.timeline import read_run
from lowtide.reporting.views import Entry, entries, memory_charts, step_charts
from lowtide.reporting.wear import wear_text
from tests.kit.synthetic_run import GIB, MIB, Job, write_extras, write_run

JOB = Job(steps=30, detailed=())


def test_totals_are_of_all_processes_and_ranks(tmp_path: Path) -> None:
    write_run(tmp_path, JOB, ranks=2)
    write_run(tmp_path, JOB, ranks=2, first_step=21, steps=20, started=JOB.started + 500)
    summary = summarise(read_run(tmp_path))
    moved = JOB.parked // 2
    assert summary.total_read_bytes == 2 * 50 * 3 * moved, "steps that were made again were read again"
    assert summary.total_written_bytes == 2 * 50 * (moved // 3)
    assert summary.steps == 40
    assert summary.processes == 2
    assert summary.seconds > 500


def test_parts_of_a_step_add_up(tmp_path: Path) -> None:
    division = summarise(read_run(write_run(tmp_path, JOB))).ranks[0].division
    assert division is not None
    assert sum(division.parts().values()) == pytest.approx(division.seconds)
    assert division.disk == pytest.approx(0.31 * (division.seconds - 0.002), rel=1e-3)


def test_predictions_are_held_against_the_steps_they_were_made_for(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, JOB))
    found = predictions(run, summarise(run), read_extras(tmp_path))
    newest = next(p for p in found if p.what.startswith("measured") and p.unit == "seconds")
    assert newest.error == pytest.approx(0.97 / 1.017 - 1, abs=0.03), "slow step included"
    peak = next(p for p in found if p.unit == "bytes")
    assert peak.error == pytest.approx(0.03, abs=1e-3)


def test_wear_names_its_assumption(tmp_path: Path) -> None:
    summary = summarise(read_run(write_run(tmp_path, JOB, parked=1200 * GIB)))
    text = wear_text(summary)
    written = 30 * (1200 * GIB // 2 // 3)
    assert f"{written / 2**40:.2f} TiB were written" in text
    assert f"{100 * written / 600e12:.0f} % of what a drive rated for 600 TB written (an assumption" in text
    assert wear_text(summarise(read_run(write_run(tmp_path / "none", JOB, has_folder=False)))) == ""


def test_stacked_kinds_are_the_process_and_keep_the_peak(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, JOB, steps=100, growth=MIB))
    host, disk = memory_charts(run.first, [])
    assert host.key == "memory-host-0"
    assert len(host.x) == 100, "of many samples, the fullest of every step"
    samples = run.first.last.memory
    tops = [sum(s.values[i] or 0 for s in host.layers) for i in range(len(host.x))]
    assert max(tops) == max(counted_bytes(sample) for sample in samples), "thinning lost no peak"
    assert host.layers[-1].name == "Python and torch", "nothing is stacked that does not count against the budget"
    assert {level.name for level in host.levels} == {"budget", "planned peak"}
    assert {s.name for s in disk.layers} == {"parameters", "gradients", "optimizer"}


def test_what_the_kernel_counts_is_drawn_beside_it(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, JOB, limit=6 * GIB))
    memory, busy = machine_charts(run.first, [Entry(at=1.0, step=2, what="skip", text="", rank=0)])
    assert "pages of files" in {curve.name for curve in memory.curves}
    assert [level.name for level in memory.levels] == ["limit of the control group"]
    assert memory.marks_in_words() == "skip (1)"
    assert busy.unit == "percent"
    given = next(curve for curve in busy.curves if curve.name.startswith("processor time got"))
    assert set(given.values) == {97.0}
    assert "stayed free" in free_text(run)
    assert free_text(read_run(write_run(tmp_path / "none", JOB, has_folder=False, parked=0))) == ""


def test_a_run_is_called_by_its_model_and_says_who_stopped_it(tmp_path: Path) -> None:
    write_run(tmp_path, JOB)
    (tmp_path / "config.json").write_text('{"preset": "gpt-98m"}')
    found = find(tmp_path)
    assert found.subject.startswith("gpt-98m, ")
    assert found.ending.words == "ended"
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime(JOB.started + 5))
    (tmp_path / "events.jsonl").write_text(f'{{"time": "{stamp}", "event": "signal", "step": 3, "cause": "SIGTERM"}}\n')
    assert find(tmp_path).ending.words == "stopped by SIGTERM"
    write_run(tmp_path, JOB, started=JOB.started + 200, first_step=41)
    assert find(tmp_path).ending.words == "ended", "that was the process before"


@pytest.mark.parametrize("second", [3.99, 3.9, 3.6, 2.0])
def test_the_words_for_levels_are_never_crossed(second: float) -> None:
    levels = [Level(name=f"at {y}", points=[(0.0, y)], look="lt-plan") for y in (4.0, second)]
    curve = Series(name="c", values=[3.0, 3.5], colour="#000000")
    sheet = chart_sheet(
        Chart(key="k", title="t", unit="number", axis="step", x=[1.0, 2.0], curves=[curve], levels=levels),
        width=600,
        height=250,
    )
    words = [shape.points[0][1] for shape in sheet.shapes if shape.look == "lt-label"]
    lines = [shape.points[-1][1] for shape in sheet.shapes if shape.look == "lt-plan"]
    assert len(words) == 2
    assert abs(words[0] - words[1]) >= 12
    assert not any(word - 9 < line < word for word in words for line in lines)


def test_losses_come_from_the_job_or_from_the_timeline(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, JOB))
    alone = next(c for c in step_charts(run, read_extras(tmp_path), []) if c.key == "loss")
    assert len(alone.curves) == 1
    write_extras(tmp_path, JOB)
    both = next(c for c in step_charts(run, read_extras(tmp_path), []) if c.key == "loss")
    assert [c.name for c in both.curves] == ["loss", "held-out loss"]


def test_what_happened_is_told_once(tmp_path: Path) -> None:
    write_run(tmp_path, JOB, ranks=3, skipped=7)
    write_extras(tmp_path, JOB)
    told = entries(read_run(tmp_path), read_extras(tmp_path))
    assert [e.step for e in told if e.what == "skip"] == [7]
    assert [e.step for e in told if e.what == "checkpoint"] == [20, 40]
    assert [e.at for e in told] == sorted(e.at for e in told)


def test_damaged_files_beside_a_timeline_are_passed_over(tmp_path: Path) -> None:
    write_run(tmp_path, JOB)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": NaN}\n[1, 2]\n\xff\xfe\n{"step": 2, "loss": 3.5}\n{"step"')
    (tmp_path / "events.jsonl").write_text('{"event": "save"}\n{"event": 3}\n"x"\n')
    (tmp_path / "config.json").write_text("[]")
    (tmp_path / "plan.json").write_text("{}")
    extras = read_extras(tmp_path)
    assert extras.losses == {2: 3.5}
    assert extras.config == {}
    assert extras.plan is None
    assert len(extras.happenings) == 1
    assert find(tmp_path).facts()


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 37.2), (3.1, 3.2), (0, 1e-6), (0, 5e9), (-2, 2)])
def test_round_numbers_lie_inside_and_are_few(low: float, high: float) -> None:
    found = round_numbers(low, high, 5)
    assert 2 <= len(found) <= 7
    assert low - 1e-9 * abs(high) <= found[0] < found[-1] <= high * (1 + 1e-9)


def test_thinned_groups_are_all_of_it() -> None:
    for count, most in ((0, 5), (3, 5), (5, 5), (17, 5), (1000, 7)):
        groups = thinned(count, most)
        assert [i for begin, end in groups for i in range(begin, end)] == list(range(count))
        assert len(groups) <= most
