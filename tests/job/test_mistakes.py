"""Every option of every command, with every kind of wrong value: one line that names the option, exit code 2, before torch.

What an option takes is a word of ``WRONG``; a new option has to be given one, or the test of completeness fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import typer

from lowtide.cli.app import app

_NOWHERE = "/does/not/exist"
_ESCAPE = "\x1b]0;title\x07"

# What an option takes → values that are none. "{here}" is a folder, "{file}" a file in it, "{pipe}" a named pipe.
WRONG: dict[str, list[str]] = {
    "a whole number from 1": ["x", "1.5", "0", "-1", "", "1e3", "9" * 40 + "x", _ESCAPE],
    "a whole number from 0": ["x", "1.5", "-1", "", _ESCAPE],
    "a rate": ["x", "0", "-1", "nan", "inf", "", "1,5", _ESCAPE],
    "a size": ["lots", "1", "17", "0", "0GiB", "-4GiB", "4 GB!", "1GX", "1e9", "", "GiB", _ESCAPE],
    "a folder and its size": [
        *(
            _NOWHERE,
            f"{_NOWHERE}:4GiB",
            "{file}",
            "{pipe}",
            "{here}:10XB",
            "{here}:1",
            "{here}:0GiB",
            "{here}:-1GiB",
            "",
            _ESCAPE,
        ),
    ],
    "a folder or a size": [_NOWHERE, "{file}", "{pipe}", "{here}:10XB", "1", "", _ESCAPE],
    "a word": ["kepe", "AUTO", "", "x y", "--", _ESCAPE],
    "a number of sequences": ["many", "0", "-1", "1.5", "", _ESCAPE],
    "a text": [_NOWHERE, "{empty}", "{pipe}", "", _ESCAPE],
    "a function": ["nonsense", "package.module", ":function", "a b:c", "", _ESCAPE],
    "a run to go on from": [_NOWHERE, "{file}", "{here}", "{empty}", "", _ESCAPE],
    "a folder to make": ["{file}", "{file}/below", "{pipe}"],
    "a logger": ["wandb:x", "jsonl", "jsonl:", "", "csv:a", _ESCAPE],
    "a name": ["gpt-17", "", "GPT", _ESCAPE],
    "a machine": ["h100", "", f"{_NOWHERE}.json", "{here}", "{file}", _ESCAPE],
    "a count": ["many", "0", "-1", "1.5", "7.5X", "", _ESCAPE],
    "a cluster": ["nodes", "gpus=8", "nodes=0", "nodes=2,nodes=3", "nodes=2,color=red", "nodes=x", "", _ESCAPE],
    "a range": ["memory", "memory=4GiB", "memory=4..2GiB", "speed=1..2GiB", "memory=a..b", "memory=1..2XB", "", _ESCAPE],
    "a new file": [f"{_NOWHERE}/a", "{here}"],
    "sizes": ["1", "4GiB,x", "", "4GiB,,2GiB", _ESCAPE],
    "a Hugging Face folder": [_NOWHERE, "{file}", "{pipe}", "{empty}", "", _ESCAPE],
    "anything": [],  # any text is right
}

# command → what else it needs, and what each option takes. Switches take nothing.
COMMANDS: dict[str, tuple[list[str], dict[str, str]]] = {
    "train": (
        ["--synthetic"],
        {
            **dict.fromkeys(["--steps", "--ranks", "--threads", "--keep"], "a whole number from 1"),
            **dict.fromkeys(["--seed", "--save-every", "--restarts"], "a whole number from 0"),
            **dict.fromkeys(["--stage", "--activations", "--update", "--adapt", "--nonfinite"], "a word"),
            "--preset": "a name",
            "--model": "a function",
            "--data": "a text",
            "--batch": "a number of sequences",
            "--lr": "a rate",
            "--memory": "a size",
            "--disk": "a folder and its size",
            "--run": "a folder to make",
            "--resume": "a run to go on from",
            "--log": "a logger",
        },
    ),
    "demo": ([], {"--seconds": "a rate", "--data": "a text", "--run": "a folder to make"}),
    "doctor": ([], {}),
    "plan": (
        ["--preset", "gpt-17m"],
        {
            "--preset": "a name",
            "--model": "a function",
            "--arch": "a name",
            "--params": "a count",
            "--hardware": "a machine",
            **dict.fromkeys(["--world-size", "--sequence", "--accumulate"], "a whole number from 1"),
            "--cluster": "a cluster",
            "--memory": "a size",
            "--rank-memory": "sizes",
            "--device-memory": "a size",
            "--disk": "a folder or a size",
            "--batch": "a number of sequences",
            **dict.fromkeys(["--stage", "--precision", "--optimizer", "--activations", "--update", "--objective"], "a word"),
            "--what-if": "a range",
            **dict.fromkeys(["--svg", "--html", "--save"], "a new file"),
        },
    ),
    "report": (["{here}"], dict.fromkeys(["--out", "--svg", "--png", "--trace"], "anything")),
    "top": (["{here}"], {"--every": "a rate"}),
    "ckpt ls": ([], {}),
    "ckpt show": (["{run}/checkpoints"], {}),
    "ckpt verify": (["{run}/checkpoints"], {}),
    "ckpt export": (
        ["{run}/checkpoints", "new"],
        {"--dtype": "a word", "--shard-size": "a size", "--like": "a Hugging Face folder"},
    ),
    "ckpt import": (["{here}", "new"], {}),
    "ckpt diff": (["{run}/checkpoints", "{run}/checkpoints"], {}),
    "ckpt gc": (["{here}"], {"--keep": "a whole number from 1"}),
}
_ALONE = {"--preset", "--model", "--arch", "--params"}
"""Of a plan: these exclude each other, so that nothing else is given with them."""


@dataclass(frozen=True)
class Mistake:
    """A command line, and what its answer must name."""

    words: list[str]
    names: str


@dataclass(frozen=True)
class Answer:
    """What came back. ``code``: the text of an exception, if it was one."""

    code: int | str
    out: str
    err: str
    made: list[str]


def _mistakes() -> Iterator[Mistake]:
    for command, (needs, options) in COMMANDS.items():
        for option, takes in options.items():
            others = [] if option in _ALONE or (option == "--data" and command == "train") else needs
            for number, value in enumerate(WRONG[takes]):
                yield Mistake([*command.split(), *others, option, value], option)
                if not number:
                    yield Mistake([*command.split(), *others, f"{option}={value}"], option)
            yield Mistake([*command.split(), *needs, option], option)  # the value is missing
            yield Mistake([*command.split(), *needs, option[:-1] + "_", "1"], option[:-1] + "_")
        yield Mistake([*command.split(), *needs, "--no-such-option"], "--no-such-option")
        yield Mistake([*command.split(), *needs, *["surplus"] * 3], "" if command == "doctor" else "surplus")
        for number in range(len(needs)):
            if needs[number] == "new":  # something is there already
                for value in ("{file}", "{pipe}", "{run}"):
                    yield Mistake([*command.split(), *needs[:number], value], "")
            if needs[number] in ("{here}", "{run}/checkpoints"):  # a folder that is not there, a file, a pipe
                no_checkpoint = ["{empty}", "{run}"] if needs[number] != "{here}" else []
                for value in (_NOWHERE, "{file}", "{pipe}", "", _ESCAPE, *no_checkpoint):
                    if (command, value) not in ACCEPTED:
                        yield Mistake([*command.split(), *needs[:number], value, *needs[number + 1 :]], "")
    for value in (_NOWHERE, "{file}", "{pipe}", "", _ESCAPE):
        yield Mistake(["doctor", value], "")
        yield Mistake(["ckpt", "ls", value], "")
    yield Mistake(["trian"], "train")
    yield Mistake(["ckpt", "verfy"], "verify")
    yield Mistake(["train", "--synthetic", "--restarts", "1"], "--restarts")
    yield Mistake(["train", "--synthetic", "--preset", "gpt-17m", "--model", "a:b"], "--model")
    yield Mistake(["train", "--update", "backward"], "--update")
    yield Mistake(["train", "--synthetic", "--activations", "disk"], "--disk")
    yield Mistake(["plan"], "--preset")
    yield Mistake(["plan", "--preset", "gpt-17m", "--params", "1e9"], "--params")
    yield Mistake(["doctor", "--clean"], "--clean")


ACCEPTED = {("ckpt import", "{file}")}
"""Judged by what is in it, which needs torch."""

_ASK = """
import io, json, os, signal, sys
from contextlib import redirect_stderr, redirect_stdout
import typer
from lowtide.cli import app as commands
from lowtide.cli.main import run

