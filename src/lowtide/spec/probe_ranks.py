"""Two processes of this host that measure something together: started, waited for, and gone afterwards, whatever happens.

They are processes of their own because a mistake in gloo ends the process it happens in. They meet through a file in a private
folder, and rank 0 prints the answer as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from lowtide.errors import DeadlineExceeded, PeerFailed

RANKS = 2
_STORE = "store"
_POLL_SECONDS = 0.02
_GLOO_SECONDS = 10


def ask_two_ranks(module: str, plan: object, *, what: str, deadline: float) -> Any:
    """Run ``python -m module RANK FOLDER PLAN`` twice; the answer of rank 0. Raises PeerFailed or DeadlineExceeded, and leaves
    no process behind. ``what`` the two do, for the message."""
    with tempfile.TemporaryDirectory(prefix="lowtide-wire-") as folder:  # mode 0700
        ranks: list[subprocess.Popen[str]] = []
        try:
            for rank in range(RANKS):
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, str(rank), folder, json.dumps(plan)],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
            _wait(ranks, what, deadline)
            out, _ = ranks[0].communicate()
        finally:
            for process in ranks:
                _end(process)
    try:
        return json.loads(out.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise wrong_answer(out) from error


def wrong_answer(answer: object) -> PeerFailed:
    """For an answer that is not what was asked for."""
    return PeerFailed(0, f"it answered {str(answer)[-200:]!r}", "the probe")


def gloo_of_two(rank: int, folder: str) -> Any:
    """In one of the two: the gloo group of both, over loopback."""
    import torch.distributed as dist

    from lowtide.torch_internals import gloo_options

    make_store: Any = getattr(dist, "FileStore")  # noqa: B009 - it has no types
    store = make_store(str(Path(folder) / _STORE), RANKS)
    return dist.ProcessGroupGloo(store, rank, RANKS, gloo_options("127.0.0.1", (), timedelta(seconds=_GLOO_SECONDS)))


def answer(value: object) -> None:
    """In rank 0: what ``ask_two_ranks`` returns."""
    sys.stdout.write(json.dumps(value) + "\n")


def be_one_of_two(main: Callable[[list[str]], None]) -> NoReturn:
    """The whole of such a process. It ends at once: when a process with gloo in it is taken down in the usual way, threads that
    still run may end it with another word (``terminate called``) and another code."""
    code = 0
    try:
        main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(ranks: list[subprocess.Popen[str]], what: str, deadline: float) -> None:
    """Until both have ended well."""
    end = time.monotonic() + deadline
    while any(process.poll() is None for process in ranks):
        _raise_failure(ranks)
        if time.monotonic() > end:
            raise DeadlineExceeded(what, deadline)
        time.sleep(_POLL_SECONDS)
    _raise_failure(ranks)


def _raise_failure(ranks: list[subprocess.Popen[str]]) -> None:
    for rank, process in enumerate(ranks):
        if process.poll():
            _, err = process.communicate()
            lines = err.strip().splitlines()
            raise PeerFailed(rank, lines[-1] if lines else f"it ended with code {process.returncode}", "the probe")


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    with contextlib.suppress(ValueError):  # closed already
        process.communicate()
