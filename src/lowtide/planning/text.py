"""A plan as plain text for a terminal of 100 columns, and the words for bytes, seconds and counts that pictures use too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from lowtide.planning.plan import Plan, TierPlan, UnitPlan

Amount = TypeVar("Amount", int, float)

WIDTH = 100
_BAR = 36
_MOST_ROWS = 12
"""More rows about units than this say less than the counts."""
_KINDS = ("parameters", "gradients", "optimizer")
_RESOURCES = ("compute", "host", "disk", "disk read", "disk written", "link", "network")
_ORDER = (*_KINDS, "activations", "slots", "buffers", "in flight", "computing", "process and slack", *_RESOURCES)
"""In which parts of anything are shown. A plan that went through JSON has lost its own order."""
_EIGHTHS = " ▏▎▍▌▋▊▉"
_SIZES = (("PiB", 2**50, 1.0), ("TiB", 2**40, 1.0), ("GiB", 2**30, 0.0995))
"""Units of bytes, and the least of each that is written in it."""
_COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


def plan_text(plan: Plan) -> str:
    """All of a plan, in the order in which one asks: does it fit, what lives where, how long, why."""
    sections = [_head(plan), _memory(plan), _homes(plan), _step(plan), _outcome(plan), _why(plan)]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


# -- words for numbers -------------------------------------------------------------------------------------------------


def size_text(nbytes: float) -> str:
    """``1.50 GiB``; small sizes in MiB, smaller ones in KiB or bytes."""
    for unit, size, least in _SIZES:
        if abs(nbytes) >= least * size:
            return f"{nbytes / size:.2f} {unit}"
    if abs(nbytes) >= 2**20:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / 2**10:.1f} KiB" if abs(nbytes) >= 2**10 else f"{nbytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """``1.23 s``, ``45.0 ms``, ``120 µs``, ``2 h 05 min``."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def saving_text(seconds: float) -> str:
    """What a change is worth."""
    return seconds_text(seconds) if seconds else "nothing"


def count_text(number: float) -> str:
    """``7.5 B``: at most three digits that matter."""
    for unit, size in _COUNTS:
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def percent_text(part: float, whole: float) -> str:
    if not whole:
        return "–"
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 1 or not share else "< 1 %"


def clean(name: str) -> str:
    """A name that is safe to print: what is no character becomes a question mark."""
    return "".join(c if c.isprintable() else "?" for c in name)


def shortened(name: str, width: int) -> str:
    """At most ``width`` characters, cut in the middle: both ends of a module's name say something."""
    name = clean(name)
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def bar(part: float, whole: float, width: int = _BAR) -> str:
    """``part`` of ``whole`` in eighths of a character; what is there is never invisible."""
    if whole <= 0 or part <= 0:
        return ""
    eighths = max(1, min(round(8 * width * part / whole), 8 * width))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


# -- facts that text and pages share -----------------------------------------------------------------------------------


def in_order(parts: Mapping[str, Amount]) -> dict[str, Amount]:
    """The same, in the usual order; what has none comes last."""
    return {name: parts[name] for name in sorted(parts, key=lambda n: (_ORDER.index(n) if n in _ORDER else len(_ORDER), n))}


def head_facts(plan: Plan) -> list[str]:
    """Who, on what, and how, each a few words."""
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks on {_several(plan.hosts, 'host')}"
    batch = f"batch {shortened(plan.batch, 80)}" if plan.batch else "no batch given"
    count = [] if plan.model.endswith("parameters") else [f"{count_text(plan.parameters)} parameters"]
    return [
        *count,
        batch,
        ranks,
        f"stage {plan.stage}",
        plan.precision,
        f"update in {plan.update}",
    ]


def placement_text(plan: Plan) -> str:
    """One sentence on whether anything moves."""
    if plan.placement == "plain":
        return "plain: all of it fits, nothing is moved"
    slots = f"through {_several(plan.slots, 'slot')}" if plan.slots else "by chunks"
    return f"streamed: bytes come and go {slots}, updates in chunks of {size_text(plan.chunk_bytes)}"


def unit_rows(plan: Plan) -> list[tuple[str, UnitPlan]]:
    """Neighbours that are treated alike as one row: the name of the first and the last, and how many."""
    runs: list[list[UnitPlan]] = []
    for unit in plan.units:
        if runs and _treatment(runs[-1][0]) == _treatment(unit):
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return [(_run_name(run), run[0]) for run in runs]


def _treatment(unit: UnitPlan) -> tuple[str, ...]:
    return unit.parameters, unit.gradients, unit.optimizer, unit.activations


def _run_name(run: Sequence[UnitPlan]) -> str:
    if len(run) == 1:
        return shortened(run[0].name, 44)
    return f"{shortened(run[0].name, 18)} to {shortened(run[-1].name, 18)} ({len(run)})"


def outcome_rows(plan: Plan) -> list[tuple[str, str]]:
    """The few numbers that a run is compared with."""
    rows: list[tuple[str, str]] = []
    if plan.batch:
        rows.append(("seconds per step", f"{seconds_text(plan.predicted_seconds)}, most of it waiting for {plan.limited_by}"))
    else:
        rows.append(("seconds per step", "not known: without a batch only bytes are planned"))
    each = "" if plan.hosts == 1 else " on each host" if plan.shares is None else " where the slowest rank is"
    rows.append(("peak of host memory", f"{size_text(plan.predicted_peak_bytes)}{each}"))
    whose = "per rank" if plan.shares is None else "on the slowest rank"
    per_rank = f", {size_text(plan.states_bytes_per_rank)} {whose}" if plan.world_size > 1 else ""
    rows.append(("parameters, gradients, optimizer", f"{size_text(plan.states_bytes)}{per_rank}"))
    if plan.traffic_bytes:
        moved = ", ".join(f"{clean(name)} {size_text(size)}" for name, size in in_order(plan.traffic_bytes).items())
        rows.append(("moved in a step", moved))
    if plan.shares is not None:
        shares = ", ".join(f"{share:g}" for share in plan.shares)
        rows.append(
            ("parts of the ranks", f"{shares}: shard(..., partition=lowtide.Partition(shares=({shares}))), without memory=")
        )
    return rows


