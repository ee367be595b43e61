"""What limited a run, in one sentence, and what would change it. Pure: numbers in, words out.

A step's time is divided into computing, the update, waiting for the disk, waiting for other ranks, what else is inside it, and
what lies between two of them. The largest of those that could be shorter is named. Computing could not be shorter, so it is
named when nothing else costs much.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.planning.text import percent_text, seconds_text, size_text
from lowtide.reporting.summary import Division, RankSummary, Summary

WORTH_NAMING = 0.10
"""A wait below this share of a step limits nothing."""
_UPDATE_WORTH_NAMING = 0.35
_SLOWER = 1.15
"""A rank that works this much longer than the median is the one that the others wait for."""
_ONE_SIDED = 0.75
_EXPECTED_REST = 0.20
"""Below this, what is outside lowtide is taken for the ordinary cost of a training loop."""
_MOSTLY = 0.5
_STARVED = 0.75
"""A thread that gets less of the processor time it asks for shares its processor with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``bound``: nothing yet, compute, update, disk reads, disk writes, disk, ranks, one rank, between steps, outside."""

    bound: str
    share: float
    """Of a step."""
    sentence: str
    more_memory_bytes: int | None = None
    """About how much more memory, on one rank, would remove the waits for the disk."""


def judge(summary: Summary) -> Verdict:
    """Of a whole run: of the rank that the others wait for."""
    timed = [rank for rank in summary.ranks if rank.division is not None]
    rank = summary.slowest
    if rank is None or rank.division is None or rank.division.seconds <= 0:
        return Verdict(bound="nothing yet", share=0.0, sentence="No step has been recorded yet, so nothing limits the run.")
    average = _average([r.division for r in timed if r.division is not None])
    waits = _largest_wait(average)
    if waits == "comm":
        return _ranks_verdict(timed, average)
    if waits == "disk":
        return _disk_verdict(max(timed, key=lambda r: r.division.disk if r.division else 0.0))
    if waits == "rest":
        return _outside_verdict(average, timed)
    if average.update > _UPDATE_WORTH_NAMING * average.seconds and average.update > average.compute:
        share = average.update / average.seconds
        return Verdict(bound="update", share=share, sentence=f"{_update_sentence(rank, share)}{_starved(timed)}")
    return _compute_verdict(average, timed)


def more_memory(rank: RankSummary) -> int | None:
    """About how many more bytes of memory would remove this rank's waits for the disk; ``None`` if nothing says.

    What lives on disk causes the traffic. The waits are traffic that found nothing to hide behind: ``wait × speed`` bytes.
    Keeping the same share of what lives on disk in memory removes as much traffic.
    """
    division, parked = rank.division, sum(rank.parked.values())
    moved = rank.read_bytes + rank.written_bytes
    if division is None or not parked or not moved or division.disk <= 0:
        return None
    speed = rank.disk_speed if rank.disk_speed is not None else moved / max(division.seconds, 1e-9)
    return int(parked * min(1.0, division.disk * speed / moved))


def _average(divisions: Sequence[Division]) -> Division:
    count = len(divisions)
    return Division(
        seconds=sum(d.seconds for d in divisions) / count,
        compute=sum(d.compute for d in divisions) / count,
        update=sum(d.update for d in divisions) / count,
        disk=sum(d.disk for d in divisions) / count,
        comm=sum(d.comm for d in divisions) / count,
        rest=sum(d.rest for d in divisions) / count,
        between=sum(d.between for d in divisions) / count,
    )


def _largest_wait(average: Division) -> str | None:
    """disk, comm or rest if one of them is worth naming: the one that is furthest above what is usual."""
    over = {
        "disk": average.disk / average.seconds - WORTH_NAMING,
        "comm": average.comm / average.seconds - WORTH_NAMING,
        "rest": (average.rest + average.between) / average.seconds - _EXPECTED_REST,
    }
    name = max(over, key=lambda n: over[n])
    return name if over[name] >= 0 else None


def _disk_verdict(rank: RankSummary) -> Verdict:
    division = rank.division
    if division is None:  # not reached: the caller asks for ranks that are timed
        return Verdict(bound="nothing yet", share=0.0, sentence="")
    moved = max(rank.read_bytes + rank.written_bytes, 1)
    if rank.read_bytes >= _ONE_SIDED * moved:
        bound, words = "disk reads", "disk reads"
    elif rank.written_bytes >= _ONE_SIDED * moved:
        bound, words = "disk writes", "disk writes"
    else:
        bound, words = "disk", "reads and writes of the disk"
    share = division.disk / division.seconds
    more = more_memory(rank)
    way = f"; about {size_text(more)} more memory{_each(rank)} would remove it" if more else "; a faster disk would help"
    sentence = f"Bounded by {words}: {_percent(share)} of the step waits for them{way}."
    return Verdict(bound=bound, share=share, sentence=sentence, more_memory_bytes=more)


def _ranks_verdict(timed: Sequence[RankSummary], average: Division) -> Verdict:
    share = average.comm / average.seconds
    own = {r.rank: r.division.seconds - r.division.comm for r in timed if r.division is not None}
    usual = statistics.median(own.values())
    worst = max(own, key=lambda r: own[r])
    waits = f"{_percent(share)} of the step waits for other ranks"
    if len(own) > 1 and usual > 0 and own[worst] >= _SLOWER * usual:
        slower = f"it works {_percent(own[worst] / usual - 1)} longer than the others"
        sentence = f"Bounded by rank {worst}: {slower}, and {waits}. Look at what its host does besides."
        return Verdict(bound="one rank", share=share, sentence=sentence)
    moved = sum(r.wire_bytes for r in timed) // max(len(timed), 1)
    wire = f" ({size_text(moved)} a step and rank)" if moved else ""
    way = "A larger batch, or a lower stage if memory allows, moves less per sample."
    sentence = f"Bounded by communication: {waits}{wire}. {way}"
    return Verdict(bound="ranks", share=share, sentence=sentence)


def _outside_verdict(average: Division, timed: Sequence[RankSummary]) -> Verdict:
    """Data is loaded between steps; what is lost inside one has other causes."""
    if average.between >= average.rest:
        share = average.between / average.seconds
        spent = f"{_percent(share)} of the time ({seconds_text(average.between)} a step)"
        sentence = (
            f"Bounded by what happens between steps: {spent} passes after an update and before the next forward pass. "
            f"Loading data is the usual cause; more loader workers are the first thing to try.{_starved(timed)}"
        )
        return Verdict(bound="between steps", share=share, sentence=sentence)
    share = average.rest / average.seconds
    spent = f"{_percent(share)} of the step ({seconds_text(average.rest)})"
    sentence = (
        f"Bounded outside lowtide: {spent} is neither computing nor a wait that lowtide knows, and lies inside the step: the "
        f"training script's own code between its forward passes and the update.{_starved(timed)}"
    )
    return Verdict(bound="outside", share=share, sentence=sentence)


def _compute_verdict(average: Division, timed: Sequence[RankSummary]) -> Verdict:
    share = (average.compute + average.update) / average.seconds
    waits = average.disk + average.comm
    cost = f"all waiting together costs {_percent(waits / average.seconds)}" if waits > 0 else "it waits for nothing"
    sentence = f"Bounded by compute: {_percent(share)} of the step computes, {cost}.{_starved(timed)}"
    return Verdict(bound="compute", share=share, sentence=sentence)


def _starved(timed: Sequence[RankSummary]) -> str:
    """If others took the processor away, no part of a step is as long as it could be, and all of them are named in vain."""
    worst = min((rank.processor_share for rank in timed if rank.processor_share is not None), default=1.0)
    if worst >= _STARVED:
        return ""
    return f" The machine gave this job only {_percent(worst)} of the processor time it asked for: others use it, too."


def _update_sentence(rank: RankSummary, share: float) -> str:
    if rank.clip_share > _MOSTLY:
        clips = f"{_percent(rank.clip_share)} of that is clipping, which looks at every gradient once more"
        return f"Bounded by clipping and the optimizer: {_percent(share)} of the step is the update, and {clips}."
    return f"Bounded by the optimizer: {_percent(share)} of the step is the update. {_faster_update(rank)}"


def _faster_update(rank: RankSummary) -> str:
    if rank.run.facts.get("fused") is False:
        return "A fused optimizer (fused=True) is the first thing to try."
    return "A larger batch makes it a smaller part of the whole."


def _percent(share: float) -> str:
    return percent_text(share, 1.0)


def _each(rank: RankSummary) -> str:
    return " on each rank" if rank.run.world_size > 1 else ""
