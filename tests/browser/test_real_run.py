"""The report of a run that really ran, in a real browser: two ranks, out of core, as `lowtide train` records it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.reporting.report import open_report
from lowtide.reporting.timeline import read_run
from tests.kit.browser import Page, chromium

STEPS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ranks in processes of their own: what a report says about a process must not be about the tests."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "spool").mkdir()
    words = f"train --preset gpt-17m --synthetic --batch 1 --ranks 2 --stage 3 --steps {STEPS} --save-every 2 --memory 800MiB"
    places = ["--disk", str(folder / "spool"), "--run", str(folder / "run")]
    subprocess.run([sys.executable, "-m", "lowtide", *words.split(), *places], check=True, timeout=240, capture_output=True)
    return folder / "run"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, run: Path) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("browser") / "profile") as browser:
        browser.size(1280, 800)
        browser.open(open_report(run).save(run / "report.html"))
        yield browser


def test_all_of_it_is_there_and_nothing_goes_wrong(page: Page) -> None:
    assert page.run("document.querySelector('h1').textContent").startswith("gpt-17m, ")
    assert page.run("document.querySelector('#verdict').textContent").startswith("Bounded ")
    keys = page.run("[...document.querySelectorAll('figure.chart')].map(f => f.dataset.key)")
    for rank in (0, 1):
        assert {f"memory-host-{rank}", f"memory-disk-{rank}", f"kernel-{rank}", f"busy-{rank}"} <= set(keys)
    assert {"loss", "seconds", "peaks", "traffic"} <= set(keys)
    empty = (
        "Object.values(lowtideReport.data.charts).filter(c => !c.series.some(s => s.values.some(v => v > 0))).map(c => c.title)"
    )
    assert page.run(empty) == []
    assert "checkpoint (2)" in page.run("document.querySelector('figure[data-key=loss] .flags').textContent")
    for section in ("#memory", "#step", "#curves", "#disk", "#machine", "#predictions", "#happened", "#units", "#arenas"):
        assert page.run(f"document.querySelector('{section}') !== null"), section
    assert page.errors == []
    assert all(request.startswith(("file:", "data:")) for request in page.requests)


def test_waits_in_its_timeline_say_for_what(run: Path, page: Page) -> None:
    waits = {row.verb for t in read_run(run).ranks for line in t.last.spans for row in line.rows if row.lane == "wait"}
    assert waits
    assert waits <= {"wait for disk", "wait for ranks"}
    assert waits <= set(page.run("lowtideReport.data.steps.flatMap(s => s.verbs)"))


def test_it_zooms_and_sorts(page: Page) -> None:
    page.run("document.getElementById('timeline').focus()")
    whole = page.run("lowtideReport.timeline.whole()")
    page.press("+")
    begin, end = page.run("lowtideReport.timeline.view()")
    assert end - begin == pytest.approx(0.6 * whole)
    page.press("0")
    assert page.run("lowtideReport.timeline.view()") == [0, whole]
    head = page.run("[...document.querySelectorAll('#units thead th')].findIndex(h => h.textContent.startsWith('size'))")
    page.click(f"#units thead th:nth-child({head + 1}) button")
    sizes = page.run(f"[...document.querySelectorAll('#units tbody tr')].map(r => Number(r.cells[{head}].dataset.value))")
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] > 0
    assert page.errors == []
