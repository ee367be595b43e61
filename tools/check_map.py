"""The map in ARCHITECTURE.md is true: every source file stands in its table, every file in the table exists.

A row that ends in ``/`` stands for a whole folder. ``__init__.py`` files that hold only a docstring need no row.
Also checked: a note cited as ``[Note: name]`` is defined exactly once, at the start of a line
of a comment, docstring or page.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

_ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
_NOTE = re.compile(r"\[Note: ([^\]]+)\]")
_NOTE_DEFINED = re.compile(r"^\s*#*\s*\[Note: ([^\]]+)\]")


def _says_nothing(path: Path) -> bool:
    body = ast.parse(path.read_text()).body
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body)


def map_problems(package: Path, page: Path) -> list[str]:
    """Rows without a file and files without a row."""
    rows = set(_ROW.findall(page.read_text()))
    files = {str(path.relative_to(package)): path for path in sorted(package.rglob("*.py"))}
    folders = tuple(row for row in rows if row.endswith("/"))
    unmapped = [
        name
        for name, path in files.items()
        if name not in rows and not name.startswith(folders) and not (path.name == "__init__.py" and _says_nothing(path))
    ]
    gone = [row for row in sorted(rows) if row not in files and not (row.endswith("/") and (package / row).is_dir())]
    return [f"{page.name}: no row for {name}" for name in unmapped] + [f"{page.name}: {row} does not exist" for row in gone]


def note_problems(paths: list[Path]) -> list[str]:
    """Notes that are cited but not defined, or defined twice."""
    defined: dict[str, list[str]] = {}
    cited: dict[str, str] = {}
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            place = f"{path.name}:{number}"
            if match := _NOTE_DEFINED.match(line):
                defined.setdefault(match[1], []).append(place)
            else:
                cited.update(dict.fromkeys(_NOTE.findall(line), place))
    missing = [f"{place}: [Note: {name}] is not defined anywhere" for name, place in cited.items() if name not in defined]
    twice = [f"[Note: {name}] is defined at {' and '.join(places)}" for name, places in defined.items() if len(places) > 1]
    return missing + twice


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    package, page = root / "src" / "lowtide", root / "ARCHITECTURE.md"
    problems = map_problems(package, page) + note_problems([page, *sorted(package.rglob("*.py"))])
    print("\n".join(problems) or "the map is true")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
