"""How ``lowtide ckpt`` answers: text for a person, one line of JSON for a program."""

from __future__ import annotations

import json as json_text
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.output import say
from lowtide.errors import CheckpointError

if TYPE_CHECKING:
    from lowtide.checkpoint.appearing import Exported
    from lowtide.checkpoint.collect import Collected
    from lowtide.checkpoint.compare import Comparison, Difference
    from lowtide.checkpoint.folder import Found
    from lowtide.checkpoint.manifest import Manifest
    from lowtide.checkpoint.source import Source

_MOST_ALIKE = 5
"""Differences of one kind that are shown; more say less than their number."""
_MOST_TEXT = 400


@dataclass(frozen=True, slots=True)
class Verified:
    """What reading all of one checkpoint came to."""

    path: str
    nbytes: int
    problem: str | None


# -- what there is ----------------------------------------------------------------------------------------------------


def listing(
    where: Path,
    found: Sequence[Found],
    refused: Sequence[tuple[Path, CheckpointError]],
    leftovers: Sequence[Path],
    *,
    json: bool,
) -> None:
    """``ls``."""
    rows: list[dict[str, Any]] = [{"name": f.path.name, "path": str(f.path), **_facts(f.manifest)} for f in found]
    damaged = [{"path": str(path), "problem": error.problem} for path, error in refused]
    if json:
        _say_json({"folder": str(where), "checkpoints": rows, "damaged": damaged, "leftovers": [str(p) for p in leftovers]})
        return
    width = max((len(row["name"]) for row in rows), default=0)
    if rows:
        say(f"{'name':<{width}}  {'step':>9}  ranks  stage  {'copied':>11}  {'linked':>11}  written")
    for row in rows:
        linked = _size(row["linked_bytes"]) if row["linked_bytes"] else "–"
        say(
            f"{row['name']:<{width}}  {row['step']:>9}  {row['world_size']:>5}  {row['stage']:>5}  "
            f"{_size(row['copied_bytes']):>11}  {linked:>11}  {row['created']}"
        )
    for row in damaged:
        say(f"damaged: {Path(row['path']).name}: {row['problem']}")
    if leftovers:
        say(f"{len(leftovers)} left by saves that have not ended; `lowtide ckpt gc` removes those of dead ones")
    if not rows and not damaged:
        say(f"there is no checkpoint in {where}")


def _facts(manifest: Manifest) -> dict[str, Any]:
    """What a manifest says, in numbers that are known without the tables."""
    return {
        **{key: getattr(manifest, key) for key in ("step", "sequence", "created", "world_size", "stage", "lowtide", "torch")},
        "copied_bytes": sum(file.nbytes for file in manifest.files if file.xxh3 is not None),
        "linked_bytes": sum(file.nbytes for file in manifest.files if file.xxh3 is None),
    }


def contents(source: Source, *, tensors: bool, json: bool) -> None:
    """``show``."""
    model = source.model
    states = source.tables[0].objects.get("state")
    facts: dict[str, Any] = {
        "path": str(source.path),
        **_facts(source.manifest),
        "plan": source.manifest.plan,
        "parameters": len(source.parameters),
        "elements": sum(f.numel for f in source.parameters.values()),
        "kinds": _kinds(source),
        "tied": model.aliases,
        "buffers": sorted(model.buffers),
        "optimizer": model.optimizer,
        "groups": [group.options for group in model.groups or []],
        "state": sorted(states) if isinstance(states, dict) else [],
        "extra": model.extra,
        "files": [file.model_dump() for file in source.manifest.files],
    }
    rows = _tensor_rows(source) if tensors else []
    if json:
        _say_json(facts | ({"tensors": rows} if tensors else {}))
        return
    _say_contents(facts, rows)


def _kinds(source: Source) -> dict[str, int]:
    """Bytes of every kind."""
    out: dict[str, int] = {}
    for name, facts in source.parameters.items():
        for kind in source.kinds(name):
            dtype = source.dtype(kind, name)
            out[kind] = out.get(kind, 0) + facts.numel * (dtype.itemsize if dtype is not None else 0)
    return out


def _tensor_rows(source: Source) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(f.shape), "dtype": str(f.dtype).removeprefix("torch."), "kinds": source.kinds(name)}
        for name, f in source.parameters.items()
    ]


