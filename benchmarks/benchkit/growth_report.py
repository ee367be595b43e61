"""What the numbers of ``growth.py`` say: rows, table and plot."""

from __future__ import annotations

import statistics
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchkit.stats import interval, quiet_rounds

Row = dict[str, Any]
COLOURS = {"keep": "#b3541e", "recompute": "#0b6e99", "auto": "#4a7c3a", "disk": "#6b4c9a"}


def rows(measured: list[Row], *, quiet_share: float) -> list[Row]:
    """One per series and depth. Activations: what autograd holds when the forward pass ends, as lowtide counts it."""
    return [_row(record, quiet_share) for record in measured]


def _row(record: Row, quiet_share: float) -> Row:
    head = {
        "activations": record["options"]["activations"],
        "memory": record["options"]["memory"],
        "layers": record["layers"],
        "parameters": record["parameters"],
        "failure": record["failure"],
    }
    if record["failure"] is not None:
        return head
    keep = quiet_rounds([record], quiet_share)
    steps = [record["rounds"][i] for i in keep]
    saved = max(s["saved_activation_bytes"] for s in steps)
    peak = record["memory"]["peak_without_files_bytes"]
    seconds = [s["seconds"] for s in steps]
    return {
        **head,
        "peak_bytes": record["memory"]["peak_bytes"],
        "peak_anonymous_bytes": peak,
        "sampled_peak_anonymous_bytes": record["sampled_peak_bytes"],
        "saved_activation_bytes": saved,
        "peak_minus_activations_bytes": peak - saved,
        "step_seconds": asdict(interval(seconds)),
        "seconds_per_layer": statistics.median(seconds) / record["layers"],
        "wait_share": statistics.median(s["wait_seconds"] / s["seconds"] for s in steps),
        "read_bytes_per_step": statistics.median(s["read_bytes"] for s in steps),
        "written_bytes_per_step": statistics.median(s["written_bytes"] for s in steps),
        "disk_bytes": max(s["disk_bytes"] for s in record["steps"]),
        "facts": record["facts"],
        "begin": record["begin"],
        "all_rounds": {"kept": keep, "foreign_cpu_share": record["foreign_cpu_shares"], "steps": record["steps"]},
    }


def _series(row: Row) -> str:
    number = "all on disk" if row["memory"] is None else f'`memory="{row["memory"]}"`'
    return f"activations {row['activations']}, {number}"


def markdown(result: Row) -> str:
    """The table, and the conditions under which it was measured."""
    lines = [
        "| series | layers | parameters, M | peak, GB | peak − activations, GB | step, s | per layer, s | waits for the disk |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        head = f"| {_series(row)} | {row['layers']} | {row['parameters'] / 1e6:.0f} |"
        if row["failure"] is not None:
            why = textwrap.shorten(row["failure"].replace("|", "/"), 120, placeholder=" ...")
            lines.append(f"{head} failed: {why} | – | – | – | – |")
            continue
        lines.append(
            f"{head} {row['peak_anonymous_bytes'] / 1e9:.2f} | {row['peak_minus_activations_bytes'] / 1e9:.2f} | "
            f"{row['step_seconds']['median']:.2f} | {row['seconds_per_layer']:.3f} | {row['wait_share']:.1%} |"
        )
    model, facts = result["model"], result["machine"]
    shares = [r["all_rounds"]["foreign_cpu_share"][i] for r in _alive(result) for i in r["all_rounds"]["kept"]]
    disturbed = f" Disturbed: other processes used up to {max(shares):.0%} of the machine." if _too_busy(result, shares) else ""
    conditions = (
        f"Width {model['width']}, {model['heads']} heads, {model['batch']} × {model['context']} tokens, {model['dtype']}, "
        f"{model['optimizer']}, update in backward; {facts['cores']} cores ({facts['processor']}); {result['date'][:10]}. "
        "Peak without pages of files." + disturbed
    )
    return "\n".join([*lines, "", conditions]) + "\n"


def _too_busy(result: Row, shares: list[float]) -> bool:
    return max(shares, default=0.0) > result["quiet_share"]


def _alive(result: Row) -> list[Row]:
    return [row for row in result["rows"] if row["failure"] is None]


def plot(result: Row, path: Path) -> None:
    """Two panels over the number of layers: peak with and without activations, and time of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for key in dict.fromkeys((r["activations"], r["memory"]) for r in _alive(result)):
        mine = [r for r in _alive(result) if (r["activations"], r["memory"]) == key]
        layers = [r["layers"] for r in mine]
        style: Row = {"color": COLOURS[key[0]], "marker": "o", "linestyle": "-" if key[1] is None else ":"}
        name = f"{key[0]}, {'all on disk' if key[1] is None else f'memory {key[1]}'}"
        left.plot(layers, [r["peak_anonymous_bytes"] / 1e9 for r in mine], **style, label=f"{name}: peak")
        thin = {**style, "marker": "s", "alpha": 0.55, "linewidth": 1, "markerfacecolor": "white"}
        left.plot(layers, [r["peak_minus_activations_bytes"] / 1e9 for r in mine], **thin, label=f"{name}: without activations")
        right.plot(layers, [r["step_seconds"]["median"] for r in mine], **style, label=name)
    ticks = result["model"]["layers"]
    left.set_ylabel("GB, without pages of files")
    right.set_ylabel("seconds per step")
    for axis in (left, right):
        axis.set_xlabel("layers")
        axis.set_xticks(ticks)
        axis.set_xlim(0, max(ticks) * 1.05)
        axis.set_ylim(0, axis.get_ylim()[1] * 1.05)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False)
    figure.suptitle(
        f"GPT of width {result['model']['width']}, fp32, AdamW, update in backward, {result['date'][:10]}: "
        "memory and time as layers double",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
