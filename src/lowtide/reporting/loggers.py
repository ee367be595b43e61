"""Numbers of a run for other tools: a protocol of three methods, and two that come with lowtide.

Anything with ``log``, ``event`` and ``close`` is a logger, for instance a class of ten lines around the client of a tracking
service. ``open_logger("jsonl:metrics.jsonl")`` and ``open_logger("tensorboard:a")`` are what ``lowtide train --log`` takes.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from lowtide.errors import ArgumentError, Error

_log = logging.getLogger("lowtide")


class Logger(Protocol):
    """Where the numbers of a run go. A logger must not raise because a disk is full or a server is away: training goes on."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of one step."""
        ...

    def event(self, what: str, text: str) -> None:
        """Something that happened beside the steps: ``checkpoint``, ``skip``, ``replan``, ``leak``, ``warning``, ..."""
        ...

    def close(self) -> None:
        """Nothing comes any more. Idempotent."""
        ...


class MissingPackage(Error, ImportError):
    """A package that lowtide does not need itself is needed for what was asked, and is not installed."""

    def __init__(self, package: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}, which is not installed: pip install {package}")
        self.package = package


class JsonLines:
    """One JSON object per line: ``{"time": ..., "step": 3, "loss": 2.5, ...}`` or ``{"time": ..., "event": ..., "text": ...}``.

    What JSON has no word for (NaN, infinity) becomes ``null``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: Any = open(self.path, "ab", buffering=0)
        except OSError as error:
            raise ArgumentError(f"{str(path)!r} cannot be written to ({error.strerror}).") from error
        self._complained = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._write({"step": step, **{k: v if math.isfinite(v) else None for k, v in values.items()}})

    def event(self, what: str, text: str) -> None:
        self._write({"event": what, "text": text})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"time": round(time.time(), 3), **entry}).encode() + b"\n")
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.warning("%s is not complete: %s", self.path, error.strerror)


class TensorBoard:
    """Scalars and texts for TensorBoard, written by torch. Raises ``MissingPackage`` without the package ``tensorboard``."""

    def __init__(self, folder: str | Path) -> None:
        try:
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            raise MissingPackage("tensorboard", "--log tensorboard:FOLDER") from error
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._writer: Any = writer(str(folder))
        except OSError as error:
            raise ArgumentError(f"{str(folder)!r} cannot be written to ({error.strerror}).") from error
        self._step = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def event(self, what: str, text: str) -> None:
        if self._writer is not None:
            self._writer.add_text(what, text, self._step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


_SORTS: dict[str, Callable[[str], Logger]] = {"jsonl": JsonLines, "tensorboard": TensorBoard}


def check_logger(where: str, *, what: str) -> None:
    """Raise if ``where``, which the caller wrote as ``what``, names no logger or one that is not installed. Makes nothing."""
    sort, _ = _parse(where, what)
    if sort == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise MissingPackage("tensorboard", f"{what} tensorboard:FOLDER")


def open_logger(where: str) -> Logger:
    """``jsonl:FILE`` or ``tensorboard:FOLDER``. Raises ``ArgumentError`` or ``MissingPackage``."""
    sort, place = _parse(where, "the logger")
    return _SORTS[sort](place)


def _parse(where: str, what: str) -> tuple[str, str]:
    sort, _, place = where.partition(":")
    if sort not in _SORTS or not place:
        raise ArgumentError(f"{what} is {where!r}; give jsonl:FILE or tensorboard:FOLDER.")
    return sort, place
