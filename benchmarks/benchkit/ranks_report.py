"""What the numbers of ``ranks.py`` say: summary, table and plot."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchkit.reduce_scatter import markdown as reduce_markdown
from benchkit.stats import interval, interval_name, quiet_rounds

LABELS = {
    "alone": "no communication",
    "ddp": "DDP",
    "zero-redundancy": "DDP + ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "deepspeed-1": "DeepSpeed stage 1",
    "deepspeed-2": "DeepSpeed stage 2",
    "deepspeed-3": "DeepSpeed stage 3",
    "lowtide-0": "lowtide stage 0",
    "lowtide-1": "lowtide stage 1",
    "lowtide-2": "lowtide stage 2",
    "lowtide-3": "lowtide stage 3",
    "lowtide-3-shared": "lowtide stage 3, shared memory",
    "lowtide-3-memory": 'lowtide stage 3, `memory="2.4GiB"`',
    "lowtide-3-torch": "lowtide stage 3, gloo",
}
# By what is sharded: nothing; optimizer; + gradients; + parameters.
ORDER = (
    ("alone", "ddp", "lowtide-0"),
    ("zero-redundancy", "deepspeed-1", "lowtide-1"),
    ("deepspeed-2", "lowtide-2"),
    ("fsdp2", "deepspeed-3", "lowtide-3", "lowtide-3-torch", "lowtide-3-shared", "lowtide-3-memory"),
)
SHARDS = ("nothing", "optimizer", "+ gradients", "+ parameters")
VERSUS = (
    ("lowtide-0", "ddp"),
    ("lowtide-1", "zero-redundancy"),
    ("lowtide-1", "deepspeed-1"),
    ("lowtide-2", "deepspeed-2"),
    ("lowtide-3", "fsdp2"),
    ("lowtide-3", "deepspeed-3"),
    ("lowtide-3-torch", "fsdp2"),
    ("lowtide-3-shared", "ddp"),
    ("lowtide-3-memory", "ddp"),
    ("lowtide-3-shared", "fsdp2"),
    ("lowtide-3-shared", "deepspeed-3"),
    ("lowtide-3-shared", "lowtide-3-torch"),
)

Records = Sequence[tuple[str, dict[str, Any]]]


def _per_step(record: dict[str, Any], key: str, keep: Sequence[int]) -> list[float]:
    """Seconds per step in the rounds to keep: ranks wait for each other, so the slower one counts."""
    return [max(sum(rank) / len(rank) for rank in record[key][index]) for index in keep]


def _worst(record: dict[str, Any], key: str) -> int:
    return max(rank[key] for rank in record["memory"])


def _losses(record: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    pairs = [
        pair
        for ours, theirs in zip(record["losses"], reference["losses"], strict=True)
        for pair in zip(ours, theirs, strict=False)
    ]
    differences = [abs(ours - theirs) for ours, theirs in pairs]
    steps = min(len(record["losses"][0]), len(reference["losses"][0]))
    first = next(
        (i + 1 for i in range(steps) if any(a[i] != b[i] for a, b in zip(record["losses"], reference["losses"], strict=True))),
        None,
    )
    return {
        "losses_by_rank": record["losses"],
        "losses_equal_reference_in_every_digit": first is None,
        "losses_compared_steps": steps,
        "losses_first_different_step": first,
        "losses_largest_difference": max(differences),
    }


def _one(name: str, record: dict[str, Any], reference: dict[str, Any], plain_bytes: int | None) -> dict[str, Any]:
    head = {"system": name, "group": record["group"], "failure": record["failure"]}
    if record["failure"] is not None:
        return head
    return {
        **head,
        "step_seconds": asdict(interval(record["seconds"])),
        "ratio_to_ddp": asdict(interval(_ratios(record["seconds"], reference["seconds"]))),
        "cpu_seconds_per_step": asdict(interval(record["cpu"])),
        "cpu_ratio_to_ddp": asdict(interval(_ratios(record["cpu"], reference["cpu"]))),
        "peak_bytes_per_rank": _worst(record, "peak_bytes"),
        "peak_pss_bytes_per_rank": max(record["pss_peak_bytes"]),
        "together_peak_bytes": record["together_peak_bytes"],
        "together_over_plain": record["together_peak_bytes"] / plain_bytes if plain_bytes else None,
        "rest_pss_bytes_per_rank": _worst(record, "rest_pss_bytes"),
        "imported_bytes": max(rank["imported_bytes"] for rank in record["facts"]),
        "idle_cpu_seconds_between_turns": max(record["idle_cpu_seconds"]),
        **_losses(record, reference),
        "python": record["facts"][0]["python"],
        "versions": record["facts"][0]["versions"],
        "all_rounds": {
            "kept": record["kept"],
            "foreign_cpu_share": record["foreign_cpu_shares"],
            "step_seconds_by_rank": record["rounds"],
            "cpu_seconds_by_rank": record["cpu_rounds"],
        },
        "by_rank": {"memory": record["memory"], "pss_peak_bytes": record["pss_peak_bytes"]},
    }


def _ratios(own: Sequence[float], base: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(own, base, strict=True)]


def _versus(systems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """lowtide against the system that shards the same, directly if they shared a group, else each against DDP."""
    by_name = {s["system"]: s for s in systems if s["failure"] is None}
    found: list[dict[str, Any]] = []
    for ours, theirs in VERSUS:
        if ours not in by_name or theirs not in by_name:
            continue
        a, b = by_name[ours], by_name[theirs]
        if theirs == "ddp":
            how, ratio = "in the same rounds", a["ratio_to_ddp"]
        elif a["group"] == b["group"]:
            how, ratio = "in the same rounds", asdict(interval(_ratios(a["step_seconds"]["all"], b["step_seconds"]["all"])))
        else:
            how, ratio = "through DDP", {"median": a["ratio_to_ddp"]["median"] / b["ratio_to_ddp"]["median"]}
        memory = a["peak_bytes_per_rank"] / b["peak_bytes_per_rank"]
        found.append({"system": ours, "against": theirs, "measured": how, "time_ratio": ratio, "peak_memory_ratio": memory})
    return found


def summary(records: Records, *, reference: str, quiet_share: float, plain_bytes: int | None) -> dict[str, Any]:
    """One entry per system, in the order of what it shards; DDP's rounds of all groups are joined."""
    if not any(name == reference for name, _ in records):
        return {"quiet_share": quiet_share, "systems": [], "comparisons": []}
    numbers = sorted({record["group"] for _, record in records})
    keep = {n: quiet_rounds([r for _, r in records if r["group"] == n], quiet_share) for n in numbers}
    measured = [(name, _kept(record, keep[record["group"]])) for name, record in records]
    bases = {record["group"]: record for name, record in measured if name == reference}
    joined = _join([record for name, record in measured if name == reference])
    systems = [_one(reference, joined, joined, plain_bytes)]
    systems += [
        _one(name, record, bases.get(record["group"], joined), plain_bytes) for name, record in measured if name != reference
    ]
    order = [name for row in ORDER for name in row]
    systems.sort(key=lambda s: order.index(s["system"]))
    return {"quiet_share": quiet_share, "systems": systems, "comparisons": _versus(systems)}


