"""Why a job ran out of memory: what was planned, what was there, what grew, and the smallest change that fits. No torch here.

Three ways to run out are told apart. lowtide itself refuses to take more than its number (``OverBudget``, ``DoesNotFit``); an
allocation fails; the kernel kills the process, which then leaves no word, and only the kernel's counters and the last sample of
memory say what happened.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide.errors import DoesNotFit
from lowtide.planning.text import size_text
from lowtide.reporting.ending import is_alive
from lowtide.reporting.format import MemoryLine
from lowtide.reporting.oom import Counters, counters_from, oom_killed, read_again
from lowtide.reporting.summary import SHARED, counted_bytes
from lowtide.reporting.timeline import Process, Run, Timeline, now_path, read_now

_MIB = 1 << 20
_REFUSED = re.compile(r"([\d.]+) MiB needed, ([\d.]+) MiB allowed")
_ALLOCATION = re.compile(
    r"can't allocate memory|cannot allocate memory|out of memory|MemoryError|ArenaFull|not enough memory|ENOMEM", re.IGNORECASE
)
_ASKED = re.compile(r"tried to allocate (\d{1,18}) bytes")
_NEAR = 0.9
_MARGIN = 0.05
"""Of a limit: what a job should stay below it, because the kernel and others take some too."""
MOVABLE = ("parameters", "gradients", "optimizer", "activations")
"""Kinds of bytes that can live on disk."""
OURS_NOT = "Python and torch"
WORKERS = "loader workers"
DEVICE = "emulated device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A kind of bytes that became more."""

    kind: str
    before_bytes: int
    after_bytes: int

    @property
    def more_bytes(self) -> int:
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PostMortem:
    """``cause`` is ``refused`` (by lowtide), ``allocation``, ``killed`` (by the kernel, for memory), ``perhaps killed``, or
    ``other`` (gone without a word, and not for memory)."""

    cause: str
    sentence: str
    rank: int
    step: int
    budget_bytes: int | None
    limit_bytes: int | None
    """Of the control group, or what else was the end of memory."""
    planned_bytes: int | None
    planned: dict[str, int]
    there: dict[str, int]
    """In the last sample, by kind."""
    grew: tuple[Growth, ...]
    """Since the first full step, the largest first."""
    since_step: int
    short_bytes: int
    """What was missing on the host, as far as that is known; at least a small part of the limit."""
    local_ranks: int
    """How many share the host and its limit; the samples and the budget are of one of them."""
    changes: tuple[str, ...] = ()
    """What would make it fit, the smallest first."""

    @property
    def is_about_memory(self) -> bool:
        return self.cause != "other"

    def text(self) -> str:
        """A few lines for a terminal or a log."""
        lines = [self.sentence]
        if self.is_about_memory:
            if self.planned_bytes is not None:
                lines.append(f"Planned: {size_text(self.planned_bytes)} at the peak.")
            if self.there:
                listed = ", ".join(f"{kind} {size_text(size)}" for kind, size in self.there.items() if size)
                lines.append(f"There, in step {self.step}: {size_text(sum(self.there.values()))} ({listed}).")
            if self.grew:
                listed = ", ".join(f"{g.kind} by {size_text(g.more_bytes)}" for g in self.grew[:3])
                lines.append(f"Grew since step {self.since_step}: {listed}.")
            if self.changes:
                lines.append(f"The smallest change that fits: {self.changes[0]}.")
        return "\n".join(lines)


def examine(run: Run, *, hints: Sequence[str] = ()) -> PostMortem | None:
    """Of the newest process of every rank: the one that explains the end; ``None`` if all ended well, or live still.

    ``hints``: what others wrote about the end, such as the parent of the ranks.
    """
    return _first_cause([(timeline, timeline.last) for timeline in run.ranks], hints)


def examine_before(run: Run) -> PostMortem | None:
    """The same, of the processes before those that live now and go on with the run."""
    ended = [(timeline, [p for p in timeline.processes if not is_alive(p)]) for timeline in run.ranks]
    return _first_cause([(timeline, processes[-1]) for timeline, processes in ended if processes], ())


def _first_cause(ended: Sequence[tuple[Timeline, Process]], hints: Sequence[str]) -> PostMortem | None:
    """Ranks that die take the others with them: the surest cause counts, and of the same ones that of the rank that was named,
    or that used most."""
    found = [post for timeline, process in ended if (post := examine_process(timeline, process, hints)) is not None]
    named = {int(number) for hint in hints for number in re.findall(r"rank (\d+) was ended", hint)}
    order = ("killed", "refused", "allocation", "perhaps killed", "other")
    first = min(found, key=lambda p: (order.index(p.cause), p.rank not in named, -sum(p.there.values())), default=None)
    said_why = any(process.end is not None and process.end.why == "error" for _, process in ended)
    return None if first is not None and not first.is_about_memory and said_why else first


