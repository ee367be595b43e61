"""Links, pipes, sockets, devices and folders where files are expected: every public entry, every name it touches, every kind.

Nothing outside of the folder that was named is written, removed or copied out of; nothing hangs; what is wrong is a typed
error. Whatever is behind a link is watched for that, down to its number of names.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.checkpoint.collect import collect
from lowtide.cli.app import answer
from lowtide.errors import Error
from lowtide.tiers import spool
from tests.kit.crashes import apart
from tests.kit.forgery import Small

SECRET = "this is nobody's business"
HEX = "0123456789abcdef"
SECONDS = 60


# -- kinds of odd things ----------------------------------------------------------------------------------------------


def a_socket(path: Path, _: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # their names must be short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


def a_folder(path: Path, _: Path) -> None:
    (path / "inside").mkdir(parents=True)
    (path / "inside" / "mine.txt").write_text("kept")


KINDS: dict[str, Callable[[Path, Path], Any]] = {
    "a pipe": lambda path, _: os.mkfifo(path),
    "a socket": a_socket,
    "a link to a file": lambda path, outside: path.symlink_to(outside / "secret.txt"),
    "a link to a folder": lambda path, outside: path.symlink_to(outside / "folder"),
    "a link to a checkpoint": lambda path, outside: path.symlink_to(outside / "checkpoint"),
    "a link to nothing": lambda path, outside: path.symlink_to(outside / "nothing"),
    "a link to itself": lambda path, _: path.symlink_to(path.name),
    "a link to a device": lambda path, _: path.symlink_to("/dev/zero"),
    "a link to a pipe": lambda path, outside: path.symlink_to(outside / "pipe"),
    "a folder": a_folder,
}


# -- entries ----------------------------------------------------------------------------------------------------------


class Trainee:
    """A model and its optimizer."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Small()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        lowtide.shard(self.model, self.optimizer, **options)

    def train(self) -> None:
        self.model(torch.randn(4, 6)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def save(base: Path, name: str = "step-3", **options: Any) -> None:
    lowtide.save(base / "run" / name, Trainee().model, **options).wait()


def save_again(base: Path) -> None:
    save(base, "step-2", keep=1)


def load(base: Path) -> None:
    lowtide.load(base / "run", Trainee().model, strict=False)


def command(*words: str) -> Callable[[Path], None]:
    def run(base: Path) -> None:
        code = answer([word.replace("BASE", str(base)) for word in words])
        assert code in (0, 1, 2), code

    return run


def clean_spools(base: Path) -> None:
    spool.clean(str(base / "spool"))


def spool_there(base: Path) -> None:
    Trainee(memory="900MiB", disk=str(base / "spool")).train()


def record(base: Path) -> None:
    one = Trainee(run=base / "job")
    one.train()


CHECKPOINT_FILES = ("manifest.json", "rank-00000.json", "rank-00000.safetensors", "rank-00000-frozen.safetensors")
AROUND = ("LATEST", "step-2", f".new-step-3-{HEX}", f".old-step-2-{HEX}", f".new-LATEST-{HEX}", f".old-photos-{HEX}", "notes")
IN_RUN = (*AROUND, *(f"step-2/{name}" for name in CHECKPOINT_FILES), f".new-step-9-{HEX}/rank-00000.json")
IN_JOB = ("events.jsonl", "metrics.jsonl", "config.json", "plan.json", "report.html")
TIMELINES = ("timeline", "timeline/rank-00000.jsonl", "timeline/rank-00000.now.json", "timeline/rank-00001.jsonl")
IN_SPOOL = (f"lowtide-17-{HEX}", f"lowtide-17-{HEX}/lock", f"lowtide-17-{HEX}/bytes", "notes")
IN_HUGGING_FACE = ("config.json", "tokenizer.json", "vocab.txt", "spiece.model", "chat.jinja")

ENTRIES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "save": (save, tuple(f"run/{name}" for name in (*IN_RUN, "step-3"))),
    "save, keep": (save_again, tuple(f"run/{name}" for name in IN_RUN)),
    "load": (load, tuple(f"run/{name}" for name in IN_RUN)),
    "gc": (lambda base: collect(base / "run", minutes=0, keep=1), tuple(f"run/{name}" for name in IN_RUN)),
    **{
        f"ckpt {words[0]}": (command("ckpt", *words), tuple(f"run/{name}" for name in IN_RUN))
        for words in (
            *(("ls", "BASE/run"), ("show", "BASE/run"), ("verify", "BASE/run"), ("gc", "BASE/run", "--now")),
            *(("export", "BASE/run", "BASE/out"), ("diff", "BASE/run/step-1", "BASE/run")),
        )
    },
    "ckpt show of one": (command("ckpt", "show", "BASE/run/step-2"), tuple(f"run/step-2/{name}" for name in CHECKPOINT_FILES)),
    "export a checkpoint": (command("ckpt", "export", "--checkpoint", "BASE/run/step-1", "BASE/run/copy"), ("run/copy",)),
    "export to": (command("ckpt", "export", "BASE/run/step-1", "BASE/out/model"), ("out/model",)),
    "export like": (
        command("ckpt", "export", "BASE/run/step-1", "BASE/out", "--like", "BASE/hf"),
        tuple(f"hf/{name}" for name in IN_HUGGING_FACE),
    ),
    "import": (
        command("ckpt", "import", "BASE/hf", "BASE/imported/x"),
        ("hf/model.safetensors", "hf/model.safetensors.index.json", "imported/x"),
    ),
    "report": (command("report", "BASE/job"), tuple(f"job/{name}" for name in (*IN_JOB, *TIMELINES))),
    "report as JSON": (command("report", "BASE/job", "--json"), tuple(f"job/{name}" for name in (*IN_JOB, *TIMELINES))),
    "top": (command("top", "BASE/job", "--once", "--json"), tuple(f"job/{name}" for name in (*IN_JOB, *TIMELINES))),
    "record": (record, tuple(f"job/{name}" for name in TIMELINES)),
    "train on disk": (spool_there, tuple(f"spool/{name}" for name in IN_SPOOL)),
    "clean spools": (clean_spools, tuple(f"spool/{name}" for name in IN_SPOOL)),
    "hardware": (command("plan", "--model", "gpt2", "--hardware", "BASE/machine.json", "--memory", "4GiB"), ("machine.json",)),
}


