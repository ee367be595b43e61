"""What README, docs/ and the docstrings of examples print for people to run, and what is changed before a test does.

A fence says what is in it: ``python``, ``sh``, or ``text`` for what is shown and not run. Commands and Python run in the order
in which a page prints them, in one folder, so that a page may use what its own earlier lines have made.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")))
EXAMPLES = tuple(sorted(f"examples/{script.name}" for script in (ROOT / "examples").glob("*.py")))

_FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
_LANGUAGES = ("python", "sh", "text")
_EXIT_CODE = re.compile(r"# exit code (\d)")


@dataclass(frozen=True)
class Snippet:
    """Python, or one command line, and where it is printed."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def exit_code(self) -> int:
        """What the comment behind a command says, or 0."""
        said = _EXIT_CODE.search(self.text)
        return int(said[1]) if said else 0


def fences(page: str) -> list[Snippet]:
    """All fenced blocks of a page, whatever they are."""
    text = (ROOT / page).read_text()
    return [Snippet(page, text.count("\n", 0, found.start()) + 2, found[1], found[2]) for found in _FENCE.finditer(text)]


def unlabelled() -> list[str]:
    """Fences that do not say what they are: a test would have to guess."""
    return [f"{block}: {block.language!r}" for page in PAGES for block in fences(page) if block.language not in _LANGUAGES]


def snippets(page: str) -> list[Snippet]:
    """Everything that a page prints for people to run, in its order."""
    if page.endswith(".py"):
        return _commands(Snippet(page, 1, "sh", ast.get_docstring(ast.parse((ROOT / page).read_text())) or ""), indent=4)
    found: list[Snippet] = []
    for block in fences(page):
        found += [block] if block.language == "python" else _commands(block, indent=0) if block.language == "sh" else []
    return found


def ranks_of(snippet: Snippet) -> int:
    """How many ranks a block of Python needs."""
    return 4 if "(2, 2)" in snippet.text else 2 if "model.join()" in snippet.text else 1


def _commands(block: Snippet, *, indent: int) -> list[Snippet]:
    lines = [(number, line) for number, line in enumerate(block.text.splitlines(), block.line) if line.strip()]
    indented = [(number, line.strip()) for number, line in lines if len(line) - len(line.lstrip()) == indent]
    return [Snippet(block.page, number, "sh", line) for number, line in indented if not line.startswith("#")]


# -- what is not run, and what is run smaller --------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """``pattern`` in a command becomes ``replacement``. ``quick``: in `make test` only; `make soak` runs what is printed."""

    pattern: str
    replacement: str
    because: str
    quick: bool = True


NOT_RUN = {
    r"^git clone ": "the repository is here already",
    r"^make (run|test)\b": "this is `make test`; `make run` is the story of tests/job/test_story.py",
    r"^source ": "a test has its own environment",
    r"^pip install ": "nothing is installed by a test",
}
"""Commands that no test runs → why."""
RUN_ELSEWHERE = {
    r"^(python|torchrun --nproc-per-node 2) examples/": "tests/examples/test_examples.py",
}
"""Commands that `make test` runs in another file, smaller; `make soak` runs them here, as they are printed."""
BLOCKS_RUN_ELSEWHERE = {
    "docs/formulas.md": "tests/unit/test_formulas.py",  # every line with what it is
    "docs/checkpoints.md:def read(": "tests/checkpoint/test_document.py",  # on checkpoints of every kind
}
"""Python of a page, or with this text → the file that runs it."""

NO_COMMANDS = {
    r"^lowtide checkpoint$": "the name of the format",
    r"^lowtide (forward|backward|recompute|update)\b": "ranges of a profile",
}
"""What looks like a command between words and is none → what it is."""

_TINY = "--model tests.job.specimens:tiny_gpt"
_PROCESSES = "starting processes takes seconds"
_SMALLER = "the sizes that the smaller model is between"
RULES = (
    Rule(r"^((torchrun .* )?lowtide train .*)$", r"\1 --steps 2", "200 steps take minutes", quick=False),
    Rule(r"--model package\.module:function", _TINY, "it stands for a model of the reader's", quick=False),
    Rule(r"^lowtide top", "lowtide top --once", "it ends with the run, which a test's own process may be", quick=False),
    Rule(r"^torchrun --nproc-per-node \d( --max-restarts \d)? -m -- ", "", _PROCESSES),
    Rule(r"--ranks \d( --stage \d)?", "", _PROCESSES),
    Rule(r"--restarts \d", "", _PROCESSES),
    Rule(r"^(lowtide train )(?!.*--model)(.*?)(--preset \S+)?", rf"\1{_TINY} \2", "17 or 98 M parameters take seconds"),
    Rule(r"^(lowtide train )(?!.*--(data|synthetic))", r"\1--data docs ", "so does cutting Python's library into tokens"),
    Rule(r"^(lowtide plan .*)gpt-(98|705)m", r"\1gpt-17m", "a large model is looked at for seconds"),
    Rule(r"^(lowtide plan .*gpt-17m --memory) 2GiB$", r"\1 200MiB", "the smaller model does not fit into that"),
    Rule(r"--what-if memory=\S+", "--what-if memory=0.4..1GiB", _SMALLER),
    Rule(r"--rank-memory \S+", "--rank-memory 0.8GiB,0.53GiB", _SMALLER),
    Rule(r"^lowtide doctor(?! --clean| --quick)", "lowtide doctor --quick", "it measures for half a minute"),
)


def excluded(snippet: Snippet, *, quick: bool) -> str | None:
    """Why a snippet is not run here, or ``None``."""
    if snippet.language == "python":
        keys = ((*key.partition(":"), where) for key, where in BLOCKS_RUN_ELSEWHERE.items())
        return next((where for page, _, part, where in keys if page == snippet.page and part in snippet.text), None)
    reasons = {**NOT_RUN, **(RUN_ELSEWHERE if quick else {})}
    return next((why for pattern, why in reasons.items() if re.search(pattern, snippet.text)), None)


def to_run(snippet: Snippet, *, quick: bool, rules: Sequence[Rule] = RULES) -> str:
    """The command, without its comment, after all rules that hold."""
    command = re.sub(r"\s+#.*", "", snippet.text).strip()
    for rule in rules:
        if quick or not rule.quick:
            command = re.sub(rule.pattern, rule.replacement, command)
    return command