def examine_process(timeline: Timeline, process: Process, hints: Sequence[str] = ()) -> PostMortem | None:
    """Why one process ended; ``None`` if it ended well, or if nobody can say that it has ended."""
    if process.end is not None:
        return _of_error(timeline, process) if process.end.why == "error" else None
    if process.run.host != socket.gethostname() or is_alive(process):
        return None
    return _of_silence(timeline, process, hints)


def speaks_of_memory(text: str) -> bool:
    """Whether an error, in words, says that memory ran out."""
    return _REFUSED.search(text) is not None or _ALLOCATION.search(text) is not None


def refused_before(error: DoesNotFit) -> PostMortem:
    """Of a model that did not fit before anything was recorded: all that is known is in the error."""
    return PostMortem(
        cause="refused",
        sentence=f"The job did not begin, because it would need more memory than it was given: {error}",
        rank=0,
        step=0,
        budget_bytes=error.budget_bytes,
        limit_bytes=None,
        planned_bytes=error.needed_bytes,
        planned={},
        there={},
        grew=(),
        since_step=0,
        short_bytes=max(error.needed_bytes - error.budget_bytes, _MIB),
        local_ranks=1,
    )


# -- what happened -----------------------------------------------------------------------------------------------------


def _of_error(timeline: Timeline, process: Process) -> PostMortem | None:
    text = process.end.text if process.end is not None else ""
    refused = _REFUSED.search(text)
    if refused is not None:
        needed, allowed = (int(float(number) * _MIB) for number in refused.groups())
        sentence = f"The job was stopped because it would have needed more memory than it was given: {text}"
        found = _facts(timeline, process, cause="refused", sentence=sentence)
        found = replace(found, short_bytes=max(needed - allowed, _MIB) * found.local_ranks)
    elif _ALLOCATION.search(text):
        found = _facts(timeline, process, cause="allocation", sentence=f"An allocation failed because memory ran out: {text}")
        if (asked := _ASKED.search(text)) is not None:
            found = replace(found, short_bytes=max(found.short_bytes, int(asked[1])))
    else:
        return None
    return replace(found, changes=_changes(found, process))


def _of_silence(timeline: Timeline, process: Process, hints: Sequence[str]) -> PostMortem:
    before = counters_from(process.run.facts)
    after = read_again(before) if before is not None else None
    killed = oom_killed(before, after)
    said = next((hint for hint in hints if "because memory ran out" in hint), None)
    limit = _limit(process, after or before)
    last = next(reversed(samples_of(timeline, process)), None)
    used = _used(last, process)
    full = limit is not None and used >= _NEAR * limit
    where = f" (limit: {size_text(limit)})" if limit is not None else ""
    if killed or said is not None:
        cause, sentence = "killed", f"The kernel ended the job because memory ran out{where}."
    elif killed is None and full:
        cause = "perhaps killed"
        last_seen = f"in its last sample it used {size_text(used)} of {size_text(limit or 0)}"
        sentence = f"The job ended without a word, probably because memory ran out: {last_seen}."
    else:
        cause = "other"
        no_kill = "The kernel counted no kill for memory meanwhile. " if killed is False else ""
        sentence = f"The job ended without a word: killed from outside, or crashed. {no_kill}Its own output has more."
    found = _facts(timeline, process, cause=cause, sentence=sentence)
    return replace(found, limit_bytes=limit, changes=_changes(replace(found, limit_bytes=limit), process))


def _facts(timeline: Timeline, process: Process, *, cause: str, sentence: str) -> PostMortem:
    samples = samples_of(timeline, process)
    last = next(reversed(samples), None)
    base = _baseline(samples)
    plan = process.plans[-1] if process.plans else None
    limit = _limit(process, counters_from(process.run.facts))
    there = parts_of(last) if last is not None else {}
    return PostMortem(
        cause=cause,
        sentence=sentence,
        rank=timeline.rank,
        step=last.step if last is not None else process.steps[-1].step if process.steps else 0,
        budget_bytes=process.run.budget_bytes,
        limit_bytes=limit,
        planned_bytes=plan.predicted_peak_bytes if plan is not None else None,
        planned=dict(plan.tiers.get("host", {})) if plan is not None else {},
        there=there,
        grew=_grown(base, last),
        since_step=base.step if base is not None else 0,
        short_bytes=_short(_used(last, process), limit or process.run.budget_bytes),
        local_ranks=process.run.local_ranks,
    )


def samples_of(timeline: Timeline, process: Process) -> list[MemoryLine]:
    """All samples of memory of a process, and the newest one, which stands beside the timeline only."""
    at = timeline.processes.index(process)
    until = timeline.processes[at + 1].run.started if at + 1 < len(timeline.processes) else float("inf")
    samples = list(process.memory)
    with contextlib.suppress(OSError):
        if process.run.started <= now_path(timeline.path).stat().st_mtime < until:
            seen = samples[-1].t if samples else -1.0
            samples += [line for line in read_now(timeline) if isinstance(line, MemoryLine) and line.t > seen]
    return samples


