"""A report as files: page, pictures, trace, JSON; from the library and from the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lowtide.cli.main import run as cli
from lowtide.errors import ArgumentError
from lowtide.reporting.page import embedded
from lowtide.reporting.report import open_report
from tests.kit.synthetic_run import Job, write_extras, write_run

JOB = Job(steps=20, detailed=(2, 10))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    job = Job(steps=20, ranks=2, detailed=(2, 10), skipped=5, last_unit='<img src=x onerror="alert(1)">')
    write_run(tmp_path / "my-run", job)
    write_extras(tmp_path / "my-run", job)
    return tmp_path / "my-run"


class Elements(HTMLParser):
    """What is in a page: elements that close, ids that are there once, and everything that would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        outside = [v or "" for n, v in attrs if n in ("src", "href", "data", "srcset")]
        self.loads += [v for v in outside if not v.startswith(("#", "data:"))]
        self.handlers += [name for name in names if name.startswith("on")]
        if tag not in ("meta", "link", "br", "rect", "line", "polyline", "polygon", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("rect", "polygon", "circle", "line", "polyline"):
            return
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(folder: Path) -> None:
    page = open_report(folder).html()
    found = Elements(page)
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    assert found.loads == []
    assert found.handlers == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page), "nothing from elsewhere"
    first = re.search(r'id="verdict">([^<]*)<', page)
    assert first is not None
    assert first[1].startswith("Bounded by disk reads: 31 % of the step waits for them; about ")
    assert len(page) < 1_500_000


def test_embedded_data_cannot_leave_its_script() -> None:
    nasty = {"name": "</script><script>alert(1)</script><!-- & \u2028"}
    text = embedded(nasty)
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == nasty


def test_save_knows_what_to_write_by_the_name(folder: Path, tmp_path: Path) -> None:
    report = open_report(folder)
    assert report.save(tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads(report.save(tmp_path / "a.json").read_text())["verdict"]["bound"] == "disk reads"
    root = ElementTree.fromstring(report.save(tmp_path / "a.svg").read_text())
    assert root.tag.endswith("svg")
    with pytest.raises(ArgumentError, match=r"\.html, \.svg, \.png"):
        report.save(tmp_path / "a.docx")
    with pytest.raises(ArgumentError, match="cannot be written"):
        report.save(tmp_path / "no" / "a.html")
    assert not list(tmp_path.glob(".*part"))


def test_png_shows_what_the_svg_shows(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    data = open_report(folder).save(tmp_path / "a.png")
    picture = imread(data)
    assert picture.shape[1] == 1760, "880 units at two dots each"
    blue = (abs(picture[:, :, 0] - 0x44 / 255) < 0.01) & (abs(picture[:, :, 2] - 0xAA / 255) < 0.01)
    assert blue.sum() > 2000, "compute and parameters are there"


def test_png_without_matplotlib_is_a_clear_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ArgumentError, match=r"lowtide\[bench\]"):
        open_report(folder).png()


def test_the_trace_has_spans_counters_and_names(folder: Path) -> None:
    events: list[dict[str, Any]] = json.loads(open_report(folder).trace())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and e["cat"] == "disk read"]
    assert {e["pid"] for e in spans} == {0, 1}
    assert all(e["dur"] >= 0 and e["args"]["bytes"] for e in spans)
    step = next(e for e in events if e.get("name") == "step 2" and e["pid"] == 0)
    of_step = [e for e in spans if e["pid"] == 0 and e["args"]["step"] == 2]
    assert of_step
    for span in of_step:
        assert step["ts"] - 1 <= span["ts"] <= step["ts"] + step["dur"] + 1
    assert any(e["ph"] == "C" and e["name"] == "host bytes" for e in events)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0 on box", "rank 1 on box"}
    assert any(e["ph"] == "i" and e["name"] == "skip" for e in events)


def test_the_command_writes_the_page_into_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Bounded by disk reads: 31 %")
    assert (folder / "report.html").exists()
    assert f"written: {folder / 'report.html'}" in out


def test_the_command_with_everything(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in ("a.html", "a.svg", "a.trace")]
    assert cli(["report", str(folder), "--out", files[0], "--svg", files[1], "--trace", files[2], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 20
    assert found["ranks"][1]["budget_bytes"] == 4 * 2**30
    assert found["predictions"]
    assert {mark["what"] for mark in found["marks"]} >= {"skip", "replan", "checkpoint"}
    assert all(Path(file).stat().st_size > 1000 for file in files)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("command", ["report", "top"])
def test_a_folder_without_a_run_is_a_mistake(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli([command, str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert cli([command, str(tmp_path)]) == 2
    assert "has no timeline" in capsys.readouterr().err


def test_reading_a_run_needs_no_torch(folder: Path) -> None:
    """A report is made on any machine that has the files, at once."""
    program = (
        "import sys; from lowtide.cli.main import run; "
        f"code = run(['report', {str(folder)!r}, '--json']); code += run(['top', {str(folder)!r}, '--once', '--json']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
