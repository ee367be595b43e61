"""The recorder of one sharded model: writes its timeline while it trains, at a cost below a hundredth of a step.

It listens: to the trace and the clock, which tell it what the engine does, and to the model's own hooks, which tell it where a
forward pass begins and ends. Everything it does is on the thread that runs the step, between two pieces of the step's work;
stores and channels only leave spans behind.

A step begins with the first forward pass after an update and ends with the next update. What lies between (loading data,
validation, saving) belongs to no step. Whatever goes wrong in here ends the recording, never the training.
"""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.reporting.division import divide
from lowtide.reporting.ending import fell_silent
from lowtide.reporting.extras import EVENTS
from lowtide.reporting.format import MarkLine, Scalar, StepLine
from lowtide.reporting.loggers import Logger
from lowtide.reporting.observing import UnitTallies, losses_in, numbers_of, run_line, spans_line
from lowtide.reporting.postmortem import speaks_of_memory
from lowtide.reporting.thinning import Schedule
from lowtide.reporting.watching import MemoryWatch
from lowtide.reporting.writer import Writer
from lowtide.runtime.engine import Engine
from lowtide.runtime.trace import SpanRow, Spans
from lowtide.tiers.store import Traffic

_log = logging.getLogger("lowtide")

_MOST_MARKS = 2_000


