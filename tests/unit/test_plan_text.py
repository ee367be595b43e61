"""Plans as text and pictures: everything is there, nothing runs into anything else, and no name can break out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from lowtide.errors import ArgumentError
from lowtide.planning.frontier import Point, frontier, frontier_text, sizes_between
from lowtide.planning.picture import frontier_svg, plan_html, plan_svg
from lowtide.planning.picture_drawing import ticks
from lowtide.planning.picture_page import frontier_page
from lowtide.planning.plan import Plan, Price
from lowtide.planning.planner import make_plan
from lowtide.planning.request import VARIABLE, Request
from lowtide.planning.text import WIDTH, bar, count_text, percent_text, plan_text, seconds_text, shortened, size_text, unit_rows
from lowtide.spec.catalogue import load
from lowtide.spec.counts import bare_count
from lowtide.spec.hardware import Compute, Disk, Hardware, Wire
from lowtide.spec.model import ModelSpec, UnitFacts, Work

GIB = 1 << 30
MIB = 1 << 20
MACHINE = Hardware(
    name="a small machine",
    source="made up for a test",
    compute=Compute(name="two cores", flops={"fp32": 1e11}, bandwidth=1e10, op_seconds=5e-6, fault_seconds=0.0),
    host_bytes=8 * GIB,
    host_bandwidth=1e10,
    inside=Wire(bandwidth=1e9, latency=1e-4),
    disk=Disk(read=1e9, write=5e8, mixed=7e8, free_bytes=500 * GIB),
)
NASTY = '<script>alert("x")</script>&\x1b[31m\u202e' + "long." * 40


def model_of(units: int, *, batch: str = "2×256 tokens", name: str = "blocks") -> ModelSpec:
    numel = 400 * MIB // 4 // units
    facts = [
        UnitFacts(
            name=f"{name}.{i}",
            numel=numel,
            trained_numel=numel,
            parameter_bytes=4 * numel,
            forward=Work(flops=4e10 / units, operations=10),
            backward=Work(flops=8e10 / units, operations=20),
            activation_bytes=400 * MIB // units,
            input_bytes=10 * MIB // units,
        )
        for i in range(units)
    ]
    return ModelSpec(name="a model", units=tuple(facts), dtype="fp32", batch=batch)


def plans() -> dict[str, Plan]:
    tight, disk = Request(memory_bytes=int(1.5 * GIB)), Request(memory_bytes=3 * GIB, disk_bytes=0)
    cluster = Request(world_size=64, precision="mixed")
    streamed = make_plan(model_of(20), MACHINE, tight)
    return {
        "plain": make_plan(model_of(12), MACHINE, disk),
        "one unit": make_plan(model_of(1), MACHINE, disk),
        "streamed": streamed,
        "a hundred units": make_plan(model_of(100), MACHINE, tight),
        "in backward": make_plan(model_of(20), MACHINE, replace(tight, update="backward")),
        "no batch": make_plan(model_of(12, batch=""), MACHINE, disk),
        "bare count": make_plan(bare_count(7_500_000_000), load("h100-80g"), cluster),
        "nasty names": replace(
            make_plan(model_of(3, name=NASTY), MACHINE, disk),
            model=NASTY,
            hardware=NASTY,
            hardware_source=NASTY,
            batch=NASTY,
            reasons=(NASTY,),
            prices=(Price(change=NASTY, seconds=1.0),),
        ),
        "shares": replace(streamed, shares=(0.25, 0.75)),
        "every unit differs": replace(
            streamed, units=tuple(replace(u, parameters=("host", "disk")[i % 2]) for i, u in enumerate(streamed.units))
        ),
    }


PLANS = plans()


def points() -> list[Point]:
    return frontier(model_of(20), MACHINE, Request(), "memory", sizes_between(256 * MIB, 3 * GIB))


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2048, "2.0 KiB"),
        (3 * MIB, "3.0 MiB"),
        (GIB // 2, "0.50 GiB"),
        (1023 * GIB, "1023.00 GiB"),
        (3 << 40, "3.00 TiB"),
        (5 << 50, "5.00 PiB"),
    ],
)
def test_sizes(nbytes: int, words: str) -> None:
    assert size_text(nbytes) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0 µs"), (2e-5, "20 µs"), (0.0123, "12.3 ms"), (1.0, "1.00 s"), (250.4, "250 s"), (7500.0, "2 h 05 min")],
)
def test_seconds(seconds: float, words: str) -> None:
    assert seconds_text(seconds) == words


def test_counts_and_shares() -> None:
    assert [count_text(n) for n in (12, 1500, 97_835_520, 7.5e9, 1e12)] == ["12", "1.5 k", "97.8 M", "7.5 B", "1 T"]
    assert [percent_text(n, 200) for n in (0, 1, 100, 200)] == ["0 %", "< 1 %", "50 %", "100 %"]
    assert percent_text(1, 0) == "–"


def test_a_bar_is_as_long_as_its_part() -> None:
    assert bar(1, 2, 10) == "█████"
    assert bar(1, 1000, 10) == "▏"  # there, so visible
    assert bar(5, 1, 10) == "█" * 10  # never longer than its room
    assert bar(0, 1, 10) == bar(1, 0, 10) == ""


def test_a_long_name_keeps_both_ends() -> None:
    assert shortened("model.layers.17.attention.projection", 20) == "model.laye…rojection"
    assert len(shortened("x" * 100, 33)) == 33


@pytest.mark.parametrize("end", [0.003, 0.7, 1.0, 1.9, 7.0, 29.8, 100.0, 4321.0])
def test_ticks_are_few_and_inside(end: float) -> None:
    found = ticks(end)
    assert found[0] == 0
    assert found[-1] <= end * 1.001
    assert 4 <= len(found) <= 11


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_text_fits_the_terminal(name: str) -> None:
    text = plan_text(PLANS[name])
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(c.isprintable() or c == "\n" for c in text)
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_text_says_what_the_plan_says() -> None:
    plan = PLANS["streamed"]
    text = str(plan)
    for tier in plan.tiers:
        for number in (tier.peak_bytes, tier.capacity_bytes, *tier.parts.values()):
            assert size_text(number) in text
    for phase in plan.phases:
        assert seconds_text(phase.seconds) in text
        assert f"waits for {phase.limited_by}" in text
    for kind in ("parameters", "gradients", "optimizer", "activations"):
        for where, number in plan.count(kind).items():
            assert f"{where} {number}" in text
    for what, size in plan.traffic_bytes.items():
        assert f"{what} {size_text(size)}" in text
    assert seconds_text(plan.predicted_seconds) in text


def test_without_a_batch_no_seconds_are_shown() -> None:
    text = plan_text(PLANS["no batch"])
    assert "not known: without a batch only bytes are planned" in text
    assert "one step takes" not in text
    assert " ms" not in text
    assert "not known" in plan_svg(PLANS["no batch"])


def test_neighbours_that_are_alike_are_one_row() -> None:
    assert [name for name, _ in unit_rows(PLANS["plain"])] == ["blocks.0 to blocks.11 (12)"]
    assert len(unit_rows(PLANS["every unit differs"])) == 20
    assert "blocks.7" not in plan_text(PLANS["every unit differs"])  # the counts say more than twenty rows


def test_gradients_of_an_update_in_backward() -> None:
    assert "none outlives its unit" in plan_text(PLANS["in backward"])


def test_reasons_and_prices_are_shown() -> None:
    plan = replace(PLANS["plain"], reasons=("because " * 30,), prices=(Price(change="a faster disk", seconds=0.25),))
    text = plan_text(plan)
    assert "  - because because" in text
    assert "a faster disk" in text
    assert "250.0 ms" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "a faster disk" in plan_html(plan)


# -- pictures ----------------------------------------------------------------------------------------------------------


def _texts(svg: str) -> list[tuple[float, float, float]]:
    """Baseline, left and right of every text, if letters are as wide as in most fonts."""
    found: list[tuple[float, float, float]] = []
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        x, size = float(element.attrib["x"]), float(element.attrib["font-size"])
        width = len(element.text or "") * size * 0.53
        left = {"start": x, "middle": x - width / 2, "end": x - width}[element.attrib["text-anchor"]]
        found.append((float(element.attrib["y"]), left, left + width))
    return found


def _assert_apart(svg: str) -> None:
    texts = _texts(svg)
    width = float(ElementTree.fromstring(svg).attrib["width"])
    height = float(ElementTree.fromstring(svg).attrib["height"])
    assert all(0 <= left and right <= width and 0 < y <= height for y, left, right in texts)
    for (y1, left1, right1), (y2, left2, right2) in itertools.combinations(texts, 2):
        assert abs(y1 - y2) >= 10 or right1 <= left2 or right2 <= left1


@pytest.mark.parametrize("name", PLANS)
def test_a_picture_is_xml_and_its_labels_keep_apart(name: str) -> None:
    _assert_apart(plan_svg(PLANS[name]))


def test_bars_are_as_long_as_their_bytes() -> None:
    plan = PLANS["plain"]
    root = ElementTree.fromstring(plan_svg(plan))
    rects = {
        title.text: float(rect.attrib["width"])
        for rect in root.iter("{http://www.w3.org/2000/svg}rect")
        if (title := rect.find("{http://www.w3.org/2000/svg}title")) is not None
    }
    host = plan.tiers[0]
    whole = float(root.attrib["width"]) - 48
    for name, size in host.parts.items():
        assert rects[f"{name} {size_text(size)}"] == pytest.approx(whole * size / host.capacity_bytes, abs=0.1)


def test_pictures_need_nothing_from_elsewhere() -> None:
    for text in (plan_svg(PLANS["streamed"]), plan_html(PLANS["streamed"]), frontier_svg(points())):
        assert "<script" not in text
        assert "url(" not in text
        assert "@import" not in text
        assert "href" not in text
        assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 0
        assert "prefers-color-scheme:dark" in text


def test_names_cannot_break_out() -> None:
    plan = PLANS["nasty names"]
    for text in (plan_svg(plan), plan_html(plan), plan_text(plan)):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "<script" not in plan_svg(plan) + plan_html(plan)
    assert "&lt;script&gt;" in plan_html(plan)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


@pytest.mark.parametrize("name", PLANS)
def test_a_page_is_well_formed_and_has_the_numbers(name: str) -> None:
    plan, tags = PLANS[name], _Tags()
    tags.feed(plan_html(plan))
    assert tags.open == []
    assert {size_text(tier.peak_bytes) for tier in plan.tiers} <= set(tags.cells)
    assert ("One step" in plan_html(plan)) == bool(plan.batch)


# -- the frontier ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high"), [(2 * GIB, 16 * GIB), (GIB // 2, 12 * GIB), (100 * MIB, 101 * MIB), (1, 65), (7, 10**15)]
)
def test_sizes_are_8_to_12_and_rise(low: int, high: int) -> None:
    sizes = sizes_between(low, high)
    assert 8 <= len(sizes) <= 12
    assert (sizes[0], sizes[-1]) == (low, high)
    assert all(a < b for a, b in itertools.pairwise(sizes))


def test_even_sizes_are_chosen() -> None:
    assert sizes_between(2 * GIB, 16 * GIB) == [n * GIB for n in range(2, 17, 2)]
    assert sizes_between(GIB // 4, 3 * GIB) == [n * GIB // 4 for n in range(1, 13)]


@pytest.mark.parametrize(("low", "high"), [(5, 5), (9, 3), (0, 9), (10, 12)])
def test_a_range_without_room_is_refused(low: int, high: int) -> None:
    with pytest.raises(ArgumentError, match="range"):
        sizes_between(low, high)


def test_the_frontier_shows_what_fits_and_what_does_not() -> None:
    found = points()
    assert found[0].plan is None
    assert found[0].short_bytes > 0
    assert found[-1].plan is not None
    text = frontier_text(found)
    assert "does not fit" in text
    assert max(map(len, text.splitlines())) <= WIDTH + 10
    _assert_apart(frontier_svg(found))
    for point in found:
        assert size_text(point.nbytes) in text
        assert point.to_dict()["fits"] == (point.plan is not None)
    tags = _Tags()
    tags.feed(frontier_page(found, frontier_svg(found)))
    assert tags.open == []


def test_sizes_that_lie_close_are_not_all_named() -> None:
    sizes = [2 * GIB, 3 * GIB, 4 * GIB, 4 * GIB + 100 * MIB]
    svg = frontier_svg(frontier(model_of(5), MACHINE, Request(), "memory", sizes))
    _assert_apart(svg)
    assert ">4.10 GiB<" in svg
    assert ">4.00 GiB<" not in svg


def test_a_frontier_without_known_work_has_no_seconds() -> None:
    found = frontier(model_of(5, batch=""), MACHINE, Request(), "memory", [2 * GIB, 4 * GIB])
    assert all(p.seconds is None for p in found)
    assert "seconds" not in frontier_svg(found).partition("</style>")[2]
    assert "not known" in frontier_text(found)


def test_fields_are_those_of_a_request() -> None:
    assert set(VARIABLE.values()) <= set(Request.__slots__)