# -- sections ----------------------------------------------------------------------------------------------------------


def _head(plan: Plan) -> list[str]:
    facts = [shortened(plan.model, 60), *head_facts(plan)]
    machine = f"on {clean(plan.hardware)} ({clean(plan.hardware_source)})"
    return [*_wrapped(facts, " · "), *_wrapped(machine.split(), " ", most=1), *_wrapped(placement_text(plan).split(), " ")]


def _memory(plan: Plan) -> list[str]:
    of = "" if plan.world_size == 1 else "of one rank, " if plan.shares is None else "of the slowest, "
    lines = [f"{f'memory {of}at its fullest':<34}{'peak':>11}   {'of':>11}"]
    for tier in plan.tiers:
        share = percent_text(tier.peak_bytes, tier.capacity_bytes)
        sizes = f"{size_text(tier.peak_bytes):>11}   {size_text(tier.capacity_bytes):>11}"
        lines.append(f"{clean(tier.tier):<34}{sizes}   {_gauge(tier)} {share}")
        largest = max(tier.parts.values(), default=0)
        lines += [
            f"  {clean(name):<32}{size_text(size):>11}   {bar(size, max(tier.capacity_bytes, largest))}"
            for name, size in in_order(tier.parts).items()
        ]
        lines += _linked_checkpoint(tier)
    return lines


def _linked_checkpoint(tier: TierPlan) -> list[str]:
    """States on disk are not copied into a checkpoint, but the next step writes them to another place."""
    kept = sum(tier.parts.get(kind, 0) for kind in ("parameters", "optimizer")) if tier.tier == "disk" else 0
    if not kept:
        return []
    fits = kept <= tier.capacity_bytes - tier.peak_bytes
    otherwise = "" if fits else "; there is no room for that, so it is copied"
    return [f"  {'each checkpoint without a copy':<32}{size_text(kept):>11}   more{otherwise}"]


def _gauge(tier: TierPlan) -> str:
    width = 24
    return f"{bar(tier.peak_bytes, tier.capacity_bytes, width):░<{width}}"


def _homes(plan: Plan) -> list[str]:
    lines = [f"where {_several(len(plan.units), 'unit')} {'lives' if len(plan.units) == 1 else 'live'}"]
    for kind in (*_KINDS, "activations"):
        counts = ", ".join(f"{clean(where)} {number}" for where, number in plan.count(kind).items())
        if kind == "gradients" and plan.update == "backward":
            counts = "none outlives its unit"
        lines.append(f"  {kind:<14}{counts or '–'}")
    rows = unit_rows(plan)
    if 1 < len(rows) <= _MOST_ROWS:
        lines.append(f"  {'units':<46}{'parameters':<12}{'gradients':<12}{'optimizer':<12}activations")
        lines += [
            f"  {name:<46}{unit.parameters:<12}{unit.gradients:<12}{unit.optimizer:<12}{unit.activations}"
            for name, unit in rows
        ]
    return lines


def _step(plan: Plan) -> list[str]:
    if not plan.batch or not plan.phases:
        return []
    lines = [f"one step takes {seconds_text(plan.predicted_seconds)}"]
    for phase in plan.phases:
        share = bar(phase.seconds, plan.predicted_seconds)
        lines.append(f"  {phase.phase:<14}{seconds_text(phase.seconds):>10}   {share:<{_BAR}}   waits for {phase.limited_by}")
        lines += [
            f"    {clean(name):<12}{seconds_text(seconds):>10}   {bar(seconds, plan.predicted_seconds)}"
            for name, seconds in in_order(phase.loads).items()
            if seconds
        ]
    return lines


def _outcome(plan: Plan) -> list[str]:
    lines = ["predicted"]
    for name, value in outcome_rows(plan):
        first, *rest = _wrapped(value.split(), " ", width=WIDTH - 36) or [""]
        lines += [f"  {name:<34}{first}", *(f"{'':<36}{line}" for line in rest)]
    return lines


def _why(plan: Plan) -> list[str]:
    lines: list[str] = []
    if plan.reasons:
        lines += ["why", *_listed(plan.reasons)]
    if plan.prices:
        lines += [""] if lines else []
        lines += ["what a change would save of a step"]
        lines += [f"  {shortened(price.change, 60):<60}{saving_text(price.seconds):>10}" for price in plan.prices]
    return lines


def _listed(sentences: Iterable[str]) -> Iterator[str]:
    for sentence in sentences:
        first, *rest = _wrapped(clean(sentence).split(), " ", width=WIDTH - 4) or [""]
        yield f"  - {first}"
        yield from (f"    {line}" for line in rest)


def _wrapped(words: Sequence[str], between: str, *, width: int = WIDTH, most: int | None = None) -> list[str]:
    """Words put into lines; what goes beyond ``most`` lines is left out, and that is seen."""
    lines: list[str] = []
    for word in (shortened_end(word, width) for word in words):
        if lines and len(lines[-1]) + len(between) + len(word) <= width:
            lines[-1] += between + word
        else:
            lines.append(word)
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], shortened_end(" ".join(lines[most - 1 :]), width)]
    return lines


def shortened_end(text: str, width: int) -> str:
    """Cut at its end."""
    return text if len(text) <= width else text[: width - 1] + "…"


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
