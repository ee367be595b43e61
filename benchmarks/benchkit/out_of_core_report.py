"""What the numbers of ``out_of_core.py`` say: one entry per system, merged results, tables."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchkit.out_of_core_plot import plot
from benchkit.stats import interval, interval_name, quiet_rounds

__all__ = ["entries", "markdown", "merge", "plot", "wrong_losses"]

REFERENCE = "plain"
GIB = 2**30
TRACE_BYTES = 2**20  # a step that moves less moves nothing
Entry = dict[str, Any]


# -- entries ----------------------------------------------------------------------------------------------------------


def entries(records: list[Entry], disk: list[Entry], *, reference: str, quiet_share: float) -> list[Entry]:
    """One entry per record, each with its ratio to the reference of the same group, so that results can be merged."""
    made: list[Entry] = []
    for group in dict.fromkeys(r["group"] for r in records):
        members = [r for r in records if r["group"] == group]
        plains = [r for r in members if r["name"] == reference and r["failure"] is None]
        keep = quiet_rounds(members, quiet_share)
        base = _base([_seconds(r, keep) for r in plains])
        losses = max((_losses(r) for r in plains), key=len, default=[])
        rates = [d["bytes_per_second"] for d in disk if d["group"] == group]
        made += [_entry(r, keep, base, losses, statistics.mean(rates) if rates else None) for r in members]
    return made


def _seconds(record: Entry, keep: Sequence[int]) -> list[float]:
    return [record["rounds"][i]["seconds"] for i in keep]


def _base(plains: list[list[float]]) -> list[float]:
    """The reference's seconds per round; where it ran before and after the others, the mean of both."""
    return [statistics.mean(row) for row in zip(*plains, strict=True)]


def _losses(record: Entry) -> list[float]:
    return [s["loss"] for s in record["steps"]]


def _entry(record: Entry, keep: list[int], base: list[float], losses: list[float], disk_rate: float | None) -> Entry:
    head = {
        "system": record["name"],
        "kind": record["kind"],
        "group": record["group"],
        "run": 0,
        "options": record["options"],
        "cap_bytes": record["cap_bytes"],
        "failure": record["failure"],
        "killed": record["killed"],
        "cgroup": record["cgroup"],
        "steps": len(record["steps"]),
        "losses": _losses(record),
        "facts": record["facts"],
        "begin": record["begin"],
        "sampled_peak_anonymous_bytes": record["sampled_peak_bytes"],
    }
    if record["failure"] is not None:
        return {**head, **_compared(_losses(record), losses)}
    seconds = _seconds(record, keep)
    return {
        **head,
        "step_seconds": asdict(interval(seconds)),
        "ratio_to_plain": asdict(interval([a / b for a, b in zip(seconds, base, strict=True)])) if base else None,
        "phase_seconds": _phases([record["rounds"][i] for i in keep]),
        "cpu_seconds": _median(record, keep, lambda s: s["cpu_seconds"]),
        "idle_cpu_seconds": max(s["idle_cpu_seconds"] for s in record["rounds"]),
        "peak_bytes": record["memory"]["peak_bytes"],
        "peak_anonymous_bytes": record["memory"]["peak_without_files_bytes"],
        "memory": record["memory"],
        **_compared(_losses(record), losses),
        **(_of_lowtide(record, keep, disk_rate) if record["kind"] == "lowtide" else {}),
        "all_rounds": {"kept": keep, "foreign_cpu_share": record["foreign_cpu_shares"], "steps": record["steps"]},
    }


def _phases(steps: list[Entry]) -> dict[str, float]:
    return {name: statistics.median(s["phases"][name] for s in steps) for name in steps[0]["phases"]}


def _median(record: Entry, keep: Sequence[int], read: Callable[[Entry], float]) -> float:
    return statistics.median(read(record["rounds"][i]) for i in keep)


