"""What the numbers of ``network.py`` say: summary, table and plot."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchkit.stats import interval, interval_name, quiet_rounds

LABELS = {
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "fsdp2-hybrid": "FSDP2, copied between hosts",
    "deepspeed-3": "DeepSpeed stage 3",
    "lowtide-0": "lowtide stage 0",
    "lowtide-1": "lowtide stage 1",
    "lowtide-2": "lowtide stage 2",
    "lowtide-3-torch": "lowtide stage 3, gloo only",
    "lowtide-3": "lowtide stage 3",
    "lowtide-3-bf16": "lowtide stage 3, 16-bit reduction",
}
ORDER = list(LABELS)

Records = Sequence[tuple[str, str, dict[str, Any]]]


def summary(records: Records, *, reference: str, quiet_share: float, steps: int) -> dict[str, Any]:
    """One entry per rate and system. The reference's rounds of all groups are joined; ratios are within a group."""
    entries: list[dict[str, Any]] = []
    for rate in dict.fromkeys(rate for rate, _, _ in records):
        here = [(name, record) for r, name, record in records if r == rate]
        numbers = {record["group"] for _, record in here}
        keep = {n: quiet_rounds([record for _, record in here if record["group"] == n], quiet_share) for n in numbers}
        measured = [(name, _kept(record, keep[record["group"]], steps)) for name, record in here]
        bases = {record["group"]: record for name, record in measured if name == reference}
        joined = _join(list(bases.values()))
        others = [(name, record) for name, record in measured if name != reference]
        found = [_one(rate, reference, joined, joined)]
        found += [_one(rate, name, record, bases.get(record["group"], joined)) for name, record in others]
        entries += sorted(found, key=lambda entry: ORDER.index(entry["system"]))
    return {"reference": reference, "quiet_share": quiet_share, "systems": entries}


def _kept(record: dict[str, Any], keep: list[int], steps: int) -> dict[str, Any]:
    if record["failure"] is not None:
        return record
    # Ranks wait for each other, so the slower one counts; what is still on the wire after its answer belongs to the turn.
    answered = [max(sum(rank) for rank in record["rounds"][index]) / steps for index in keep]
    drained = [record["drain_seconds"][index] / steps for index in keep]
    return {
        **record,
        "kept": keep,
        "seconds": [a + d for a, d in zip(answered, drained, strict=True)],
        "seconds_without_drain": answered,
        "bytes": [record["wire_bytes"][index] / steps for index in keep],
    }


def _join(references: list[dict[str, Any]]) -> dict[str, Any]:
    longest = max(references, key=lambda record: len(record["losses"][0]))
    lists = "kept", "seconds", "seconds_without_drain", "bytes", "rounds", "foreign_cpu_shares", "wire_bytes", "drain_seconds"
    return {**longest, **{key: [item for record in references for item in record[key]] for key in lists}}


