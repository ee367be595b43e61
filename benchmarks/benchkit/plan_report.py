"""The accuracy of plans as a table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def markdown(result: dict[str, Any]) -> str:
    """One row per case: what was predicted, what was measured."""
    lines = [
        "| case | step predicted | measured | off by | peak predicted | measured | off by |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"| {row['name']} | – | – | – | – | – | {row['error']} |")
            continue
        peaks = [f"{row[key] / 2**20:.0f} MiB" for key in ("predicted_peak_bytes", "peak_bytes")]
        lines.append(
            f"| {row['name']} | {row['predicted_seconds']:.2f} s | {row['seconds']:.2f} s | {row['seconds_ratio'] - 1:+.0%} "
            f"| {peaks[0]} | {peaks[1]} | {row['peak_ratio'] - 1:+.1%} |"
        )
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Predicted against measured, seconds and bytes, with the band that was promised."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if "error" not in row]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6))
    panels = (("seconds", "predicted_seconds", 1.0, "seconds of a step", (0.85, 1.15)),
              ("peak_bytes", "predicted_peak_bytes", 2.0**30, "peak, GiB", (1.0, 1.05)))  # fmt: skip
    for axis, (measured, predicted, scale, label, band) in zip(axes, panels, strict=True):
        values = [row[key] / scale for row in rows for key in (measured, predicted)]
        ends = [0.8 * min(values), 1.25 * max(values)]
        axis.fill_between(ends, [band[0] * e for e in ends], [band[1] * e for e in ends], alpha=0.15, label="promised")
        axis.plot(ends, ends, color="grey", linewidth=0.8)
        for group in groups:
            mine = [row for row in rows if row["group"] == group]
            axis.scatter([r[measured] / scale for r in mine], [r[predicted] / scale for r in mine], s=22, label=group)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(*ends)
        axis.set_ylim(*ends)
        marks = [m * 10.0**e for e in range(-3, 5) for m in (1, 2, 5) if ends[0] <= m * 10.0**e <= ends[1]]
        for set_ticks in (axis.set_xticks, axis.set_yticks):
            set_ticks(marks, [f"{mark:g}" for mark in marks])
            set_ticks([], minor=True)
        axis.set_xlabel(f"measured {label}")
        axis.set_ylabel(f"predicted {label}")
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
