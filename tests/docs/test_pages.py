"""Every command and every snippet in README, docs/, CONTRIBUTING and the examples is run, or is listed with its reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

import lowtide
from lowtide.cli.app import app
from tests.docs.printed import (
    BLOCKS_RUN_ELSEWHERE,
    EXAMPLES,
    NO_COMMANDS,
    NOT_RUN,
    PAGES,
    ROOT,
    RULES,
    RUN_ELSEWHERE,
    Snippet,
    excluded,
    ranks_of,
    snippets,
    to_run,
    unlabelled,
)
from tests.docs.running import on_a_rank, run_page
from tests.kit.dist import run_ranks

EVERYTHING = [snippet for page in (*PAGES, *EXAMPLES) for snippet in snippets(page)]
RUN_HERE = [page for page in PAGES if any(not excluded(snippet, quick=True) for snippet in snippets(page))]
ON_RANKS = [s for s in EVERYTHING if s.language == "python" and ranks_of(s) > 1]


@pytest.mark.parametrize("page", RUN_HERE)
def test_a_page_does_what_it_prints(page: str, tmp_path: Path) -> None:
    wrong = [outcome for outcome in run_page(page, tmp_path, quick=True) if outcome.wrong]
    assert not wrong, "\n\n".join(f"{outcome.where}: {outcome.what}\n{outcome.wrong}" for outcome in wrong)


@pytest.mark.parametrize("snippet", ON_RANKS, ids=str)
def test_python_for_several_ranks(snippet: Snippet, tmp_path: Path) -> None:
    run_ranks(ranks_of(snippet), on_a_rank, snippet, str(tmp_path))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in (*PAGES, *EXAMPLES) if any(s.language == "sh" for s in snippets(page))])
def test_commands_as_they_are_printed(page: str, tmp_path: Path) -> None:
    """In processes of their own, in their own size but for the number of steps."""
    wrong = [outcome for outcome in run_page(page, tmp_path, quick=False) if outcome.wrong]
    assert not wrong, "\n\n".join(f"{outcome.where}: {outcome.what}\n{outcome.wrong}" for outcome in wrong)


# -- nothing is left out by mistake ------------------------------------------------------------------------------------


def test_every_fence_says_what_is_in_it() -> None:
    assert unlabelled() == []


def test_every_rule_and_every_exception_is_still_needed() -> None:
    """A line that nothing matches any more, or that says another test runs it which does not know the page, is gone."""
    commands = [snippet for snippet in EVERYTHING if snippet.language == "sh"]
    for pattern in (*NOT_RUN, *RUN_ELSEWHERE):
        assert any(re.search(pattern, command.text) for command in commands), pattern
    for rule in RULES:
        without = tuple(other for other in RULES if other is not rule)
        assert any(to_run(c, quick=True) != to_run(c, quick=True, rules=without) for c in commands), rule
    for key, file in BLOCKS_RUN_ELSEWHERE.items():
        assert Path(key.partition(":")[0]).name in (ROOT / file).read_text()
        assert any(excluded(snippet, quick=True) == file for snippet in EVERYTHING), key
    for command in commands:
        if excluded(command, quick=True) in RUN_ELSEWHERE.values():
            script = re.search(r"examples/\w+\.py", command.text)
            assert script, command
            assert script[0] in (ROOT / "tests/examples/test_examples.py").read_text(), command


# -- what stands between words -----------------------------------------------------------------------------------------

_WORDS = re.compile(r"`([^`\n]+)`")


def _commands() -> dict[str, set[str]]:
    """Each command of ``lowtide`` and its options."""
    found: dict[str, set[str]] = {}

    def walk(command: Any, name: str) -> None:
        found[name] = {word for option in command.params for word in option.opts} | {"--help", "-h"}
        for sub, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{name} {sub}".strip())

    walk(typer.main.get_command(app), "")
    return found


def _unknown_words(text: str, commands: dict[str, set[str]]) -> list[str]:
    """Options of a command line, or the command, that do not exist."""
    words = text.split(" ")[1:]
    name = next((n for n in (" ".join(words[:2]), words[0]) if n in commands), None) if words else ""
    if name is None:
        return [words[0]]
    return [word for word in words if word.startswith("-") and word.split("=")[0] not in commands[name]]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_names_between_words_exist(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    known = _commands()
    printed = [word for word in _WORDS.findall(text) if re.match(r"lowtide [a-z-]", word)]
    printed = [word for word in printed if not any(re.search(pattern, word) for pattern in NO_COMMANDS)]
    assert {word: wrong for word in printed if (wrong := _unknown_words(word, known))} == {}
    names = set(re.findall(r"`(?:with )?lowtide\.(\w+)", text))
    packages = {path.stem for path in (ROOT / "src/lowtide").iterdir()}
    assert {name for name in names if name not in packages and not hasattr(lowtide, name)} == set()