def _one(rate: str, name: str, record: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    head = {"rate": rate, "system": name, "group": record["group"], "failure": record["failure"]}
    if record["failure"] is not None:
        return head
    return {
        **head,
        "step_seconds": asdict(interval(record["seconds"])),
        "step_seconds_without_drain": asdict(interval(record["seconds_without_drain"])),
        "time_ratio": asdict(interval(_ratios(record["seconds"], reference["seconds"]))),
        "wire_bytes_per_step": asdict(interval(record["bytes"])),
        "wire_ratio": asdict(interval(_ratios(record["bytes"], reference["bytes"]))),
        "losses_largest_relative_difference": _loss_difference(record, reference),
        "losses_by_rank": record["losses"],
        "together_peak_bytes": record["together_peak_bytes"],
        "python": record["facts"][0]["python"],
        "versions": record["facts"][0]["versions"],
        "all_rounds": {
            "kept": record["kept"],
            "foreign_cpu_share": record["foreign_cpu_shares"],
            "step_seconds_by_rank": record["rounds"],
            "wire_bytes": record["wire_bytes"],
            "drain_seconds": record["drain_seconds"],
        },
    }


def _ratios(own: Sequence[float], base: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(own, base, strict=True)]


def _loss_difference(record: dict[str, Any], reference: dict[str, Any]) -> float:
    rows = zip(record["losses"], reference["losses"], strict=True)
    return max(abs(a - b) / abs(b) for ours, theirs in rows for a, b in zip(ours, theirs, strict=False))


def _words(rate: str) -> str:
    for ending, word in (("gbit", "Gbit/s"), ("mbit", "Mbit/s"), ("kbit", "kbit/s")):
        if rate.lower().endswith(ending):
            return f"{rate[: -len(ending)]} {word}"
    return f"{rate}/s"


def markdown(result: dict[str, Any]) -> str:
    """The table, and the sentence that says under which conditions it was measured."""
    against = LABELS[result["reference"]]
    rows = [
        f"| link | system | step, s | against {against} | on the wire per step, MB | against {against} |",
        "|---|---|---|---|---|---|",
    ]
    for entry in result["systems"]:
        bold = "**" if entry["system"].startswith("lowtide") else ""
        head = f"| {_words(entry['rate'])} | {bold}{LABELS[entry['system']]}{bold} |"
        if entry["failure"] is not None:
            reason = textwrap.shorten(entry["failure"].replace("|", "/"), 160, placeholder=" ...")
            rows.append(f"{head} not measured: {reason} | – | – | – |")
            continue
        own = entry["system"] == result["reference"]
        times = "1" if own else _interval(entry["time_ratio"])
        wire = "1" if own else f"{entry['wire_ratio']['median']:.2f} ×"
        sent = entry["wire_bytes_per_step"]["median"] / 1e6
        rows.append(f"{head} {entry['step_seconds']['median']:.2f} | {times} | {sent:.1f} | {wire} |")
    return "\n".join([*rows, "", _conditions(result)]) + "\n"


def _interval(ratio: dict[str, Any]) -> str:
    return f"{ratio['median']:.2f} × ({ratio['low']:.2f}–{ratio['high']:.2f})"


def _conditions(result: dict[str, Any]) -> str:
    model, facts = result["model"], result["machine"]
    measured = [entry for entry in result["systems"] if entry["failure"] is None]
    versions = {k: v for entry in measured for k, v in entry["versions"].items()}
    counts = [len(entry["time_ratio"]["all"]) for entry in measured if entry["system"] != result["reference"]]
    worst = max((e["all_rounds"]["foreign_cpu_share"][i] for e in measured for i in e["all_rounds"]["kept"]), default=0.0)
    disturbed = "" if worst <= result["quiet_share"] else f" Disturbed: other processes used up to {worst:.0%} of the machine."
    ranks = f"{' + '.join(map(str, result['ranks_per_host']))} ranks × {result['threads_per_rank']} thread"
    size = f"{model['parameters'] / 1e6:.1f} M parameters, {model['batch']} × {model['context']} tokens per rank"
    return (
        f"{size}, {model['dtype']}, {model['optimizer']}; {ranks} on two hosts in one machine of {facts['cores']} cores "
        f"({facts['processor']}), {(facts['memory_bytes'] or 0) / 2**30:.0f} GiB; "
        f"{', '.join(f'{k} {v}' for k, v in sorted(versions.items()))}; {result['date'][:10]}; "
        f"{min(counts, default=0)} interleaved rounds of {result['steps_per_turn']} steps, median and "
        f"{interval_name(min(counts, default=1))} of the ratio within a round; bytes of both directions.{disturbed}"
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """A row of panels per rate: step time and bytes on the wire."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = list(dict.fromkeys(entry["rate"] for entry in result["systems"]))
    names = [name for name in ORDER if any(entry["system"] == name for entry in result["systems"])]
    size = (12, len(rates) * (0.45 * len(names) + 1.2) + 0.8)
    figure, axes = pyplot.subplots(len(rates), 2, figsize=size, squeeze=False, layout="constrained")
    for (left, right), rate in zip(axes, rates, strict=True):
        entries = list(reversed([entry for entry in result["systems"] if entry["rate"] == rate]))
        for row, entry in enumerate(entries):
            _bars(left, right, row, entry)
        for axis in (left, right):
            axis.set_yticks(range(len(entries)), [LABELS[entry["system"]] for entry in entries])
            axis.set_xlim(0, axis.get_xlim()[1] * 1.25)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(axis="y", length=0)
        right.set_yticklabels([])
        left.set_title(f"{_words(rate)}: seconds per step", fontsize=10, loc="left")
        right.set_title("MB on the wire per step, both directions", fontsize=10, loc="left")
    figure.suptitle(
        f"{result['model']['parameters'] / 1e6:.3g} M GPT, two hosts of two ranks, fp32, {result['date'][:10]}. "
        f"In brackets: over {LABELS[result['reference']]} in the same round. Less is better.",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _bars(left: Any, right: Any, row: int, entry: dict[str, Any]) -> None:
    if entry["failure"] is not None:
        reason = textwrap.shorten(f"not measured: {entry['failure']}", 74, placeholder=" ...")
        left.text(0.03, row, reason, va="center", fontsize=8, color="#a33")
        return
    colour = "#0b6e99" if entry["system"].startswith("lowtide") else "#9aa5ad"
    seconds, sent = entry["step_seconds"], entry["wire_bytes_per_step"]["median"] / 1e6
    left.barh(row, seconds["median"], color=colour, height=0.62)
    left.plot([seconds["low"], seconds["high"]], [row, row], color="#222", linewidth=1.6, marker="|", markersize=7)
    right.barh(row, sent, color=colour, height=0.62)
    ends = (
        (left, seconds["high"], f"{seconds['median']:.2f} s  ({entry['time_ratio']['median']:.2f} ×)"),
        (right, sent, f"{sent:.0f} MB  ({entry['wire_ratio']['median']:.2f} ×)"),
    )
    for axis, end, text in ends:
        axis.annotate(text, (end, row), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9)
