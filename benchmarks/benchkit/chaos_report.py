"""What a chaos run says: the table for people."""

from __future__ import annotations

from typing import Any

WORDS = {
    "kills": ("kill −9 while training, loading and saving", "resumed with other bits, or not at all"),
    "power": ("power cuts (ext4 stopped without a flush)", "acknowledged and lost, or with other bits"),
    "flips": ("flipped bits", "not noticed"),
    "hostile": ("hostile manifests, tables and payload headers", "crashes, untyped errors, memory beyond the limit"),
}


def markdown(result: dict[str, Any]) -> str:
    """One row per kind, and the conditions."""
    lines = ["| attack | number | what must not happen | happened |", "|---|--:|---|--:|"]
    for kind, (what, wrong) in WORDS.items():
        row = result.get(kind)
        if row is None:
            continue
        number = f"{row['done']:,}" if "skipped" not in row else f"skipped: {row['skipped']}"
        lines.append(f"| {what} | {number} | {wrong} | {row['differences']} |")
    facts = result["machine"]
    lines += ["", *(_detail(kind, result[kind]) for kind in WORDS if result.get(kind, {}).get("counts"))]
    lines += [
        "",
        f"{facts['cores']} cores ({facts['processor']}), {result['date'][:10]}, {result['took_seconds'] / 60:.0f} minutes.",
    ]
    return "\n".join(lines) + "\n"


def _detail(kind: str, row: dict[str, Any]) -> str:
    counts = ", ".join(f"{name} {number:,}" for name, number in row["counts"].items())
    return f"- {kind}: {counts}."