def parts_of(sample: MemoryLine) -> dict[str, int]:
    """What counts of a sample, by kind; they add up to :func:`~lowtide.reporting.summary.counted_bytes`."""
    ours = {kind: size for kind, size in sample.host.items() if size > 0 and kind != SHARED}
    rest = max(0, counted_bytes(sample) - sample.children_bytes - sum(ours.values()))
    # an emulated device is memory of this process; that of a real one is not, and is told from it by what is left over
    device = max(0, rest - max(0, sample.not_ours - sample.process.file)) if any(sample.device.values()) else 0
    others = {DEVICE: device, OURS_NOT: rest - device, WORKERS: sample.children_bytes}
    return {**ours, **{kind: size for kind, size in others.items() if size or kind == OURS_NOT}}


def _baseline(samples: Sequence[MemoryLine]) -> MemoryLine | None:
    """The first sample, at the same moment of a step as the last, of the second step or later: everything was there by then."""
    if len(samples) < 2:
        return None
    first, last = samples[0].step, samples[-1]
    later = [s for s in samples[:-1] if s.step > first and s.moment == last.moment and s.step < last.step]
    return later[0] if later else samples[0]


def _grown(base: MemoryLine | None, last: MemoryLine | None) -> tuple[Growth, ...]:
    if base is None or last is None:
        return ()
    before, after = parts_of(base), parts_of(last)
    found = [Growth(kind=k, before_bytes=before.get(k, 0), after_bytes=size) for k, size in after.items()]
    return tuple(sorted((g for g in found if g.more_bytes >= _MIB), key=lambda g: -g.more_bytes))


def _limit(process: Process, counters: Counters | None) -> int | None:
    """The end of memory that the kernel sets: the tightest control group."""
    sampled = [sample.cgroup_limit_bytes for sample in process.memory if sample.cgroup_limit_bytes]
    if sampled:
        return sampled[-1]
    return counters.limit_bytes if counters is not None else None


def _used(sample: MemoryLine | None, process: Process) -> int:
    """On the host: ranks are alike."""
    return counted_bytes(sample) * process.run.local_ranks if sample is not None else 0


def _short(used: int, end: int | None) -> int:
    """What was used at the end says little of what was asked for then; so at least a small part of the limit."""
    return max(used - end, int(_MARGIN * end), _MIB) if end is not None else max(int(_MARGIN * used), _MIB)


# -- what would help ---------------------------------------------------------------------------------------------------


def _changes(found: PostMortem, process: Process) -> tuple[str, ...]:
    """The smallest first: a smaller number for lowtide, then other ways to hold less, then more memory."""
    if not found.is_about_memory:
        return ()
    short, limit, ranks = found.short_bytes, found.limit_bytes, found.local_ranks
    budget = found.budget_bytes * ranks if found.budget_bytes is not None else None
    movable = sum(found.there.get(kind, 0) for kind in MOVABLE) * ranks
    held = found.there.get("activations", 0) * ranks
    folders = bool(process.run.folders)
    changes: list[str] = []
    if found.cause != "refused":
        changes += _smaller_number(budget, limit, short, movable=movable if folders else 0)
    if not folders and movable >= short:
        changes.append(f"disk='/a/folder', so that some of the {size_text(movable)} that can move need not stay in memory")
    if held > short:
        changes.append(f"activations='recompute', which gives back most of {size_text(held)}")
    for part in (2, 4, 8):
        if held - held // part >= short:
            changes.append(f"a batch {part} times smaller, which gives back about {size_text(held - held // part)}")
            break
    most = limit if found.cause != "refused" else budget
    if most is not None:
        enough = f"memory={_size(most + short)}" if found.cause == "refused" else f"a limit of {size_text(most + short)}"
        changes.append(f"{enough}: {size_text(short)} more")
    if not changes:  # nothing that can move, and no limit that is known: it failed by one that nobody wrote down
        changes.append(f"{size_text(short)} more for this process (ulimit -v, container, machine), or a smaller batch")
    return tuple(changes)


def _smaller_number(budget: int | None, limit: int | None, short: int, *, movable: int) -> list[str]:
    """lowtide keeps its own number; what is not its own grew, or the number was larger than the limit."""
    if limit is not None and (budget is None or budget > (1 - _MARGIN) * limit):
        return [f"memory={_size(int((1 - _MARGIN) * limit))}, which is below the limit of {size_text(limit)}"]
    if budget is not None and movable >= short and budget > 2 * short:
        return [f"memory={_size(budget - short)}: lowtide then keeps {size_text(short)} less in memory"]
    return []


def _size(nbytes: int) -> str:
    """As ``memory=`` takes it."""
    return f"'{nbytes / 2**30:.2f}GiB'" if nbytes >= 1 << 30 else f"'{-(-nbytes // _MIB)}MiB'"