def _kept(record: dict[str, Any], keep: list[int]) -> dict[str, Any]:
    if record["failure"] is not None:
        return record
    return {**record, "kept": keep, "seconds": _per_step(record, "rounds", keep), "cpu": _per_step(record, "cpu_rounds", keep)}


def _join(references: list[dict[str, Any]]) -> dict[str, Any]:
    """DDP as one record; its losses do not depend on the group, so the longest stand for all."""
    longest = max(references, key=lambda record: len(record["losses"][0]))
    lists = (
        "rounds",
        "cpu_rounds",
        "kept",
        "seconds",
        "cpu",
        "memory",
        "pss_peak_bytes",
        "idle_cpu_seconds",
        "foreign_cpu_shares",
    )
    together = max(record["together_peak_bytes"] for record in references)
    joined = {key: [item for record in references for item in record[key]] for key in lists}
    return {**longest, **joined, "together_peak_bytes": together}


def markdown(result: dict[str, Any]) -> str:
    """The table, and the sentence that says under which conditions it was measured."""
    if not result["systems"]:
        return reduce_markdown(result.get("reduce_scatter"))
    rows = [
        "| shards | system | step, s | against DDP | peak per rank, GB | both ranks over a plain process | losses as DDP's |",
        "|---|---|---|---|---|---|---|",
    ]
    by_name = {s["system"]: s for s in result["systems"]}
    for shards, names in zip(SHARDS, ORDER, strict=True):
        for s in (by_name[name] for name in names if name in by_name):
            bold = "**" if s["system"].startswith("lowtide") else ""
            head = f"| {shards} | {bold}{LABELS[s['system']]}{bold} |"
            if s["failure"] is not None:
                rows.append(f"{head} not measured: {_short(s['failure'])} | – | – | – | – |")
                continue
            ratio = s["ratio_to_ddp"]
            against = "1" if s["system"] == "ddp" else f"{ratio['median']:.2f} × ({ratio['low']:.2f}–{ratio['high']:.2f})"
            same = "–" if s["system"] in ("ddp", "alone") else _losses_word(s)
            peak = s["peak_bytes_per_rank"] / 1e9
            over = s.get("together_over_plain")
            both = f"{over:.2f} ×" if over else "–"
            rows.append(f"{head} {s['step_seconds']['median']:.2f} | {against} | {peak:.2f} | {both} | {same} |")
    text = "\n".join([*rows, "", _conditions(result)]) + "\n"
    return text + reduce_markdown(result.get("reduce_scatter"))


