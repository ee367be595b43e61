"""The number of parameters of a function, and the direction of imports in src/lowtide.

The few functions that may have more parameters are listed with the reason. Length is not limited: an idea decides where a
file, a class or a function ends.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PARAMETERS = 8

MANY_PARAMETERS = {
    "api.py:shard": "the public call: one keyword per choice a user may make",
    "api.py:plan": "the public call, as shard: one keyword per choice a user may make",
    "saving.py:save": "the public call, as shard: one keyword per choice a user may make",
    "config.py:build_config": "takes what shard takes, and is the only place that checks it",
    "cli/train.py:train": "the command line: one parameter per flag",
    "cli/plan.py:plan": "the command line: one parameter per flag",
}

# From the bottom up. A module imports from its own layer and from the layers below it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("version", "torch_internals", "errors", "stages", "files"),
    ("launchers", "wrapped"),
    ("config",),
    ("spec",),
    ("planning",),
    ("tiers",),
    ("comm",),
    ("runtime",),
    ("deferral",),
    ("checkpoint",),
    ("reporting",),
    ("api", "saving"),
    ("__init__",),  # what `import lowtide` shows: only the layers above it may use it
    ("integrations",),
    ("job",),
    ("cli", "__main__"),
)
_LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def parameter_problems(name: str, text: str) -> Iterator[str]:
    """Functions of one file that take too many parameters."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        spec = node.args
        count = len(spec.posonlyargs + spec.args + spec.kwonlyargs) - (bool(spec.args) and spec.args[0].arg in ("self", "cls"))
        if count > PARAMETERS and f"{name}:{node.name}" not in MANY_PARAMETERS:
            yield f"{name}:{node.lineno} {node.name}: {count} parameters, at most {PARAMETERS}"


def _imported(node: ast.AST, layers: set[str]) -> list[str]:
    """The layers of lowtide that one import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "lowtide" else [node.module]
    else:
        return []
    parts = [name.split(".") for name in names if name.split(".")[0] == "lowtide"]
    return [part[1] if len(part) > 1 and part[1] in layers else "__init__" for part in parts]


def import_problems(name: str, text: str, layers: set[str]) -> Iterator[str]:
    """Imports that point upward, and relative ones, whose layer is not written out."""
    own = name.split("/")[0].removesuffix(".py")
    if own not in _LEVEL:
        yield f"{name}: {own} has no place in LAYERS (tools/check_budget.py)"
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{name}:{node.lineno} relative import; write the full name"
        for layer in _imported(node, layers):
            if _LEVEL.get(layer, -1) > _LEVEL[own]:
                yield f"{name}:{getattr(node, 'lineno', 0)} {own} imports {layer}, which stands above it"


def problems(package: Path) -> list[str]:
    layers = {path.stem if path.suffix == ".py" else path.name for path in package.iterdir()}
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        name, text = path.relative_to(package).as_posix(), path.read_text()
        found += parameter_problems(name, text)
        found += import_problems(name, text, layers)
    return found


def main() -> int:
    found = problems(Path(__file__).resolve().parent.parent / "src" / "lowtide")
    print("\n".join(found) or "parameters within their limit, imports point downward")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