def _compared(ours: list[float], theirs: list[float]) -> Entry:
    steps = min(len(ours), len(theirs))
    first = next((i + 1 for i in range(steps) if ours[i] != theirs[i]), None)
    return {
        "losses_compared_steps": steps,
        "losses_equal_plain_in_every_digit": first is None if steps else None,
        "losses_first_different_step": first,
        "losses_largest_difference": max((abs(a - b) for a, b in zip(ours, theirs, strict=False)), default=None),
        "losses_finite": all(math.isfinite(x) for x in ours),
    }


def _of_lowtide(record: Entry, keep: list[int], disk_rate: float | None) -> Entry:
    begin, once = record["begin"], record["write_once"]
    shard_seconds = begin["seconds"]  # until the last byte is written
    made: Entry = {
        "disk_bytes": max(s["disk_bytes"] for s in record["steps"]),
        "read_bytes_per_step": _median(record, keep, lambda s: s["read_bytes"]),
        "written_bytes_per_step": _median(record, keep, lambda s: s["written_bytes"]),
        "wait_seconds_per_step": _median(record, keep, lambda s: s["wait_seconds"]),
        "wait_share": _median(record, keep, lambda s: s["wait_seconds"] / s["seconds"]),
        "seconds_without_drain": _median(record, keep, lambda s: s["seconds"] - s["phases"]["drain"]),
        "activations": record["steps"][-1]["activations"],
        "saved_activation_bytes": _median(record, keep, lambda s: s["saved_activation_bytes"]),
        "shard_seconds": shard_seconds,
        "write_once": once,
        "shard_over_write_once": shard_seconds / once["seconds"] if once else None,
    }
    if record["options"]["update"] == "step":
        made["update_stream"] = _update_stream(record, disk_rate)
    return made


def _update_stream(record: Entry, disk_rate: float | None) -> Entry | None:
    """How fast ``optimizer.step()`` moves bytes where it does so itself: in lowtide's first steps. Later it leaves that to the
    next forward. The first one makes the states and does not count."""
    calls = [(n, s["step_call"]) for n, s in enumerate(record["steps"], 1) if n > 1 and s["step_call"]["bytes"] > TRACE_BYTES]
    if not calls:
        return None
    rate = statistics.median(call["bytes"] / call["seconds"] for _, call in calls)
    return {
        "steps": [n for n, _ in calls],
        "bytes_per_second_of_each": [call["bytes"] / call["seconds"] for _, call in calls],
        "bytes_per_step": statistics.median(call["bytes"] for _, call in calls),
        "bytes_per_second": rate,
        "disk_mixed_bytes_per_second": disk_rate,
        "over_disk": rate / disk_rate if disk_rate else None,
    }


def wrong_losses(result: Entry) -> list[str]:
    """A sentence per lowtide entry whose losses are not plain PyTorch's in every digit, or not finite."""
    found: list[str] = []
    for e in result["systems"]:
        if e["kind"] != "lowtide":
            continue
        if e["losses_equal_plain_in_every_digit"] is False:
            step, most = e["losses_first_different_step"], e["losses_largest_difference"]
            found.append(f"{e['system']}: losses differ from plain PyTorch's from step {step} on, by up to {most:.3g}")
        elif not e["losses_finite"]:
            found.append(f"{e['system']}: a loss is not finite")
    return found


def merge(results: list[Entry]) -> Entry:
    """One result: of a system that several have, the last counts; plain PyTorch's entries all stay, each with its run."""
    if len({str(r["model"]) for r in results}) > 1:
        raise SystemExit("these results are of different models and cannot be merged")
    runs: list[Entry] = []
    systems: dict[tuple[Any, ...], Entry] = {}
    for result in results:
        for entry in result["systems"]:
            placed = {**entry, "run": entry["run"] + len(runs)}
            plain = (placed["run"], entry["group"], len(systems)) if entry["system"] == REFERENCE else ()
            systems[(entry["system"], *plain)] = placed
        runs += result["runs"]
    return {**results[-1], "runs": runs, "systems": list(systems.values())}


