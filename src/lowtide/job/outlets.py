"""Where the numbers of a job go besides its run folder: what ``--log`` names, on rank 0, and the engine's record of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from torch import nn

from lowtide.api import engine_of
from lowtide.job.records import StepRecord
from lowtide.reporting.loggers import Logger, open_logger
from lowtide.reporting.recorder import Recorder

_FORWARDED = ("leak", "replan", "over budget")
"""Marks that only the record of the run knows of; the others are events of the job as well, and would come twice."""


class _Marks:
    """A logger of the record that passes on some of its marks."""

    def __init__(self, outlets: Outlets) -> None:
        self._outlets = outlets

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The job tells of its steps itself."""

    def event(self, what: str, text: str) -> None:
        if what in _FORWARDED:
            self._outlets.event(what, text)

    def close(self) -> None:
        """Outlets stay open until the job ends."""


class Outlets:
    """Opened before anything is built, so that a wrong word costs no time."""

    def __init__(self, words: Sequence[str]) -> None:
        self._loggers: list[Logger] = [open_logger(word) for word in words]

    def listen(self, model: nn.Module) -> None:
        """From now on, hear of what the record of the run finds."""
        recorder = engine_of(model).recorder
        if self._loggers and isinstance(recorder, Recorder):
            recorder.loggers.append(_Marks(self))

    def step(self, record: StepRecord) -> None:
        """One step, as rank 0 saw it."""
        values = {k: float(v) for k, v in asdict(record).items() if isinstance(v, int | float) and k != "step"}
        for logger in self._loggers:
            logger.log(record.step, values)

    def event(self, what: str, text: str) -> None:
        for logger in self._loggers:
            logger.event(what, text)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()


def note_loss(model: nn.Module, loss: float) -> None:
    """The step that has just ended came to this; the record of the run cannot know."""
    if (recorder := engine_of(model).recorder) is not None:
        recorder.note(loss=loss)


def end_record(model: nn.Module, why: str, text: str = "") -> None:
    """The run ends here: ``done`` or ``error``."""
    if (recorder := engine_of(model).recorder) is not None:
        recorder.end(why, text)