# -- what is there ----------------------------------------------------------------------------------------------------


def prepare(base: Path) -> None:
    """Two checkpoints, a run, a Hugging Face folder and a place for spools; and, outside, what nobody is to touch."""
    one = Trainee(run=base / "job")
    for step in (1, 2):
        one.train()
        lowtide.save(base / "run" / f"step-{step}", one.model, extra={"step": step}).wait()
    for name in ("events.jsonl", "metrics.jsonl"):
        (base / "job" / name).write_text('{"step": 1, "loss": 2.5}\n')
    (base / "spool").mkdir()
    assert answer(["ckpt", "export", str(base / "run"), str(base / "hf")]) == 0
    (base / "hf" / "config.json").write_text("{}")
    outside = base / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "secret.txt").write_text(SECRET)
    (outside / "folder" / "secret.json").write_text(SECRET)
    (outside / "folder" / "lock").write_text(SECRET)
    shutil.copytree(base / "run" / "step-1", outside / "checkpoint")
    os.mkfifo(outside / "pipe")


def state_of(folder: Path) -> list[tuple[Any, ...]]:
    """All that can be known of what is in it, without reading what cannot be read."""
    rows: list[tuple[Any, ...]] = []
    for path in sorted([folder, *folder.rglob("*")]):
        facts = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        times = () if path.is_dir() else (facts.st_mtime_ns, facts.st_ctime_ns)
        rows.append((str(path), facts.st_ino, facts.st_mode, facts.st_nlink, facts.st_size, *times, data))
    return rows


def copies_in(folder: Path, outside: Path) -> Iterator[str]:
    """Files that have got what is outside."""
    for path in folder.rglob("*"):
        there = path.is_file() and not path.is_symlink() and outside not in path.parents
        if there and SECRET.encode() in path.read_bytes():
            yield str(path.relative_to(folder))


def one_case(template: Path, base: Path, entry: str, name: str, kind: str) -> str:
    """What was wrong; empty if all was well."""
    shutil.copytree(template, base, symlinks=True, ignore=lambda *_: ["outside"])
    outside = template / "outside"
    path = base / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    KINDS[kind](path, outside)
    before = state_of(outside)
    said = io.StringIO()

    def hangs(*_: object) -> None:
        raise TimeoutError("hangs")

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            ENTRIES[entry][0](base)
    except Error:
        pass
    except BaseException as error:  # whatever it is, it is what this test looks for
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    copied = [*copies_in(base, outside)]
    if state_of(outside) != before:
        return "something outside has changed"
    if copied or SECRET in said.getvalue() or re.search("Traceback", said.getvalue()):
        return f"copied {copied}, said {said.getvalue()}"
    kept = path / "inside" / "mine.txt"
    in_a_checkpoint = path.parent.name == "step-2"  # which is removed with all that is in it
    if kind == "a folder" and not kept.is_file() and not in_a_checkpoint:
        return "somebody's folder is gone"
    return ""


def cases(folder: Path, entry: str, every: bool) -> tuple[int, list[str]]:
    """Every kind at every name of one entry, or each at some of them: how many, and what was wrong."""
    torch.set_num_threads(1)
    prepare(folder / "template")
    wrong: list[str] = []
    names = ENTRIES[entry][1]
    product = list(itertools.product(names, KINDS))
    if not every:
        product = [(names[number % len(names)], kind) for number, kind in enumerate(KINDS)]
    for number, (name, kind) in enumerate(product):
        base = folder / f"case-{number}"
        problem = one_case(folder / "template", base, entry, name, kind)
        if problem:
            wrong.append(f"{name} is {kind}: {problem}")
        shutil.rmtree(base)
    return len(product), wrong


@pytest.mark.parametrize("entry", ENTRIES)
def test_odd_things(entry: str, quick_path: Path) -> None:
    count, wrong = apart(cases, quick_path, entry, False, seconds=500)
    assert count >= len(KINDS)
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("entry", ENTRIES)
def test_all_odd_things(entry: str, quick_path: Path) -> None:
    count, wrong = apart(cases, quick_path, entry, True, seconds=900)
    assert count == len(ENTRIES[entry][1]) * len(KINDS)
    assert not wrong, "\n".join(wrong)
