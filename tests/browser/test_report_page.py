"""The report in a real browser: it renders, logs no error, asks nothing of a network, zooms, sorts, and works by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.reporting.report import open_report
from tests.kit.browser import Page, chromium
from tests.kit.synthetic_run import GIB, MIB, Job, write_extras, write_run

NASTY = "head</script><b>bold</b>&amp;"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, restarted once, with names that would break a page that does not escape them."""
    folder = tmp_path_factory.mktemp("run")
    job = Job(ranks=2, comm_share=0.05, skipped=25, last_unit=NASTY, facts=(("note", NASTY),))
    write_run(folder, job)
    write_extras(folder, job)
    write_run(
        folder, job, started=job.started + 200, first_step=41, steps=10, end="error", end_text="</script><b>oops</b> &amp;"
    )
    return open_report(folder).save(folder / "report.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture
def page(browser: Page, report: Path) -> Page:
    browser.size(1280, 800)
    browser.prefer("light")
    browser.errors.clear()
    browser.requests.clear()
    browser.open(report)
    return browser


def view(page: Page) -> tuple[float, float, float]:
    begin, end = page.run("lowtideReport.timeline.view()")
    return begin, end, page.run("lowtideReport.timeline.whole()")


def test_it_renders_everything_and_asks_for_nothing(page: Page, report: Path) -> None:
    assert page.run("document.querySelector('#verdict').textContent").startswith(
        "Bounded by disk reads: 31 % of the step waits"
    )
    sections = ("#memory", "#step", "#curves", "#disk", "#predictions", "#happened", "#units", "#arenas", "#verdict")
    for selector in sections:
        box: Any = page.run(
            f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect(); return b.height }})()"
        )
        assert box > 20, selector
    shown = "[...document.querySelectorAll('.wide-only svg')].filter(s => s.getBoundingClientRect().height > 100).length"
    assert page.run(shown) >= 6
    assert page.errors == []
    assert page.requests == [report.resolve().as_uri()] or all(r.startswith(("file:", "data:")) for r in page.requests)


def test_the_timeline_is_drawn_in_the_colours_of_its_lanes(page: Page) -> None:
    count = """(() => {
      const c = document.getElementById('timeline'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
      let n = 0;
      for (let i = 0; i < d.length; i += 4) if (d[i] === 0x44 && d[i + 1] === 0x77 && d[i + 2] === 0xaa) n++;
      return n; })()"""
    assert page.run(count) > 2000, "compute is there"


def test_the_wheel_zooms_at_the_pointer_and_dragging_moves(page: Page) -> None:
    x, y = page.middle_of("#timeline")
    begin, end, whole = view(page)
    assert (begin, end) == (0, whole)
    for _ in range(5):
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240)
    page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    near, far, _ = view(page)
    assert far - near < 0.5 * whole
    assert near < 0.455 * whole < far, "what is below the pointer stays there: the names of lanes take some room"
    page.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    page.mouse("mouseMoved", x - 200, y, button="left", buttons=1)
    page.mouse("mouseReleased", x - 200, y, button="left", buttons=0, clickCount=1)
    moved, _, _ = view(page)
    assert moved > near, "dragged to the left, later moments are seen"
    page.click("#zoom-all")
    assert view(page)[:2] == (0, whole)


def test_the_timeline_by_keyboard(page: Page) -> None:
    page.run("document.getElementById('timeline').focus()")
    whole = view(page)[2]
    page.press("+")
    page.press("+")
    begin, end, _ = view(page)
    assert end - begin == pytest.approx(0.36 * whole)
    page.press("ArrowRight")
    assert view(page)[0] > begin
    page.press("0")
    assert view(page)[:2] == (0, whole)


def test_another_step_and_one_rank_alone(page: Page) -> None:
    rows = page.run("lowtideReport.timeline.rows()")
    choose = "(() => {{ const s = document.getElementById('{0}'); s.value = '{1}'; s.dispatchEvent(new Event('change')) }})()"
    before = view(page)[2]
    page.run(choose.format("step-choice", 0))
    assert view(page)[2] != before
    page.run(choose.format("rank-choice", 1))
    assert page.run("lowtideReport.timeline.rows()") == rows // 2