# -- tables -----------------------------------------------------------------------------------------------------------


def markdown(result: Entry) -> str:
    """The tables, and the sentences that say what else was measured and under which conditions."""
    parts = [_main_table(result), _budget_table(result), *_sentences(result), _conditions(result)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _label(entry: Entry) -> str:
    options = entry["options"]
    if entry["kind"] == "plain":
        return "plain PyTorch"
    if entry["kind"] == "deepspeed":
        sub_group = options.get("sub_group")
        return f"DeepSpeed ZeRO-3 NVMe, {'default' if sub_group is None else f'sub-group {sub_group:.0e}'.replace('e+0', 'e')}"
    return f'**lowtide** `memory="{options["memory"]}"`, update in {options["update"]}, activations {options["activations"]}'


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"


def _times(ratio: Entry | None) -> str:
    return "–" if ratio is None else f"{ratio['median']:.2f} × ({ratio['low']:.2f}–{ratio['high']:.2f})"


def _losses_word(entry: Entry) -> str:
    if entry["losses_equal_plain_in_every_digit"] is None:
        return "–"
    if entry["losses_equal_plain_in_every_digit"]:
        return f"every digit, {entry['losses_compared_steps']} steps"
    return f"differ from step {entry['losses_first_different_step']} (by {entry['losses_largest_difference']:.1e})"


def _why(entry: Entry) -> str:
    cap = f" at {entry['cap_bytes'] / GIB:.0f} GiB" if entry["cap_bytes"] else ""
    text = f"killed{cap}" if entry["killed"] else f"failed: {entry['failure']}"
    return textwrap.shorten(text.replace("|", "/"), 160, placeholder=" ...")


def _plain_row(plains: list[Entry]) -> str:
    seconds = statistics.median(s for e in plains for s in e["step_seconds"]["all"])
    peak = max(e["peak_anonymous_bytes"] for e in plains)
    return f"| plain PyTorch | {seconds:.2f} | 1 | {_gb(peak)} | {_gb(max(e['peak_bytes'] for e in plains))} | – | – | – |"


def _main_table(result: Entry) -> str:
    head = "| system | step, s | against plain | peak, GB | with pages of files | disk read + written per step, GB |"
    rows = [head + " waits for it | losses as plain's |", "|---|---|---|---|---|---|---|---|"]
    plains = [e for e in result["systems"] if e["system"] == REFERENCE and e["failure"] is None]
    rows += [_plain_row(plains)] if plains else []
    for e in result["systems"]:
        if e["system"] in (REFERENCE, "largest") or e["system"].startswith("lowtide-cgroup"):
            continue
        if e["failure"] is not None:
            rows.append(f"| {_label(e)} | {_why(e)} | – | – | – | – | – | – |")
            continue
        disk, waits = "–", "–"
        if e["kind"] == "lowtide":
            disk = f"{_gb(e['read_bytes_per_step'])} + {_gb(e['written_bytes_per_step'])}"
            waits = f"{e['wait_share']:.1%}"
        rows.append(
            f"| {_label(e)} | {e['step_seconds']['median']:.2f} | {_times(e['ratio_to_plain'])} | "
            f"{_gb(e['peak_anonymous_bytes'])} | {_gb(e['peak_bytes'])} | {disk} | {waits} | {_losses_word(e)} |"
        )
    return "\n".join(rows) if len(rows) > 2 else ""


def _budget_table(result: Entry) -> str:
    rows = ["| control group | kills | steps | step, s | against plain | peak, GB | activations | losses as plain's |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for e in (e for e in result["systems"] if e["system"].startswith("lowtide-cgroup")):
        group = e["cgroup"] or {}
        size = f"{e['options']['memory']}{' (not enforced)' if 'missing' in group else ''}"
        kills = group.get("kills", "–")
        if e["failure"] is not None:
            rows.append(f"| {size} | {kills} | {e['steps']} | {_why(e)} | – | – | – | {_losses_word(e)} |")
            continue
        rows.append(
            f"| {size} | {kills} | {e['steps']} | {e['step_seconds']['median']:.2f} | {_times(e['ratio_to_plain'])} | "
            f"{_gb(e['peak_anonymous_bytes'])} | {e['activations']} | {_losses_word(e)} |"
        )
    return "\n".join(rows) if len(rows) > 2 else ""


def _sentences(result: Entry) -> list[str]:
    made: list[str] = []
    alive = [e for e in result["systems"] if e["failure"] is None]
    ratios = [e["shard_over_write_once"] for e in alive if e.get("shard_over_write_once")]
    if ratios:
        made.append(
            f"`shard()` takes {min(ratios):.2f}–{max(ratios):.2f} × the time of writing the same bytes once "
            f"({len(ratios)} systems)."
        )
    for e in alive:
        stream = e.get("update_stream")
        if stream and stream["over_disk"]:
            tool = next(d["tool"] for d in result["runs"][e["run"]]["disk_limits"] if d["group"] == e["group"])
            made.append(
                f"The update stream of `{e['system']}` moves {stream['bytes_per_second'] / 1e9:.2f} GB/s, "
                f"{stream['over_disk']:.2f} of what the disk gave in the same run ({tool})."
            )
        if e["system"] == "largest":
            made.append(
                f'Largest model: {e["facts"]["parameters"] / 1e9:.2f} B parameters in `memory="{e["options"]["memory"]}"`, '
                f"{e['steps']} steps of {e['step_seconds']['median']:.0f} s, "
                f"losses {', '.join(f'{x:.4f}' for x in e['losses'])}, "
                f"peak {_gb(e['peak_anonymous_bytes'])} GB, {_gb(e['disk_bytes'])} GB on disk, "
                f"built in {e['facts']['build_seconds']:.0f} s, sharded in {e['shard_seconds']:.0f} s."
            )
    made += [f"Largest model: {_why(e)}." for e in result["systems"] if e["system"] == "largest" and e["failure"] is not None]
    return made


def _conditions(result: Entry) -> str:
    model, facts = result["model"], result["runs"][-1]["machine"]
    versions = {k: v for e in result["systems"] for k, v in e["facts"].get("versions", {}).items()}
    counts = [len(e["ratio_to_plain"]["all"]) for e in result["systems"] if e["failure"] is None and e["ratio_to_plain"]]
    dates = " and ".join(dict.fromkeys(r["date"][:10] for r in result["runs"]))
    text = (
        f"{model['parameters'] / 1e6:.0f} M parameters, {model['batch']} × {model['context']} tokens, {model['dtype']}, "
        f"{model['optimizer']}, {model['threads']} threads; {facts['cores']} cores ({facts['processor']}), "
        f"{(facts['memory_bytes'] or 0) / GIB:.0f} GiB; {', '.join(f'{k} {v}' for k, v in sorted(versions.items()))}; {dates}; "
        f"median of {min(counts, default=0)} or more steps, {interval_name(min(counts, default=1))} of the ratio in a round. "
        "Peak: without pages of files, which the kernel can drop. DeepSpeed does not fit beside plain PyTorch: its ratio is to "
        "plain steps right before and after."
    )
    return text + _disturbed(result)


def _disturbed(result: Entry) -> str:
    """A sentence if rounds had to be used in which other processes kept the machine busy."""
    rounds = [e["all_rounds"] for e in result["systems"] if e["failure"] is None]
    worst = max((r["foreign_cpu_share"][i] for r in rounds for i in r["kept"]), default=0.0)
    if worst <= result["quiet_share"]:
        return ""
    return f" Disturbed: other processes used up to {worst:.0%} of the machine during a turn."
