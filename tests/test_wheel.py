"""The built wheel installs and imports in an environment that has the dependencies and no source tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel in it; the dependencies are those of the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    inside = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", inside, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    site = Path(run(inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # a line in a .pth adds the folder, but not the .pth files in it, so an editable install of lowtide does not come along
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return inside


def test_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {f"lowtide/{path.relative_to(ROOT / 'src' / 'lowtide').as_posix()}" for path in (ROOT / "src").rglob("*.py")}
    inside = {name for name in names if name.startswith("lowtide/")}
    assert sources | {"lowtide/py.typed"} <= inside
    assets = {f"lowtide/reporting/assets/{path.name}" for path in (ROOT / "src/lowtide/reporting/assets").iterdir()}
    assert assets
    assert assets <= inside
    assert not [name for name in names if "test" in name or "__pycache__" in name]
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_imports_and_shards(python: Path, tmp_path: Path) -> None:
    program = (
        "import json, torch, lowtide\n"
        "model = torch.nn.Linear(4, 2)\n"
        "model, optimizer = lowtide.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=0)\n"
        "model(torch.ones(1, 4)).sum().backward(); optimizer.step()\n"
        "print(json.dumps({'file': lowtide.__file__, 'version': lowtide.__version__}))\n"
    )
    answer = json.loads(run(python, "-c", program, cwd=tmp_path).splitlines()[-1])
    assert Path(answer["file"]).is_relative_to(python.parent.parent)
    assert answer["version"] == "0.1.0.dev0"


def test_command_line(python: Path, tmp_path: Path) -> None:
    assert "train" in run(python.parent / "lowtide", "--help", cwd=tmp_path)
