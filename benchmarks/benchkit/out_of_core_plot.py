"""Step time against memory, one point per system of ``out_of_core.py``."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

OURS, THEIRS, BAD = "#0b6e99", "#6b757d", "#a33"
SHORT = {"backward": "", "step": ", update in step"}


def _name(entry: dict[str, Any]) -> str:
    options = entry["options"]
    if entry["kind"] == "deepspeed":
        return "DeepSpeed NVMe, " + ("default" if options.get("sub_group") is None else "tuned")
    if entry["kind"] == "plain":
        return "plain PyTorch"
    if entry["cap_bytes"]:
        return f"{options['memory']} cgroup"
    return f"{options['memory']}, {options['activations']}{SHORT[options['update']]}"


def _points(result: dict[str, Any]) -> list[dict[str, Any]]:
    alive = [e for e in result["systems"] if e["failure"] is None and e.get("ratio_to_plain")]
    plains = [e for e in alive if e["kind"] == "plain"]
    made = [
        {"entry": e, "x": e["peak_anonymous_bytes"] / 1e9, "y": e["ratio_to_plain"]["median"], "bar": e["ratio_to_plain"]}
        for e in alive
        if e["kind"] != "plain"
    ]
    if plains:
        made.append({"entry": plains[0], "x": statistics.median(e["peak_anonymous_bytes"] for e in plains) / 1e9, "y": 1.0})
    return made


def plot(result: dict[str, Any], path: Path) -> None:
    """Down and left is better. A system that was killed stands at the size at which that happened."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = sorted(_points(result), key=lambda p: p["x"])
    killed = [e for e in result["systems"] if e["killed"] and e["cap_bytes"]]
    if not points:
        raise SystemExit("nothing to plot: no system was measured beside plain PyTorch")
    figure, axis = pyplot.subplots(figsize=(11, 6.4), layout="constrained")
    top = max(p["y"] for p in points)
    axis.axhline(1.0, color="#222", linewidth=0.9, linestyle="--", zorder=1)
    for p in points:
        entry = p["entry"]
        colour = OURS if entry["kind"] == "lowtide" else THEIRS
        if "bar" in p:
            axis.plot([p["x"]] * 2, [p["bar"]["low"], p["bar"]["high"]], color=colour, linewidth=1.4, zorder=2)
        capped = entry["kind"] == "lowtide" and entry["cap_bytes"]
        axis.scatter(p["x"], p["y"], s=56, color="white" if capped else colour, edgecolors=colour, linewidths=1.6, zorder=3)
    for entry in killed:
        x = entry["cap_bytes"] / 1e9
        axis.scatter(x, top, s=70, marker="x", color=BAD, zorder=3)
        note = f"{_name(entry)}:\nkilled at {entry['cap_bytes'] / 2**30:.1f} GiB"
        axis.annotate(
            note, (x, top), xytext=(8, 10), textcoords="offset points", ha="right", va="bottom", fontsize=9, color=BAD
        )
    right = max([p["x"] for p in points] + [e["cap_bytes"] / 1e9 for e in killed])
    axis.set_xlim(0, right * 1.16)
    axis.set_ylim(min(0.8, min(p["y"] for p in points) - 0.1), top + 0.25 * max(0.4, top - 1))
    _label(axis, points)
    axis.set_xlabel("peak memory of the job, GB (without pages of files)")
    axis.set_ylabel("step time, plain PyTorch in the same round = 1")
    axis.spines[["top", "right"]].set_visible(False)
    model = result["model"]
    axis.set_title(
        f"{model['parameters'] / 1e6:.0f} M GPT, fp32, AdamW, {model['threads']} threads, {result['runs'][-1]['date'][:10]}. "
        "Filled: lowtide with a memory number; ring: also in a control group of that size.",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _label(axis: Any, points: list[dict[str, Any]]) -> None:
    """Every name stands beside its point, or as near as it can without covering a point or another name."""
    from matplotlib.text import Text

    axis.figure.canvas.draw()
    renderer = axis.figure.canvas.get_renderer()
    taken = [axis.transData.transform((p["x"], p["y"])) for p in points]
    boxes: list[Any] = []
    shifts = [0, *(sign * 13 * step for step in range(1, 16) for sign in (1, -1))]
    places = [(shift, side) for shift in shifts for side in ("left", "right")]
    for p in points:
        for number, (dy, side) in enumerate([*places, (0, "left")]):
            distance = 9 if dy == 0 else 16
            text = axis.annotate(
                _name(p["entry"]),
                (p["x"], p["y"]),
                xytext=(distance if side == "left" else -distance, dy),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=9,
                color=OURS if p["entry"]["kind"] == "lowtide" else THEIRS,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
                arrowprops={"arrowstyle": "-", "color": "#999", "linewidth": 0.6} if dy else None,
            )
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer).expanded(1.03, 1.2)  # of the words, without the line to the point
            inside = axis.bbox.x0 < box.x0 and box.x1 < axis.bbox.x1 and axis.bbox.y0 < box.y0 and box.y1 < axis.bbox.y1
            if (
                inside
                and not any(box.overlaps(other) for other in boxes)
                and not any(box.padded(5).contains(*xy) for xy in taken)
            ):
                boxes.append(box)
                break
            if number < len(places):  # the last one stays, wherever it is: every point has a name
                text.remove()
