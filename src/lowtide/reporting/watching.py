"""Memory, watched while a model trains: samples, the plan in force, leaks.

Sampling is the dear part of recording. It is bounded twice: by thinning (reporting/thinning.py), and by what it has cost,
so that where a step lasts a millisecond not every step is sampled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from lowtide.reporting.device_busy import DeviceBusy
from lowtide.reporting.format import MemoryLine, PlanLine
from lowtide.reporting.leaks import FILE_DESCRIPTORS, NOT_OURS, SPOOL, THREADS, LeakWatch
from lowtide.reporting.locating import Scene
from lowtide.reporting.observing import memory_line, plan_line
from lowtide.reporting.sampler import Sampler
from lowtide.reporting.summary import counted_bytes
from lowtide.reporting.thinning import Schedule, keeps
from lowtide.reporting.writer import Writer
from lowtide.runtime.engine import Engine
from lowtide.runtime.holdings import holdings
from lowtide.runtime.saved import KeptBytes

_log = logging.getLogger("lowtide")

_SHARE = 0.004  # of the run's seconds may go into samples
_ALLOWANCE = 0.2  # and so many seconds at the start
_HIGHER = 1.03  # a peak is sampled anew when it is so much above the last that was
_NEAR = 0.97  # of the step before: until then memory is only on its way up
_LEAKS = 256  # steps that are all looked at for leaks, before that is thinned, too
_REFRESH = 64  # steps after which what hardly ever changes is counted again
_NOW_EVERY = 1.0  # seconds
_ACTIVATIONS = "host activations"
_BUFFERED = ("clip", "update")  # pieces of a step whose buffers are gone before the next piece begins


class MemoryWatch:
    """Samples what an engine holds and what its process uses. ``mark`` puts something on the time axis."""

    def __init__(self, engine: Engine, writer: Writer, schedule: Schedule, mark: Callable[[str, str], None]) -> None:
        self.spent = 0.0
        """Seconds of this thread that recording has cost; what others do meanwhile is not its fault."""
        self._engine, self._writer, self._schedule, self._mark = engine, writer, schedule, mark
        folders = [folder.path for folder in engine.config.disk] or [str(writer.path.parent)]
        self._sampler = Sampler(folders, device=DeviceBusy().percent)
        self._leaks = LeakWatch()
        self._scenes: dict[str, Scene] = {}
        self._kept: dict[str, MemoryLine] = {}  # of the step under way: its fullest moment and others, written when it is over
        self._fullest_bytes = 0
        self._buffered: dict[str, int] = {}  # most bytes in buffers of this step that were sampled, by moment
        self._most_sampled = 0  # of the step under way: samples also see moments at which the budget is not read
        self._peak_before = 0
        self._buffer_bytes = 0
        self._last_memory: MemoryLine | None = None
        self._last_plan: PlanLine | None = None
        self._placed: Any = None
        self._now_at: float | None = None

    def begin_step(self, step: int) -> None:
        """Step ``step`` is about to begin: nothing of it is in memory yet, which is when leaks show."""
        self._note_plan(step - 1)
        self._count_activations()
        if self._engine.budget.limit is None:  # else the placer begins a new peak
            self._engine.budget.peak = 0
        self._kept, self._fullest_bytes, self._buffered, self._most_sampled = {}, 0, {}, 0
        if self._schedule.count % _REFRESH == 0:
            self._buffer_bytes = sum(b.nbytes for b in self._engine.model.buffers())
        written = self._schedule.keeps_memory() or self._schedule.sample_is_due(self._writer.seconds)
        if (written or keeps(self._schedule.count, _LEAKS)) and self._may_spend():
            line = self._sample(step, "begin")
            if written:
                self._write(line)
            self._look_for_leaks(step - 1, line)
        self._write_now()

    def at_boundary(self, step: int, moment: str) -> None:
        """Between two pieces of a step: sample if memory is at a new height, or if it is time."""
        if not self._may_spend():
            return
        start, budget = time.thread_time(), self._engine.budget
        if budget.limit is None:
            budget.read()
        due = self._schedule.sample_is_due(self._writer.seconds)
        full = budget.peak > max(self._fullest_bytes * _HIGHER, self._peak_before * _NEAR)
        buffered = self._engine.buffers_arena.taken_bytes
        busier = moment in _BUFFERED and buffered > self._buffered.get(moment, -1) * _HIGHER
        if due or ((full or busier) and self._schedule.keeps_memory()):
            line = self._sample(step, moment)
            if budget.peak > self._fullest_bytes:
                self._fullest_bytes = budget.peak
                self._keep("fullest", None if due else line)
            if busier:
                self._buffered[moment] = buffered
                self._keep(moment, None if due else line)
            if due:
                self._write(line)
                self._write_now()
        self.spent += time.thread_time() - start

    def end_step(self) -> None:
        """Write the moments that were kept, such as the fullest: each once, with the time it had."""
        if self._engine.budget.limit is None:
            self._engine.budget.read()
        self._peak_before = self._engine.budget.peak
        if self._schedule.keeps_memory():
            once = {id(line): line for line in self._kept.values()}
            for line in sorted(once.values(), key=lambda kept: kept.t):
                self._write(line)
        self._kept = {}

    @property
    def peak_bytes(self) -> int:
        """Of the step, as it counts against the budget."""
        return max(self._engine.budget.peak, self._most_sampled)

    def _keep(self, why: str, line: MemoryLine | None) -> None:
        """Write ``line`` when the step is over, instead of what was kept for the same reason; None: it is written already."""
        self._kept.pop(why, None)
        if line is not None:
            self._kept[why] = line

    def _may_spend(self) -> bool:
        return self.spent < _ALLOWANCE + _SHARE * self._writer.seconds

    def _sample(self, step: int, moment: str) -> MemoryLine:
        figures = self._sampler.sample()
        holds = holdings(self._engine, mapped=figures.memory.shared, buffers=self._buffer_bytes)
        t = round(self._writer.seconds, 4)
        self._last_memory = memory_line(self._engine, holds, figures, t=t, step=step, moment=moment)
        self._most_sampled = max(self._most_sampled, counted_bytes(self._last_memory))
        return self._last_memory

    def _write(self, line: MemoryLine) -> None:
        self._writer.write(line)
        self._schedule.sampled(self._writer.seconds)

    def _write_now(self) -> None:
        now = self._writer.seconds
        if self._now_at is None or now - self._now_at >= _NOW_EVERY:
            self._now_at = now
            self._writer.write_now((self._last_plan, self._writer.newest_step, self._last_memory))

    def _note_plan(self, step: int) -> None:
        """Write where bytes live, if that has changed."""
        placer, before = self._engine.placer, self._placed
        placed = self._placed = (placer.placement.units, placer.forecast)
        if before is not None and placed[0] is before[0] and placed[1] is before[1]:
            return
        why = "at the start" if before is None else str(getattr(placer, "why", "")) or "a step has shown more"
        t = round(self._writer.seconds, 4)
        self._last_plan = plan_line(self._engine, holdings(self._engine), t=t, step=step, why=why)
        self._writer.write(self._last_plan)
        if before is not None and placed[0] != before[0]:
            self._leaks.restart()
            self._scenes.clear()
            self._mark("replan", why)

    @property
    def _counts_always(self) -> bool:
        """Whether autograd's saved tensors pass through us in every step."""
        return self._engine.config.stage.parameters or self._engine.activations.handled

    def _count_activations(self) -> None:
        """Where autograd's saved tensors pass through us anyway, count them always; elsewhere in steps recorded in detail."""
        engine = self._engine
        saved = engine.activations.saved
        if self._counts_always:
            saved.kept = saved.kept or KeptBytes()
        elif self._schedule.in_detail():
            stays = [*engine.model.parameters(), *engine.model.buffers()]
            saved.kept = KeptBytes(frozenset(t.untyped_storage().data_ptr() for t in stays))
        else:
            saved.kept = None

    def _look_for_leaks(self, step: int, line: MemoryLine) -> None:
        memory, ours = line.process, line.process.total - line.not_ours
        series: dict[str, float] = {f"host {kind}": n for kind, n in line.host.items()}
        if not self._counts_always:  # a number in some steps only is no series; there they belong to what is not ours
            ours -= int(series.pop(_ACTIVATIONS, 0))
        series |= {f"device {kind}": n for kind, n in line.device.items()}
        series[NOT_OURS] = memory.anonymous + memory.shared - ours  # pages of files come and go as the kernel likes
        series[SPOOL] = line.spool_bytes
        if line.fds is not None and line.threads is not None:
            series |= {FILE_DESCRIPTORS: line.fds, THREADS: line.threads}
        for leak in self._leaks.observe(step, series, memory.total):
            where = ""
            if (before := self._scenes.pop(leak.series, None)) is not None:
                where = Scene(leak.series, self._engine).what_is_new(before)
            text = f"leak of {leak.series}: {leak.text}" + (f" ({where})" if where else "")
            self._mark("leak", text)
            _log.warning("%s", text, extra={"marked": True})
        for name in self._leaks.suspects - self._scenes.keys():
            self._scenes[name] = Scene(name, self._engine)