commands.app = typer.main.get_command(commands.app)  # made once: typer would make it again for every line

class Refused(BaseException):
    pass

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise Refused("torch was asked for")

def late(number, frame):
    raise Refused("it waits for something")

sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGALRM, late)
answers = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    before = set(os.listdir("."))
    signal.alarm(20)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = run(words)
    except BaseException as error:
        code = repr(error)
    signal.alarm(0)
    answers.append({"code": code, "out": out.getvalue(), "err": err.getvalue(), "made": sorted(set(os.listdir(".")) - before)})
json.dump(answers, sys.stdout)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Mistake, Answer]]:
    """All of them, asked in one process in which torch cannot be imported."""
    here = tmp_path_factory.mktemp("mistakes")
    (here / "work" / "empty").mkdir(parents=True)
    (here / "work" / "file").write_text("text")
    checkpoint = here / "work" / "run" / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")  # one to be seen; what it is worth takes torch
    os.mkfifo(here / "work" / "pipe")
    places = {name: str(here / "work" / name) for name in ("empty", "file", "pipe", "run")} | {"here": str(here / "work")}
    mistakes = [Mistake([word.format(**places) if "{" in word else word for word in m.words], m.names) for m in _mistakes()]
    done = subprocess.run(
        [sys.executable, "-c", _ASK],
        input=json.dumps([m.words for m in mistakes]),
        capture_output=True,
        text=True,
        cwd=here / "work",
        timeout=120,
        check=True,
    )
    return list(zip(mistakes, (Answer(**answer) for answer in json.loads(done.stdout)), strict=True))