def test_pointing_at_a_span_and_at_a_chart_says_what_is_there(page: Page) -> None:
    x, _ = page.middle_of("#timeline")
    page.run("document.getElementById('zoom-all').click()")
    said: set[str] = set()
    top = page.run("document.getElementById('timeline').getBoundingClientRect().top")
    for row in range(8):
        page.mouse("mouseMoved", x, top + 36 + 20 * row)
        said.add(page.run("document.getElementById('timeline-reading').textContent"))
    assert any("forward blocks." in text or "backward blocks." in text for text in said), said
    page.run("document.querySelector('figure[data-key=seconds]').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    text = page.run("document.querySelector('figure[data-key=seconds] .reading').textContent")
    assert "step 3" in text
    assert "rank 1" in text


def column(page: Page, table: str, number: int) -> list[str]:
    return page.run(f"[...document.querySelectorAll('#{table} tbody tr')].map(r => r.cells[{number}].textContent)")


def test_tables_are_sorted_by_click_and_by_key(page: Page) -> None:
    names = column(page, "units", 0)
    page.click("#units thead th:nth-child(9) button")
    waits = page.run("[...document.querySelectorAll('#units tbody tr')].map(r => Number(r.cells[8].dataset.value))")
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > waits[-1]
    assert page.run("document.querySelector('#units thead th:nth-child(9)').ariaSort") == "descending"
    page.run("document.querySelector('#units thead th:nth-child(1) button').focus()")
    page.press("Enter")
    assert column(page, "units", 0) == [
        "blocks.0",
        *[f"blocks.{i}" for i in range(1, 10)],
        "embed",
        NASTY,
    ]
    page.press("Enter")
    assert column(page, "units", 0)[0].startswith("head</script>")
    assert sorted(names) == sorted(column(page, "units", 0))


def test_names_from_outside_stay_text(page: Page) -> None:
    assert page.run("[...document.querySelectorAll('b')].every(b => b.closest('.reading'))")
    assert NASTY in page.run("lowtideReport.data.steps[0].ranks[0].names")
    assert "head</script><b>bold</b>&amp;" in page.run("document.querySelector('footer').textContent")


@pytest.mark.parametrize(
    ("system", "clicks", "dark"),
    [("light", 0, False), ("dark", 0, True), ("dark", 1, False), ("light", 2, True)],
)
def test_light_and_dark(page: Page, system: str, clicks: int, dark: bool) -> None:
    page.prefer(system)
    page.run("localStorage.clear()")
    for _ in range(clicks):
        page.click("#theme")
    red = page.run("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    assert (red < 60) is dark
    for _ in range((3 - clicks) % 3):
        page.click("#theme")
    assert page.run("document.documentElement.dataset.theme === undefined")


def test_a_phone_has_no_sideways_scroll(page: Page) -> None:
    page.size(390, 844, scale=2, phone=True)
    assert page.run("document.documentElement.scrollWidth") <= 390
    assert page.run("getComputedStyle(document.querySelector('.wide-only')).display") == "none"
    assert page.run("document.querySelector('.narrow-only svg').getBoundingClientRect().width") > 300
    assert page.errors == []


def test_every_control_can_be_reached_and_shows_it(page: Page) -> None:
    reached = page.run("[...document.querySelectorAll('button, select, canvas, figure.chart')].every(e => e.tabIndex >= 0)")
    assert reached
    named = page.run(
        "[...document.querySelectorAll('button, canvas')].every(e => (e.ariaLabel || e.textContent).trim().length > 0)"
    )
    assert named
    page.press("Tab")
    page.run("document.getElementById('zoom-in').focus()")
    page.press("Tab")
    assert page.run("document.activeElement.id") == "zoom-out"
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_job_that_ran_out_of_memory_says_so_first(browser: Page, tmp_path: Path) -> None:
    text = "activations of a larger batch (unit 'blocks.3'): 5000.0 MiB needed, 4096.0 MiB allowed. Raise memory="
    write_run(tmp_path, growth=4 * MIB, budget=4 * GIB, end="error", end_text=text)
    browser.open(open_report(tmp_path).save(tmp_path / "report.html"))
    order = "[...document.querySelectorAll('#post-mortem, #memory')].map(e => e.id)"
    assert browser.run(order) == ["post-mortem", "memory"]
    said = browser.run("document.querySelector('#post-mortem').textContent")
    assert "would have needed more memory than it was given" in said
    assert "The smallest change that fits" in said
    assert browser.errors == []