class Recorder:
    """See the module's docstring. ``loggers`` get the numbers of every step, and may be added to at any time."""

    def __init__(self, engine: Engine, run: Path, *, facts: Mapping[str, Scalar] | None = None) -> None:
        self.run_folder = run
        self.loggers: list[Logger] = []
        self._engine = engine
        self._writer = Writer(run, engine.group.rank)
        silent_before = fell_silent(self._writer.path)
        self._schedule, self._tallies, self._spans = Schedule(), UnitTallies(), Spans()
        self._watch = MemoryWatch(engine, self._writer, self._schedule, self.mark)
        self._unit_of = {name: engine.unit_of[param].name for param, name in engine.name_of.items()}
        self._bytes_of = {unit.name: unit.layout.nbytes for unit in engine.units}
        self._marks = 0
        self._on = True
        # -- the step under way
        self._step = self._seen_steps = engine.steps_taken
        self._thread = threading.get_ident()
        self._since: float | None = None
        self._depth = 0  # of forward passes of the model, inside each other
        self._pass_since = 0.0
        self._passes: list[tuple[float, float]] = []  # forward and backward
        self._backward: tuple[str, float, float] | None = None  # unit, begin and end of where gradients came from last
        self._stepping_since: float | None = None
        self._skipped_at: float | None = None
        self._losses: list[Tensor] = []
        # -- and before it
        self._moved = self._traffic()
        self._wire_bytes = 0
        self._covers = 0
        self._writer.write(run_line(engine, facts or {}), last_words=True)
        self._warnings = _Warnings(self)
        self._at_exit = functools.partial(_end_at_exit, self._writer, run)
        self._listen()
        if silent_before and engine.group.rank == 0:
            _tell_of_the_one_before(run)

    # -- beginning and end --------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        engine = self._engine
        engine.trace.listener = self._on_event
        self._leave_spans_in(self._spans)
        engine.placer.clock.listener = self._on_clock
        engine.model.register_forward_pre_hook(self._before_model, prepend=True)
        engine.model.register_forward_hook(self._after_model, prepend=True, always_call=True)
        _log.addHandler(self._warnings)
        weakref.finalize(engine, _forget, self._writer, self._warnings, self._at_exit).atexit = False
        atexit.register(self._at_exit)

    def _leave_spans_in(self, spans: Spans | None) -> None:
        """Tell everybody who does something worth a span."""
        engine = self._engine
        engine.placer.clock.spans = spans
        listener = self._at_boundary if spans is not None else None
        for stream in engine.update.streams.values():
            stream.spans, stream.listener = spans, listener
        engine.grad_facts.spans, engine.grad_facts.listener = spans, listener
        for channel in (engine.gathers, engine.reductions):
            channel.observer = spans.note_exchange if spans is not None else None
        if engine.store is not None:
            engine.store.traffic.observer = spans.note_request if spans is not None else None

    def _stop(self) -> None:
        self._on = False
        self._engine.trace.listener = self._engine.placer.clock.listener = None
        self._leave_spans_in(None)
        self._engine.activations.saved.kept = None

    def _failed(self) -> None:
        self._stop()
        _log.warning("recording has stopped, training goes on", exc_info=True)

    def end(self, why: str, text: str = "") -> None:
        """The last line. Idempotent."""
        self._stop()
        _forget(self._writer, self._warnings, self._at_exit, why, text)
        for logger in self.loggers:
            logger.close()
        self.loggers.clear()

    # -- what others tell ---------------------------------------------------------------------------------------------

    def note(self, *, loss: float) -> None:
        """The loss of the step that has just ended."""
        held = self._writer.held
        if held is not None:
            self._writer.hold(replace(held, loss=float(loss)))

    def mark(self, what: str, text: str) -> None:
        """A mark on the time axis, also for loggers."""
        self._marks += 1
        if self._marks <= _MOST_MARKS:
            self._writer.write(MarkLine(t=self._t(), step=self._step, what=what, text=text))
        for logger in list(self.loggers):
            try:
                logger.event(what, text)
            except Exception as error:  # somebody else's code, and no reason to end a training or its record
                self.loggers.remove(logger)
                _log.warning("%s is told of nothing more: %r", type(logger).__name__, error)

    # -- what the engine does -----------------------------------------------------------------------------------------

    def _before_model(self, module: nn.Module, args: Any) -> None:
        if not self._on or not torch.is_grad_enabled() or self._in_backward:
            return
        self._depth += 1
        if self._depth > 1:
            return
        try:
            if self._since is None or self._skipped_at is not None:
                self._begin_step()
            self._pass_since = time.perf_counter()
        except Exception:
            self._failed()

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._on or not self._depth or self._in_backward:
            return
        self._depth -= 1
        if self._depth:
            return
        try:
            self._passes.append((self._pass_since, time.perf_counter()))
            self._losses += losses_in(output)
            self._at_boundary("forward")
        except Exception:
            self._failed()

    def _on_clock(self, what: str) -> None:
        try:
            if what == "backward":
                now = time.perf_counter()
                self._depth = 0  # a forward pass that raised may have left it
                self._pass_since, self._backward = now, ("", now, now)
            else:
                self._at_boundary("backward" if self._in_backward else "forward")
        except Exception:
            self._failed()

    def _on_event(self, what: str, unit: str) -> None:
        try:
            if what == "gradient":
                self._gradient(self._unit_of.get(unit, ""))
            elif what == "end of backward":
                self._end_backward()
            elif what == "step":
                self._stepping_since = time.perf_counter()
            elif what == "skip":
                self._skipped_at = time.perf_counter()
                self.mark("skip", f"the gradient of {unit!r} is not finite")
            elif what == "update":
                self._end_step()
        except Exception:
            self._failed()

    @property
    def _in_backward(self) -> bool:
        return self._engine.placer.clock.backward_since is not None

    def _at_boundary(self, moment: str) -> None:
        """Between two pieces of a step's work; ``moment`` says of which sort they are."""
        if self._since is None:
            return
        try:
            self._watch.at_boundary(self._step + 1, moment)
        except Exception:
            self._failed()

    def _gradient(self, unit: str) -> None:
        """What backward has done since the last gradient of another unit was for this one."""
        now = time.perf_counter()
        name, begin, end = self._backward or ("", now, now)
        if name and name != unit:
            self._spans.add("compute", "backward", name, begin, end)
            begin = end
            self._at_boundary("backward")
        self._backward = (unit, begin, now)

    def _end_backward(self) -> None:
        if self._backward is not None:
            name, begin, _ = self._backward
            now = time.perf_counter()
            self._passes.append((self._pass_since, now))
            self._spans.add("compute", "backward", name, begin, now)
        self._backward = None

    # -- steps --------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._since is not None:
            self._end_step()  # nothing was updated, so nobody has said that the step was over
        start, engine = time.thread_time(), self._engine
        self._writer.release()
        if engine.steps_taken != self._seen_steps:  # a checkpoint was loaded
            self._step = self._seen_steps = engine.steps_taken
        self._thread = threading.get_ident()
        self._watch.begin_step(self._step + 1)
        self._spans.take()  # of what belongs to no step
        self._passes, self._losses, self._stepping_since = [], [], None
        self._watch.spent += time.thread_time() - start
        self._since = time.perf_counter()

    def _end_step(self) -> None:
        begin, start = self._since, time.thread_time()
        if begin is None:  # an update without a forward pass of the model
            return
        end = self._skipped_at or time.perf_counter()
        if self._stepping_since is not None:  # around the chunks, if it was streamed: reading and writing is a part of it
            self._spans.add("update", "update", "", self._stepping_since, end)
        rows = [self._sized(row) for row in self._spans.take()]
        self._step, self._covers = self._step + 1, self._covers + 1
        self._seen_steps = self._engine.steps_taken
        self._watch.end_step()
        line = self._step_line(rows, end - begin)
        self._tallies.add(rows, self._thread)
        self._writer.release()
        if self._schedule.writes_step():
            self._writer.hold(line)
            self._covers = 0
        else:
            self._writer.newest_step = line
        slowest = self._schedule.slowest_so_far(line.seconds)
        if self._schedule.in_detail() or slowest:
            self._writer.write(spans_line(rows, begin, t=line.t, step=self._step, why="slowest" if slowest else "regular"))
            self._writer.write(self._tallies.line(self._engine, t=line.t, step=self._step))
        limit = self._engine.budget.limit
        if limit is not None and line.peak_bytes > limit:
            self.mark("over budget", f"{line.peak_bytes} bytes in use, {limit} allowed")
        for logger in self.loggers:
            logger.log(self._step, numbers_of(line))
        self._schedule.step_over()
        self._since = self._skipped_at = None
        self._watch.spent += time.thread_time() - start

    def _step_line(self, rows: list[SpanRow], seconds: float) -> StepLine:
        part = divide(rows, self._passes, self._thread)
        before, self._moved = self._moved, self._traffic()
        wire = sum(row.nbytes for row in rows if row.lane in ("gather", "reduce"))
        self._wire_bytes += wire
        losses = [float(loss) for loss in self._losses] if self._schedule.writes_step() or self.loggers else []
        self._losses = []
        return StepLine(
            t=self._t(),
            step=self._step,
            seconds=round(seconds, 6),
            compute_seconds=round(part.compute, 6),
            disk_wait_seconds=round(part.disk_wait, 6),
            comm_wait_seconds=round(part.comm_wait, 6),
            update_seconds=round(part.update, 6),
            loss=sum(losses) / len(losses) if losses else None,
            disk_busy_seconds=round(self._moved[2] - before[2], 6),
            disk_read_bytes=self._moved[0] - before[0],
            disk_written_bytes=self._moved[1] - before[1],
            wire_bytes=wire,
            peak_bytes=self._watch.peak_bytes,
            skipped=self._skipped_at is not None,
            covers=self._covers,
            total_disk_read_bytes=self._moved[0],
            total_disk_written_bytes=self._moved[1],
            total_wire_bytes=self._wire_bytes,
        )

    def _sized(self, row: SpanRow) -> SpanRow:
        """An exchange moves what this rank does not have of a unit."""
        if row.lane not in ("gather", "reduce") or row.nbytes:
            return row
        ranks = self._engine.group.shard.size
        return row._replace(nbytes=self._bytes_of.get(row.unit, 0) * (ranks - 1) // ranks)

    def _traffic(self) -> tuple[int, int, float]:
        traffic = self._engine.store.traffic if self._engine.store is not None else Traffic()
        return traffic.read_bytes, traffic.written_bytes, traffic.busy_seconds

    def _t(self) -> float:
        return round(self._writer.seconds, 4)


class _Warnings(logging.Handler):
    """What lowtide warns of becomes a mark. Refers to the recorder weakly: a logger lives as long as the process."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(logging.WARNING)
        self._recorder = weakref.ref(recorder)

    def emit(self, record: logging.LogRecord) -> None:
        recorder = self._recorder()
        if recorder is not None and not getattr(record, "marked", False):
            recorder.mark("warning", record.getMessage())
        if logging.lastResort is not None and self._is_alone(logging.getLogger(record.name)):
            logging.lastResort.handle(record)

    def _is_alone(self, logger: logging.Logger | None) -> bool:
        """Whether nobody else hears of it. Python prints a warning that has no handler at all; this one must not end that."""
        if self is not next((handler for handler in _log.handlers if isinstance(handler, _Warnings)), None):
            return False  # of several models that are recorded, one prints
        while logger is not None:
            if any(not isinstance(handler, _Warnings) for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True


def record(engine: Engine, run: str | Path, **facts: Scalar) -> Recorder:
    """Begin to record a sharded model into the folder of a run. Raises ``ArgumentError`` if it cannot be written to."""
    return Recorder(engine, Path(run), facts=facts)


def _forget(writer: Writer, warnings: _Warnings, at_exit: functools.partial[None], why: str = "done", text: str = "") -> None:
    """Recording is over; or the model is gone, and with it the recorder."""
    _log.removeHandler(warnings)
    atexit.unregister(at_exit)
    writer.end(why, text)


def _tell_of_the_one_before(run: Path) -> None:
    """The process before this one was killed; if that was for memory, this one says so, and leaves the page."""
    from lowtide.reporting.report import leave_post_mortem  # pages are not made in a run that goes well

    if (run / EVENTS).exists():  # `lowtide train` keeps its own book, and tells by itself
        return
    if (told := leave_post_mortem(run, goes_on=True)) is not None:
        _log.warning("the job before this one ran out of memory: %s", told)


def _end_at_exit(writer: Writer, run: Path) -> None:
    """The interpreter ends, perhaps because of an error that it has printed."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        writer.end("done")
    else:
        text = f"{type(error).__name__}: {error}"
        writer.end("error", text)
        if speaks_of_memory(text):
            from lowtide.reporting.report import leave_post_mortem

            if (told := leave_post_mortem(run)) is not None:
                _log.error("%s", told)
