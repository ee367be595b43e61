"""Rules about src/lowtide that a linter does not know: who may write what, what is never used, sizes, the map."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import check_budget, check_map

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "lowtide"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}

# what is looked for → (pattern, files or folders where it may stand, why)
RULES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "stage numbers": (
        r"(stage\.number|\bstage)\s*(==|!=|<=|>=|<|>|in\b)\s*[\d([{]",
        ("stages.py", "config.py"),
        "stages are a table",
    ),
    "pickle": (r"\bpickle\b|\bmarshal\b|\bshelve\b", (), "bytes from outside must not run code"),
    "torch.load": (r"torch\.(load|save)\(", (), "they use pickle"),
    "object collectives": (r"_object(_list)?\(", (), "they use pickle"),
    "swallowed errors": (r"except( Exception| BaseException)?( as \w+)?:\s*\n\s*pass\b", (), "an error names its cause"),
    "environment": (
        r"os\.environ|os\.getenv",
        ("comm/group.py", "comm/links.py", "spec/probe_cache.py", "job/", "cli/"),
        "options are arguments",
    ),
    "shell": (r"shell\s*=\s*True|os\.system\(", (), "arguments are not shell text"),
}


@pytest.mark.parametrize("rule", RULES)
def test_stands_only_where_it_may(rule: str) -> None:
    pattern, allowed, why = RULES[rule]
    hits = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0].strip()}"
        for name, text in SOURCES.items()
        if not name.startswith(allowed)
        for match in re.finditer(pattern, text)
    ]
    assert not hits, f"{rule} ({why}):\n" + "\n".join(hits)


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("stage numbers", "if config.stage.number == 3:"),
        ("stage numbers", "if stage in (2, 3):"),
        ("stage numbers", "return stage >= 2"),
        ("pickle", "import pickle"),
        ("torch.load", "torch.load(path)"),
        ("object collectives", "dist.all_gather_object(out, x)"),
        ("swallowed errors", "except Exception:\n        pass"),
        ("shell", "run(x, shell=True)"),
    ],
)
def test_the_rule_finds_what_it_forbids(rule: str, line: str) -> None:
    assert re.search(RULES[rule][0], line)


def _nodes(kind: type[ast.AST]) -> list[tuple[str, ast.AST]]:
    return [(name, node) for name, text in SOURCES.items() for node in ast.walk(ast.parse(text)) if isinstance(node, kind)]


def _assigned_data(text: str) -> list[int]:
    """Lines that assign to an attribute ``data``, in any form of assignment."""
    found: list[int] = []
    for node in ast.walk(ast.parse(text)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        flat = [item for target in targets for item in (target.elts if isinstance(target, ast.Tuple) else [target])]
        found += [target.lineno for target in flat if isinstance(target, ast.Attribute) and target.attr == "data"]
    return found


def test_only_residency_makes_a_parameter_whole_or_not() -> None:
    hits = [
        f"{name}:{line}" for name, text in SOURCES.items() if name != "runtime/residency.py" for line in _assigned_data(text)
    ]
    assert not hits
    assert _assigned_data("p.data = x\np.data += 1\na, p.data = 1, x\np.data: int = 1\nq = p.data") == [1, 2, 3, 4]


def test_no_assert_in_the_library() -> None:
    assert not [f"{name}:{node.lineno}" for name, node in _nodes(ast.Assert)]


def test_prints_only_on_the_command_line() -> None:
    hits = [
        f"{name}:{node.lineno}"
        for name, node in _nodes(ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id == "print" and not name.startswith("cli/")
    ]
    assert not hits


def test_stage_numbers_are_compared_nowhere() -> None:
    """``stage.number`` may be shown, never decide."""
    hits = [
        f"{name}:{node.lineno}"
        for name, node in _nodes(ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Attribute) and side.attr == "number" and "stage" in ast.unparse(side.value).lower()
    ]
    assert not hits


def test_parameters_and_imports() -> None:
    assert check_budget.problems(PACKAGE) == []


def test_the_budget_tool_finds_what_it_should() -> None:
    assert any("9 parameters" in p for p in check_budget.parameter_problems("a.py", "def f(a, b, c, d, e, f, g, h, i): ..."))
    assert not list(check_budget.parameter_problems("a.py", "class A:\n    def f(self, a, b, c, d, e, f, g, h): ..."))
    layers = {"spec", "runtime", "api"}
    for upward in ("from lowtide.runtime.engine import Engine", "import lowtide.runtime.engine", "from lowtide import shard"):
        assert list(check_budget.import_problems("spec/units.py", upward, layers)), upward
    assert not list(check_budget.import_problems("runtime/engine.py", "from lowtide.spec.units import find_units", layers))


def test_the_map_is_true() -> None:
    page = ROOT / "ARCHITECTURE.md"
    assert check_map.map_problems(PACKAGE, page) + check_map.note_problems([page, *sorted(PACKAGE.rglob("*.py"))]) == []


def test_the_map_tool_finds_what_it_should(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "sub").mkdir(parents=True)
    (package / "sub" / "__init__.py").write_text('"""Nothing."""\n')
    (package / "new.py").write_text("# see [Note: missing]\n")
    page = tmp_path / "MAP.md"
    page.write_text("| `gone.py` | was here |\n| `sub/` | a folder |\n")
    assert check_map.map_problems(package, page) == ["MAP.md: no row for new.py", "MAP.md: gone.py does not exist"]
    assert check_map.note_problems([package / "new.py"]) == ["new.py:1: [Note: missing] is not defined anywhere"]


def test_dependencies_are_what_is_imported() -> None:
    """Whatever src imports is declared, and whatever is declared is imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=\[ ]", line)[0].replace("-", "_").lower() for line in requirements}

    required = names(project["dependencies"])
    optional = set[str]().union(*(names(project["optional-dependencies"][extra]) for extra in ("bpe", "hf", "bench")))
    imported = {
        name.split(".")[0]
        for _, node in _nodes(ast.Import) + _nodes(ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    foreign = {name for name in imported if name not in sys.stdlib_module_names and name != "lowtide"}
    assert foreign <= required | optional, "imported but not declared"
    assert required - foreign <= {"numpy"}, "declared but not imported (numpy: torch warns when it is missing)"


def test_the_compiler_is_not_imported_before_it_is_used() -> None:
    """torch's takes 70 MiB of every process, which count against a memory number."""
    program = "import sys, lowtide.api; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
