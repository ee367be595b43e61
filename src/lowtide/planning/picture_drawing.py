"""SVG by hand: a few shapes, classes for colours, light and dark. No script, no font, nothing from elsewhere.

Colours are classes with plain values and a media query, not CSS variables: programs that know neither still draw the light
picture. Widths of text are guessed on the large side, so that labels keep apart in any font.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from lowtide.planning.text import clean, shortened

WIDTH = 880
MARGIN = 24
_CHARACTER = 0.58
"""Of the font size: wider than most letters of most sans-serif fonts."""

COLOURS = {
    "parameters": "#4477aa",
    "gradients": "#ee7733",
    "optimizer": "#228833",
    "activations": "#aa3377",
    "slots": "#66bbdd",
    "buffers": "#ccaa33",
    "in flight": "#dd6677",
    "computing": "#9988cc",
    "process and slack": "#8a9099",
    "compute": "#4477aa",
    "disk": "#228833",
    "link": "#85751c",
    "network": "#c2500f",
}
OTHER_COLOUR = "#777777"

STYLE = """
.lt-paper{fill:#ffffff}.lt-ink{fill:#1b1f24}.lt-dim{fill:#59616b}.lt-track{fill:#e8ebef}.lt-wrong{fill:#b42318}
.lt-line{stroke:#c5cbd3;stroke-width:1}.lt-mark{stroke:#1b1f24;stroke-width:2}.lt-curve{stroke:#4477aa;stroke-width:2;fill:none}
.lt-curve2{stroke:#228833;stroke-width:2;fill:none}.lt-point{fill:#4477aa}.lt-point2{fill:#228833}
.lt-on-colour{fill:#ffffff}.lt-cross{stroke:#b42318;stroke-width:2}.lt-edge{stroke:#ffffff;stroke-width:1}
.lt-picture text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif}
@media (prefers-color-scheme:dark){
.lt-paper{fill:#15181c}.lt-ink{fill:#e8eaed}.lt-dim{fill:#a3abb5}.lt-track{fill:#2b3037}.lt-wrong{fill:#ff8a7a}
.lt-line{stroke:#454c55}.lt-mark{stroke:#e8eaed}.lt-curve{stroke:#7fb2e5}.lt-curve2{stroke:#62c073}
.lt-point{fill:#7fb2e5}.lt-point2{fill:#62c073}.lt-cross{stroke:#ff8a7a}.lt-edge{stroke:#15181c}}
""".strip()


def safe(text: str) -> str:
    """For any place in XML: names come from users."""
    return escape(clean(text), quote=True)


def text_width(text: str, size: float) -> float:
    return len(text) * size * _CHARACTER


class Drawing:
    """Shapes from top to bottom; ``y`` is where the next thing may begin."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._shapes: list[str] = []
        self.y: float = MARGIN

    def text(self, x: float, y: float, text: str, *, size: float = 13, look: str = "lt-ink", anchor: str = "start") -> None:
        weight = ' font-weight="600"' if look == "lt-ink" and size > 13 else ""
        at = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}"{weight}'
        self._shapes.append(f'<text class="{look}" {at}>{safe(text)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, *, look: str = "", colour: str = "", tip: str = "") -> None:
        paint = f'class="{look}"' if not colour else f'class="lt-edge" fill="{colour}"'
        size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
        inside = f"<title>{safe(tip)}</title>" if tip else ""
        self._shapes.append(f"<rect {paint} {size}>{inside}</rect>")

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str = "lt-line") -> None:
        self._shapes.append(f'<line class="{look}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def curve(self, points: Iterable[tuple[float, float]], look: str) -> None:
        self._shapes.append(f'<polyline class="{look}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')

    def dot(self, x: float, y: float, look: str, tip: str) -> None:
        self._shapes.append(f'<circle class="{look}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{safe(tip)}</title></circle>')

    def wrapped(self, text: str, *, size: float = 13, look: str = "lt-dim") -> None:
        """Text over as many lines as it needs, from the left margin, below what is there."""
        line = ""
        most = int((WIDTH - 2 * MARGIN) / text_width("m", size))
        for word in (shortened(word, most) for word in text.split()):
            if line and text_width(f"{line} {word}", size) > WIDTH - 2 * MARGIN:
                self._next_line(line, size, look)
                line = ""
            line = f"{line} {word}" if line else word
        if line:
            self._next_line(line, size, look)

    def _next_line(self, line: str, size: float, look: str) -> None:
        self.y += size * 1.45
        self.text(MARGIN, self.y, line, size=size, look=look)

    def legend(self, entries: Iterable[tuple[str, str]], *, left: float, size: float = 12) -> None:
        """Colour and words, side by side, in as many lines as they need."""
        x = left
        self.y += size * 1.5
        for colour, words in entries:
            width = 18 + text_width(words, size) + 18
            if x > left and x + width > WIDTH - MARGIN:
                x = left
                self.y += size * 1.6
            self.rect(x, self.y - size * 0.75, 11, 11, colour=colour)
            self.text(x + 17, self.y + 1, words, size=size)
            x += width

    def svg(self) -> str:
        height = self.y + MARGIN
        frame = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="lt-picture" role="img" {frame}>'
        paper = f'<rect class="lt-paper" width="{WIDTH}" height="{height:.0f}"/>'
        return "\n".join(
            [head, f"<title>{safe(self._title)}</title>", f"<style>{STYLE}</style>", paper, *self._shapes, "</svg>"]
        )


def ticks(end: float) -> list[float]:
    """Four to eight round numbers from 0 to ``end``."""
    if end <= 0:
        return [0.0]
    power = 10.0 ** (len(f"{end:.0f}") - 1) if end >= 1 else 1.0
    while power > end:
        power /= 10
    step = next((power * f for f in (2, 1, 0.5, 0.2, 0.1) if end / (power * f) >= 4), power / 10)
    return [step * i for i in range(int(end / step * 1.0001) + 1)]