def test_every_option_has_its_mistakes() -> None:
    found: dict[str, set[str]] = {}

    def walk(command: Any, name: str) -> None:
        for sub, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{name} {sub}".strip())
        if not hasattr(command, "commands"):
            takes_value = [p for p in command.params if p.opts[0].startswith("--") and not p.is_flag]
            found[name] = {p.opts[0] for p in takes_value}

    walk(typer.main.get_command(app), "")
    assert found == {name: set(options) for name, (_, options) in COMMANDS.items()}


def _is_quoted(mistake: Mistake, said: str) -> bool:
    """Whether a message of ours repeats the value of the option as it was typed, or the part of it that is wrong."""
    if not said.startswith("lowtide: --"):
        return True  # typer's own
    option, equals, value = mistake.words[-1].partition("=") if mistake.names else ("", "", "")
    if not equals or option != mistake.names:
        value = mistake.words[-1] if mistake.words[-2:-1] == [mistake.names] else ""
    if mistake.words[-1] in ("1", "1e9"):
        return True  # right by itself; the mistake is that something else is given, or missing
    parts = [value, *value.split(":"), *value.split(",")]
    return not value or "\x1b" in value or any(part and part in said for part in parts)


def test_a_mistake_is_one_line_that_names_it_before_torch_is_imported(answers: list[tuple[Mistake, Answer]]) -> None:
    wrong: list[str] = []
    for mistake, answer in answers:
        line = f"lowtide {' '.join(map(repr, mistake.words))}: {asdict(answer)}"
        one = answer.err.startswith("lowtide: ") and answer.err.count("\n") == 1 and answer.out == ""
        if answer.code != 2 or not one or mistake.names not in answer.err or answer.made:
            wrong.append(line)
        elif not _is_quoted(mistake, answer.err):
            wrong.append(f"not what was typed: {line}")
        elif "\x1b" in answer.err or "Traceback" in answer.err:
            wrong.append(f"what a terminal acts on: {line}")
    assert not wrong, f"{len(wrong)} of {len(answers)}:\n" + "\n".join(wrong)
