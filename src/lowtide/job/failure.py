"""Why a rank ended, as a small file that its launcher reads. No torch here: the launcher stays small."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from lowtide.errors import ArgumentError, DeadlineExceeded, Error, PeerFailed

FOLDER_VARIABLE = "LOWTIDE_RANKS_FOLDER"
"""Set for every rank that ``launch`` starts: a folder of mode 0700 with the store and the failure reports."""

PARENT_VARIABLE = "LOWTIDE_RANKS_PARENT"
"""Set for the same ranks: the process that started them."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

_ASKED = {"interrupted": INTERRUPTED, "SIGTERM": 143, "SIGUSR1": 138}
_EXIT_CODES = {"argument": 2, **_ASKED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """``kind``: argument (the caller's mistake), error (lowtide says what is wrong), bug, died (no report), or what asked the
    rank to stop: interrupted (Ctrl-C), SIGTERM, SIGUSR1."""

    rank: int
    kind: str
    message: str
    traceback: str
    time: float
    secondary: bool
    """It only says that another rank failed."""

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES.get(self.kind, 1)

    @property
    def may_be_retried(self) -> bool:
        """Whether starting again may help: nobody asked for the end, and the caller made no mistake."""
        return self.kind not in _EXIT_CODES


def describe(error: BaseException, rank: int) -> Failure:
    """An exception as a report."""
    if isinstance(error, KeyboardInterrupt):
        kind = "interrupted"
    else:
        kind = "argument" if isinstance(error, ArgumentError) else "error" if isinstance(error, Error) else "bug"
    return Failure(
        rank=rank,
        kind=kind,
        message=str(error) or type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
        time=time.time(),
        secondary=isinstance(error, (PeerFailed, DeadlineExceeded)),
    )


def leave_report(failure: Failure, folder: Path) -> None:
    """Write the report; it appears whole or not at all."""
    temporary = folder / f"rank-{failure.rank}.part"
    temporary.write_text(json.dumps(asdict(failure)))
    temporary.rename(folder / f"rank-{failure.rank}.failure")


def read_reports(folder: Path) -> list[Failure]:
    """All reports so far."""
    return [Failure(**json.loads(path.read_text())) for path in sorted(folder.glob("rank-*.failure"))]


def first_cause(failures: list[Failure]) -> Failure | None:
    """The failure that explains the others: a rank that died, one that was asked to end, else the first that does not point
    at another rank."""
    order = {"died": 0} | dict.fromkeys(_ASKED, 1)
    return min(failures, key=lambda failure: (order.get(failure.kind, 2), failure.secondary, failure.time), default=None)
