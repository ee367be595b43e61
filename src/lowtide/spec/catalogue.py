"""Machines that are described in data files: the ones that come with lowtide (``hardware/*.json``), and a user's own.

A file is one ``Hardware`` as JSON. It is checked when it is read, because a zero or a misspelt field would only show as a
strange plan much later.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from importlib import resources
from pathlib import Path
from typing import Any, cast

from lowtide.errors import ArgumentError
from lowtide.files import read_plain
from lowtide.spec.hardware import Hardware

_MOST_BYTES = 1 << 20
_MAY_BE_ZERO = {"busy", "fault_seconds", "free_bytes"}


def names() -> list[str]:
    """The machines that come with lowtide."""
    folder = resources.files("lowtide").joinpath("hardware")
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load(name_or_path: str) -> Hardware:
    """One of ``names()``, or the file at a path (anything that ends in ``.json`` or has a folder in it)."""
    if name_or_path.endswith(".json") or os.sep in name_or_path:
        return parse(_read(name_or_path), where=repr(name_or_path))
    known = names()
    if name_or_path not in known:
        close = difflib.get_close_matches(name_or_path.lower(), known, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ArgumentError(
            f"hardware {name_or_path!r} is not known; {hint}known are {', '.join(known)}, or give the path of a .json file."
        )
    text = resources.files("lowtide").joinpath("hardware").joinpath(f"{name_or_path}.json").read_text(encoding="utf-8")
    return parse(text, where=f"the file of {name_or_path!r}")


def parse(text: str, *, where: str) -> Hardware:
    """``Hardware`` from JSON, or an ArgumentError that names the field."""
    from pydantic import TypeAdapter, ValidationError  # only who reads a file pays for the import

    try:
        hardware = TypeAdapter(Hardware).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise ArgumentError(f"{where} does not describe hardware: {field}: {first['msg']}.") from error
    problems = unknown_fields(json.loads(text), dataclasses.asdict(hardware)) + impossible_numbers(hardware)
    if problems:
        raise ArgumentError(f"{where} does not describe hardware: {problems[0]}.")
    return hardware


def impossible_numbers(described: object, field: str = "") -> list[str]:
    """Which numbers of a description no machine can have, by field."""
    if isinstance(described, bool):
        return []
    if isinstance(described, int | float):
        least = 0 if field.rpartition(".")[2] in _MAY_BE_ZERO else math.ulp(0)
        fine = math.isfinite(described) and described >= least
        return [] if fine else [f"{field} is {described}; it must be a {'' if least == 0 else 'positive '}number"]
    if dataclasses.is_dataclass(described):
        inside = {item.name: getattr(described, item.name) for item in dataclasses.fields(described)}
    elif isinstance(described, dict):
        inside = cast("dict[str, object]", described)
    elif isinstance(described, tuple):
        inside = {str(index): item for index, item in enumerate(cast("tuple[object, ...]", described))}
    else:
        return []
    return [
        problem for name, value in inside.items() for problem in impossible_numbers(value, f"{field}.{name}" if field else name)
    ]


def unknown_fields(given: Any, understood: Any, field: str = "") -> list[str]:
    """What stands in a file and was not read: a misspelt name of an optional field would otherwise change nothing."""
    if not isinstance(given, dict) or not isinstance(understood, dict):
        return []
    found: list[str] = []
    for name, value in cast("dict[str, Any]", given).items():
        path = f"{field}.{name}" if field else name
        if name in understood:
            found += unknown_fields(value, understood[name], path)
        else:
            close = difflib.get_close_matches(name, cast("dict[str, Any]", understood), n=1)
            found.append(f"{path} is not a field" + (f"; did you mean {close[0]!r}?" if close else ""))
    return found


def _read(path: str) -> str:
    try:
        return read_plain(Path(os.path.realpath(path)), _MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ArgumentError(f"{path!r} cannot be read as hardware: {reason}; known names are {', '.join(names())}.") from error