def _losses_word(s: dict[str, Any]) -> str:
    if s["losses_equal_reference_in_every_digit"]:
        return f"every digit, {s['losses_compared_steps']} steps"
    return f"differ from step {s['losses_first_different_step']} (by {s['losses_largest_difference']:.1e})"


def _short(text: str) -> str:
    return textwrap.shorten(text.replace("|", "/"), 160, placeholder=" ...")


def _millions(count: int) -> str:
    return f"{count / 1e6:.0f}" if count >= 10**7 else f"{count / 1e6:.1f}"


def _conditions(result: dict[str, Any]) -> str:
    model, facts = result["model"], result["machine"]
    versions = {k: v for s in result["systems"] for k, v in s.get("versions", {}).items()}
    return (
        f"{_millions(model['parameters'])} M parameters, {model['batch']} × {model['context']} tokens per rank, "
        f"{model['dtype']}, {model['optimizer']}, {result['ranks']} ranks × {result['threads_per_rank']} thread; "
        f"{facts['cores']} cores ({facts['processor']}), {(facts['memory_bytes'] or 0) / 2**30:.0f} GiB; "
        f"{', '.join(f'{k} {v}' for k, v in sorted(versions.items()))}; {result['date'][:10]}; "
        f"{_rounds(result)} interleaved rounds, median and {_interval_name(result)} of the ratio within a round."
        f"{_disturbed(result)}"
    )


def _counts(result: dict[str, Any]) -> list[int]:
    return sorted({len(s["ratio_to_ddp"]["all"]) for s in result["systems"] if s["failure"] is None and s["system"] != "ddp"})


def _interval_name(result: dict[str, Any]) -> str:
    return interval_name(min(_counts(result), default=result["rounds"]))


def _rounds(result: dict[str, Any]) -> str:
    counts = _counts(result)
    return "–".join(str(n) for n in dict.fromkeys((counts[0], counts[-1]))) if counts else str(result["rounds"])


def _disturbed(result: dict[str, Any]) -> str:
    """A sentence if rounds had to be used in which other processes kept the machine busy."""
    rounds = [s["all_rounds"] for s in result["systems"] if s["failure"] is None and s["system"] != "ddp"]
    worst = max((r["foreign_cpu_share"][i] for r in rounds for i in r["kept"]), default=0.0)
    if worst <= result["quiet_share"]:
        return ""
    return f" Disturbed: other processes used up to {worst:.0%} of the machine during a turn."


def plot(result: dict[str, Any], path: Path) -> None:
    """Two panels with one row per system: time against DDP, and peak memory of a rank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    systems = list(reversed(result["systems"]))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 0.5 * len(systems) + 2.2), sharey=True, layout="constrained")
    for row, s in enumerate(systems):
        colour = "#0b6e99" if s["system"].startswith("lowtide") else "#9aa5ad"
        if s["failure"] is not None:
            reason = textwrap.shorten(f"not measured: {s['failure']}", 74, placeholder=" ...")
            left.text(0.03, row, reason, va="center", fontsize=8, color="#a33", backgroundcolor="white", zorder=3)
            continue
        ratio, peak = s["ratio_to_ddp"], s["peak_bytes_per_rank"] / 1e9
        left.barh(row, ratio["median"], color=colour, height=0.62)
        left.plot([ratio["low"], ratio["high"]], [row, row], color="#222", linewidth=1.6, marker="|", markersize=7)
        right.barh(row, peak, color=colour, height=0.62)
        times = f"{ratio['median']:.2f} ×  ({s['step_seconds']['median']:.2f} s)"
        for axis, end, text in ((left, max(ratio["high"], ratio["median"]), times), (right, peak, f"{peak:.2f} GB")):
            axis.annotate(text, (end, row), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9)
    left.axvline(1.0, color="#222", linewidth=0.9, linestyle="--")
    left.set_yticks(range(len(systems)), [LABELS[s["system"]].replace("`", "") for s in systems])
    left.set_xlabel(f"step time, DDP in the same round = 1 (line: {_interval_name(result)})")
    right.set_xlabel("peak resident memory of one rank, GB")
    for axis in (left, right):
        axis.set_xlim(0, axis.get_xlim()[1] * 1.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    figure.suptitle(
        f"{_millions(result['model']['parameters'])} M GPT, {result['ranks']} ranks × 1 thread, fp32, "
        f"{_rounds(result)} interleaved rounds, {result['date'][:10]}. Less is better on both sides.",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
