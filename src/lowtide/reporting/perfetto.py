"""A run as a trace that Perfetto and chrome://tracing open: spans of recorded steps, memory as counters, marks."""

from __future__ import annotations

from typing import Any

from lowtide.reporting.format import LANES, SpansLine
from lowtide.reporting.postmortem import parts_of
from lowtide.reporting.timeline import Process, Run, Timeline

_STEPS = "steps"
_MARKS = "marks"


def trace_events(run: Run) -> dict[str, Any]:
    """The whole file, as an object of JSON. Times are in microseconds since the run began, a rank is a process of the trace."""
    events: list[dict[str, Any]] = []
    for timeline in run.ranks:
        events += _names(timeline)
        for process in timeline.processes:
            events += _steps(timeline, process)
            events += _memory(timeline, process)
            events += _marks(timeline, process)
            for line in process.spans:
                events += _spans(timeline, process, line)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lane(name: str) -> int:
    """A thread of the trace for every lane; those that are not known share the last."""
    return 2 + (LANES.index(name) if name in LANES else len(LANES))


def _names(timeline: Timeline) -> list[dict[str, Any]]:
    rank = timeline.rank
    host = timeline.last.run.host
    threads = {0: _MARKS, 1: _STEPS, **{_lane(lane): lane for lane in LANES}, 2 + len(LANES): "other"}
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank} on {host}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
    ]
    for number, name in threads.items():
        named.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}})
        named.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}})
    return named


def _steps(timeline: Timeline, process: Process) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "name": f"step {step.step}",
            "cat": "step",
            "pid": timeline.rank,
            "tid": 1,
            "ts": _micro(timeline.at(process, step.t - step.seconds)),
            "dur": _micro(step.seconds),
            "args": {"loss": step.loss, "disk_wait_seconds": step.disk_wait_seconds, "peak_bytes": step.peak_bytes},
        }
        for step in process.steps
    ]


def _spans(timeline: Timeline, process: Process, line: SpansLine) -> list[dict[str, Any]]:
    step = next((s for s in process.steps if s.step == line.step), None)
    long = max((row.end for row in line.rows), default=0.0)
    begin = timeline.at(process, step.t - step.seconds if step is not None else line.t - long)
    return [
        {
            "ph": "X",
            "name": f"{row.verb} {line.names[row.unit]}".strip(),
            "cat": row.lane,
            "pid": timeline.rank,
            "tid": _lane(row.lane),
            "ts": _micro(begin + row.begin),
            "dur": _micro(row.end - row.begin),
            "args": {"unit": line.names[row.unit], "bytes": row.bytes, "step": line.step},
        }
        for row in line.rows
    ]


def _memory(timeline: Timeline, process: Process) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for sample in process.memory:
        at = _micro(timeline.at(process, sample.t))
        for tier, parts in (("host", parts_of(sample)), ("device", sample.device), ("disk", sample.disk)):
            if any(parts.values()):
                events.append(
                    {"ph": "C", "name": f"{tier} bytes", "pid": timeline.rank, "tid": 0, "ts": at, "args": dict(parts)}
                )
    return events


def _marks(timeline: Timeline, process: Process) -> list[dict[str, Any]]:
    return [
        {
            "ph": "i",
            "s": "p",
            "name": mark.what,
            "cat": "mark",
            "pid": timeline.rank,
            "tid": 0,
            "ts": _micro(timeline.at(process, mark.t)),
            "args": {"text": mark.text, "step": mark.step},
        }
        for mark in process.marks
    ]


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
