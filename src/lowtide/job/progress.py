"""What a person sees while a job runs: a bar on a terminal, a few lines in a log, nothing beside ``--json``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from lowtide.job.gauges import Gauge, Limits, gauge_row, gauges
from lowtide.job.placement import mebibytes
from lowtide.job.records import StepRecord, ValidationRecord
from lowtide.job.words import spoken

_LOG_LINES = 10
"""About how many lines of steps a log gets."""


class Reporter(Protocol):
    """Told by rank 0 what happens."""

    def tell(self, message: str) -> None: ...

    def start(self, steps: int, limits: Limits, *, done: int = 0) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def validation(self, record: ValidationRecord) -> None: ...

    def saving(self, done: int, total: int) -> None:
        """Bytes of a checkpoint that are written. May be called from another thread."""
        ...

    def close(self) -> None: ...


class Silent:
    """For ``--json``, and for all ranks but the first."""

    def tell(self, message: str) -> None: ...

    def start(self, steps: int, limits: Limits, *, done: int = 0) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def validation(self, record: ValidationRecord) -> None: ...

    def saving(self, done: int, total: int) -> None: ...

    def close(self) -> None: ...


class Lines:
    """For a log: a line for about every tenth of the job."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 1
        self._limits = Limits()
        self._done = 0  # by an earlier process of the run
        self._started = 0.0

    def tell(self, message: str) -> None:
        self._console.print(spoken(message), highlight=False, markup=False, soft_wrap=True)

    def start(self, steps: int, limits: Limits, *, done: int = 0) -> None:
        self._steps = steps
        self._limits = limits
        self._done = done
        self._started = time.perf_counter()

    def step(self, record: StepRecord) -> None:
        if record.step != self._done + 1 and record.step % max(1, self._steps // _LOG_LINES) and record.step != self._steps:
            return
        spent = time.perf_counter() - self._started
        left = spent / (record.step - self._done) * (self._steps - record.step)
        self.tell(
            f"step {record.step:>4}/{self._steps}   loss {record.loss:7.4f}   {record.tokens_per_second:7,.0f} tokens/s   "
            f"peak {mebibytes(record.peak_bytes)}   {left:4.0f} s left"
        )
        if readings := gauges(record, self._limits):
            moved = f"   read {mebibytes(record.disk_read_bytes)}, written {mebibytes(record.disk_written_bytes)}"
            self.tell(
                f"  {'   '.join(f'{gauge.name} {gauge.text}' for gauge in readings)}{moved if self._limits.disk_bytes else ''}"
            )
        if record.straggler:
            self.tell(f"  {record.straggler}")

    def validation(self, record: ValidationRecord) -> None:
        self.tell(f"step {record.step:>4}/{self._steps}   validation loss {record.validation_loss:.4f}")

    def saving(self, done: int, total: int) -> None: ...

    def close(self) -> None: ...


class _Gauged(Progress):
    """A progress bar with gauges below it, where there is something to gauge, and a remark, where there is something to say."""

    readings: Sequence[Gauge] = ()
    remark: str | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.readings:
            yield gauge_row(self.readings)
        if self.remark:
            yield Text(self.remark, style="yellow")


class Bar:
    """For a terminal: a line that is drawn again and again, gauges below it, and the validation losses above it."""

    def __init__(self, console: Console) -> None:
        self._progress = _Gauged(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[memory]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("", loss="-", speed="", memory="", start=False)
        self._steps = 0
        self._limits = Limits()

    def tell(self, message: str) -> None:
        self._progress.console.print(spoken(message), highlight=False, markup=False)

    def start(self, steps: int, limits: Limits, *, done: int = 0) -> None:
        self._steps = steps
        self._limits = limits
        self._progress.update(self._task, total=steps, completed=done)
        self._progress.start_task(self._task)
        self._progress.start()

    def step(self, record: StepRecord) -> None:
        self._progress.readings = gauges(record, self._limits)
        self._progress.remark = record.straggler
        self._progress.update(
            self._task,
            completed=record.step,
            loss=f"{record.loss:.4f}",
            speed=f"{record.tokens_per_second:,.0f} tokens/s",
            memory=mebibytes(record.peak_bytes),
        )

    def validation(self, record: ValidationRecord) -> None:
        self.tell(f"step {record.step:>4}/{self._steps}   validation loss {record.validation_loss:.4f}")

    def saving(self, done: int, total: int) -> None:
        self._progress.update(self._task, speed=f"saving {done / max(total, 1):.0%}")

    def close(self) -> None:
        self._progress.stop()


def reporter_for(console: Console) -> Reporter:
    """A bar if somebody watches, lines otherwise."""
    return Bar(console) if console.is_terminal else Lines(console)
