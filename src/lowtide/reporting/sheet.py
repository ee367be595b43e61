"""A drawing of any width that goes into a page, a file of its own, or a PNG: the same shapes three ways. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from lowtide.planning.picture_drawing import MARGIN, STYLE, WIDTH, Drawing, safe

Point = tuple[float, float]

LOOKS = """
.lt-budget{stroke:#b42318;stroke-width:1.5;stroke-dasharray:7 4;fill:none}
.lt-plan{stroke:#1b1f24;stroke-width:1.5;stroke-dasharray:2 3;fill:none}
.lt-event{stroke:#7a4fb5;stroke-width:1}.lt-label{fill:#1b1f24;paint-order:stroke;stroke:#ffffff;stroke-width:3px}
@media (prefers-color-scheme:dark){.lt-budget{stroke:#ff8a7a}.lt-plan{stroke:#e8eaed}.lt-event{stroke:#b79af0}
.lt-label{fill:#e8eaed;stroke:#15181c}}
""".strip()
"""What a picture of a run has besides what pictures of plans have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One thing that was drawn, for those who do not read SVG."""

    kind: str
    """text, rect, line, curve, area"""
    points: tuple[Point, ...]
    """A rect: its corner and its size."""
    look: str = ""
    colour: str = ""
    text: str = ""
    size: float = 0.0
    anchor: str = "start"


class Sheet(Drawing):
    """Shapes anywhere on ``width`` × ``height``; a sheet without a height grows like any drawing."""

    def __init__(self, title: str, *, width: float = WIDTH, height: float | None = None) -> None:
        super().__init__(title)
        self.title = title
        self.width = width
        self.height = height
        self.shapes: list[Shape] = []

    def text(self, x: float, y: float, text: str, *, size: float = 13, look: str = "lt-ink", anchor: str = "start") -> None:
        super().text(x, y, text, size=size, look=look, anchor=anchor)
        self.shapes.append(Shape(kind="text", points=((x, y),), look=look, text=text, size=size, anchor=anchor))

    def rect(self, x: float, y: float, width: float, height: float, *, look: str = "", colour: str = "", tip: str = "") -> None:
        super().rect(x, y, width, height, look=look, colour=colour, tip=tip)
        self.shapes.append(Shape(kind="rect", points=((x, y), (width, height)), look=look, colour=colour))

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str = "lt-line") -> None:
        super().line(x1, y1, x2, y2, look)
        self.shapes.append(Shape(kind="line", points=((x1, y1), (x2, y2)), look=look))

    def curve(self, points: Iterable[Point], look: str) -> None:
        listed = tuple(points)
        super().curve(listed, look)
        self.shapes.append(Shape(kind="curve", points=listed, look=look))

    def coloured_curve(self, points: Sequence[Point], colour: str) -> None:
        """A curve in a colour of its own."""
        listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{listed}"/>')
        self.shapes.append(Shape(kind="curve", points=tuple(points), colour=colour))

    def area(self, points: Sequence[Point], colour: str, tip: str) -> None:
        """A closed shape without an edge."""
        listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polygon fill="{colour}" points="{listed}"><title>{safe(tip)}</title></polygon>')
        self.shapes.append(Shape(kind="area", points=tuple(points), colour=colour))

    def mark(self, x: float, top: float, bottom: float, tip: str) -> None:
        """A thin line from top to bottom with a head, and words for who points at it."""
        head = f'<polygon class="lt-head" points="{x - 4:.1f},{top:.1f} {x + 4:.1f},{top:.1f} {x:.1f},{top + 7:.1f}"/>'
        line = f'<line class="lt-event" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
        self._shapes.append(f"<g>{line}{head}<title>{safe(tip)}</title></g>")
        self.shapes.append(Shape(kind="line", points=((x, top), (x, bottom)), look="lt-event"))

    @property
    def full_height(self) -> float:
        return self.height if self.height is not None else self.y + MARGIN

    def svg(self) -> str:
        """A file of its own."""
        paper = f'<rect class="lt-paper" width="{self.width:.0f}" height="{self.full_height:.0f}"/>'
        style = f"<style>{STYLE}\n{LOOKS}</style>"
        body = "\n".join([f"<title>{safe(self.title)}</title>", style, paper, *self._shapes])
        return f'<svg xmlns="http://www.w3.org/2000/svg" class="lt-picture" role="img" {self._frame()}>\n{body}\n</svg>'

    def inline(self, **attributes: str) -> str:
        """For a page, whose own style colours it."""
        extra = "".join(f' {name.replace("_", "-")}="{escape(value, quote=True)}"' for name, value in attributes.items())
        head = f'<svg class="lt-picture" role="img" aria-label="{safe(self.title)}" {self._frame()}{extra}>'
        return "".join([head, *self._shapes, "</svg>"])

    def _frame(self) -> str:
        width, height = f"{self.width:.0f}", f"{self.full_height:.0f}"
        return f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
