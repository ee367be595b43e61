"""Plans over many ranks as a table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

STAGE_COLOURS = ("#888888", "#c9803a", "#3a7fc9", "#2f8f4e")


def markdown(result: dict[str, Any]) -> str:
    """Model and ranks: states per rank by stage, and the fastest plan that fits."""
    lines = [
        "| model | ranks | states per rank, stages 0 / 1 / 2 / 3 | fastest that fits | step | device peak |",
        "|---|--:|---|---|--:|--:|",
    ]
    keys = list(dict.fromkeys((row["model"], row["ranks"]) for row in result["rows"]))
    for model, ranks in keys:
        rows = [r for r in result["rows"] if (r["model"], r["ranks"]) == (model, ranks)]
        states = " / ".join(f"{r['states_bytes_per_rank'] / 1e9:.3g} GB" for r in rows)
        fitting = [r for r in rows if r["fits"]]
        best = min(fitting, key=lambda r: r["predicted_seconds"], default=None)
        if best is None:
            lines.append(f"| {model} | {ranks} | {states} | none | – | – |")
            continue
        lines.append(
            f"| {model} | {ranks} | {states} | stage {best['stage']}, {best['placement']}, limited by {best['limited_by']} "
            f"| {best['predicted_seconds']:.3g} s | {best['device_peak_bytes'] / 1e9:.3g} GB |"
        )
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """States per rank and predicted step by stage, one column per model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["model"] for row in result["rows"]))
    figure, axes = plt.subplots(3, len(names), figsize=(3.4 * len(names), 8.4), sharex=True, squeeze=False)
    panels = (
        ("states_bytes_per_rank", 1e9, "states per rank, GB"),
        ("predicted_seconds", 1.0, "predicted step, s"),
        ("traffic", 1e9, "traffic per rank and step, GB"),
    )
    for column, name in enumerate(names):
        for line, (key, scale, label) in enumerate(panels):
            axis = axes[line][column]
            for stage, colour in enumerate(STAGE_COLOURS):
                rows = [r for r in result["rows"] if r["model"] == name and r["stage"] == stage]
                points = [(r["ranks"], _value(r, key) / scale) for r in rows if _value(r, key) is not None]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=f"stage {stage}")
            axis.set_xscale("log", base=4)
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
            if column == 0:
                axis.set_ylabel(label)
            if line == 0:
                axis.set_title(name, fontsize=10)
                axis.axhline(80, color="black", linewidth=0.8, linestyle=":")
            if line == len(panels) - 1:
                axis.set_xlabel("ranks")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"predicted for {result['hardware']} from data sheets; dotted: 80 GB", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _value(row: dict[str, Any], key: str) -> Any:
    if key == "traffic":
        return sum(row["traffic_bytes"].values()) or None if row.get("fits") else None
    return row.get(key) or None