def _say_contents(facts: Mapping[str, Any], tensors: Iterable[Mapping[str, Any]]) -> None:
    from lowtide.planning.text import count_text

    linked = f", {_size(facts['linked_bytes'])} in linked spool files" if facts["linked_bytes"] else ""
    lines = {
        "checkpoint": facts["path"],
        "step": facts["step"],
        "written": f"{facts['created']} by lowtide {facts['lowtide']}, torch {facts['torch']}",
        "ranks": f"{facts['world_size']}, stage {facts['stage']}",
        "files": f"{len(facts['files'])}, {_size(facts['copied_bytes'])}{linked}",
        "parameters": f"{facts['parameters']} with {count_text(facts['elements'])} elements",
        "tied names": len(facts["tied"]),
        **{f"  {kind}": _size(nbytes) for kind, nbytes in facts["kinds"].items()},
        "buffers": len(facts["buffers"]),
        "optimizer": facts["optimizer"] or "none",
        **{f"  group {n}": _short(options) for n, options in enumerate(facts["groups"])},
        "state": ", ".join(facts["state"]) or "none",
        "extra": _short(facts["extra"]),
    }
    for name, value in lines.items():
        say(f"{name:<22} {value}")
    for row in tensors:
        say(f"{row['name']}  {tuple(row['shape'])}  {row['dtype']}  {' '.join(row['kinds'])}")


# -- what was done ----------------------------------------------------------------------------------------------------


def verified(results: Sequence[Verified], *, json: bool) -> None:
    """``verify``."""
    if json:
        _say_json({"ok": all(r.problem is None for r in results), "checkpoints": [asdict(r) for r in results]})
        return
    for result in results:
        name = Path(result.path).name
        say(
            f"{name}: every byte is as it was written ({_size(result.nbytes)})"
            if result.problem is None
            else f"{name}: DAMAGED: {result.problem}"
        )


def written(source: Path, done: Exported, *, json: bool) -> None:
    """``export`` and ``import``."""
    if json:
        facts = {"files": list(done.files), "tensors": done.tensors, "bytes": done.nbytes}
        _say_json({"source": str(source), "target": str(done.path), **facts})
        return
    say(f"{done.path}: {_count(done.tensors, 'tensor')}, {_size(done.nbytes)}, in {_count(len(done.files), 'file')}")


def compared(found: Comparison, *, model_only: bool, json: bool) -> None:
    """``diff``."""
    if json:
        rows = [asdict(difference) for difference in found.differences]
        facts = {"first": str(found.first), "second": str(found.second), "tensors": found.tensors, "bytes": found.nbytes}
        _say_json({"identical": found.identical, "model_only": model_only, **facts, "differences": rows})
        return
    shown = Counter[tuple[str, str]]()
    for difference in found.differences:
        shown[difference.section, difference.what] += 1
        if shown[difference.section, difference.what] <= _MOST_ALIKE:
            say(str(difference))
    if (more := sum(max(0, count - _MOST_ALIKE) for count in shown.values())) > 0:
        say(f"... and {more} more of these (--json has all)")
    amount = f"{_count(found.tensors, 'tensor')}, {_size(found.nbytes)}"
    if found.identical:
        say(f"identical: every bit of {amount}" + ("" if model_only else ", and every value"))
        return
    for section in dict.fromkeys(d.section for d in found.differences):
        say(f"different: {section}: {_summary([d for d in found.differences if d.section == section])}")
    say(f"different: {_count(len(found.differences), 'difference')} in all ({amount} compared)")


def _summary(differences: Sequence[Difference]) -> str:
    tensors = [d for d in differences if d.what == "elements"]
    others = len(differences) - len(tensors)
    parts = [f"{others} not the same"] if others else []
    if tensors:
        elements = sum(d.different for d in tensors)
        most = max(d.largest for d in tensors)
        parts.append(f"{_count(elements, 'element')} of {_count(len(tensors), 'tensor')}, by at most {most:.6g}")
    return ", ".join(parts)


def collected(where: Path, done: Collected, *, dry_run: bool, json: bool) -> None:
    """``gc``."""
    if json:
        facts: dict[str, Any] = {key: [str(p) for p in getattr(done, key)] for key in ("leftovers", "restored", "checkpoints")}
        facts["spools"] = [{"path": str(s.path), "bytes": s.nbytes} for s in done.spools]
        facts["left"] = [{"path": str(item.path), "reason": item.reason} for item in done.left]
        _say_json({"folder": str(where), "dry_run": dry_run, **facts, "bytes": done.nbytes})
        return
    would = "would be " if dry_run else ""
    for path in done.restored:
        say(f"{path.name}: {would}put back, a save had moved it aside and never ended")
    for path in done.leftovers:
        say(f"{path.name}: {would}removed, it was left by a save that never ended")
    for path in done.checkpoints:
        say(f"{path.name}: {would}removed, there are enough newer ones")
    for spool in done.spools:
        say(f"{spool.path.parent.name}/{spool.path.name}: {_size(spool.nbytes)} that no checkpoint refers to {would}given back")
    for item in done.left:
        say(f"{item.path.relative_to(where)}: left alone: {item.reason}")
    say(f"{_size(done.nbytes)} {would}given back")


# -- words ------------------------------------------------------------------------------------------------------------


def _size(nbytes: int) -> str:
    from lowtide.planning.text import size_text

    return size_text(nbytes)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _short(value: object) -> str:
    text = json_text.dumps(value)
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."


def _say_json(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json_text.dumps(value) + "\n")
