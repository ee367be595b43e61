"""A page, run from its first line to its last in a folder of its own, in a process that has imported torch already."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import tests.kit.dist  # noqa: F401 - says what the server of processes imports
from tests.docs.printed import ROOT, Snippet, excluded, ranks_of, snippets, to_run
from tests.docs.surroundings import prepare, run_python

_SECONDS = 1500


@dataclass(frozen=True)
class Outcome:
    """What one snippet did. ``wrong``: why that is not what the page says, or empty."""

    where: str
    what: str
    wrong: str


def run_page(page: str, folder: Path, *, quick: bool) -> list[Outcome]:
    """What became of every snippet of a page that is run here and needs one rank."""
    process = multiprocessing.get_context("forkserver").Process(target=_run_page, args=(page, str(folder), quick))
    process.start()
    try:
        process.join(_SECONDS)
    finally:
        if process.exitcode is None:
            process.kill()
            process.join()
    said = (folder / "said.txt").read_text() if (folder / "said.txt").exists() else ""
    assert process.exitcode == 0, f"{page} ended with {process.exitcode}:\n{said[-4000:]}"
    return [Outcome(**outcome) for outcome in json.loads((folder / "outcomes.json").read_text())]


def _run_page(page: str, folder: str, quick: bool) -> None:
    said = os.open(os.path.join(folder, "said.txt"), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    os.environ |= {"XDG_CACHE_HOME": os.path.join(folder, "cache"), "COLUMNS": "120", "PATH": path}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    os.chdir(folder)
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    prepare(page, quick=quick)
    here = [s for s in snippets(page) if not excluded(s, quick=quick) and (s.language == "sh" or ranks_of(s) == 1)]
    outcomes = [_run(snippet, said, quick=quick) for snippet in here]
    Path("outcomes.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes]))


def _run(snippet: Snippet, said: int, *, quick: bool) -> Outcome:
    before = os.lseek(said, 0, os.SEEK_END)
    what, wrong = snippet.text, ""
    try:
        if snippet.language == "python":
            run_python(snippet, rank=0)
        else:
            what = to_run(snippet, quick=quick)
            code = _call(shlex.split(what)) if quick else subprocess.run(shlex.split(what), check=False).returncode
            wrong = "" if code == snippet.exit_code else f"exit code {code} instead of {snippet.exit_code}\n"
    except BaseException:
        wrong = traceback.format_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return Outcome(str(snippet), what, wrong and wrong + os.pread(said, 1 << 20, before).decode("utf-8", "replace")[-3000:])


def _call(words: list[str]) -> int:
    """``lowtide`` in this process, which saves the seconds of importing torch."""
    if words[0] != "lowtide":
        raise ValueError(f"no rule says how {words[0]!r} is run here: see tests/docs/printed.py")
    from lowtide.cli.main import run

    return run(words[1:])


def on_a_rank(rank: int, world_size: int, snippet: Snippet, folder: str) -> None:
    """One block of Python on one of several ranks."""
    here = os.getcwd()
    os.chdir(folder)
    try:
        run_python(snippet, rank=rank)
    finally:
        os.chdir(here)
