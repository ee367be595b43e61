"""The command line answers at once, and a mistake is one helpful line and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lowtide
from lowtide.cli.main import run
from lowtide.config import UPDATES, Update

MISTAKES = {
    "train --stpes 3": "--steps",
    "trian": "'train'",
    "train --steps x": "--steps",
    "train --steps 0": "--steps is 0; give a whole number >= 1",
    "train --steps": "--steps",
    "train --batch -1": "--batch is -1",
    "train --preset gpt-17": "Did you mean 'gpt-17m'?",
    "train --stage 4": "0 (nothing sharded)",
    "train --stage three": "0 (nothing sharded)",
    "train --ranks 0": "--ranks is 0",
    "train --ranks 100000": "at most",
    "train --threads 0": "--threads is 0",
    "train --lr nan": "learning rate > 0",
    "train --lr -1": "learning rate > 0",
    "train --seed -5": "--seed",
    "train --data /does/not/exist": "does not exist",
    "train --data x --synthetic": "choose one",
    "train --model nonsense": "package.module:function",
    "train --model tests.job.specimens:tiny_gpt --preset gpt-17m": "choose one",
    "train --memory lots": "--memory is 'lots'; write a number and a unit",
    "train --memory 0": "--memory is '0'; give more than 0 bytes",
    "train --disk /does/not/exist": "'/does/not/exist', which is not a folder",
    "train --disk /does/not/exist:4GiB": "'/does/not/exist', which is not a folder",
    "train --activations kept": "Did you mean 'keep'?",
    "train --adapt placment": "Did you mean 'placement'?",
    "train --activations disk": "give --disk DIR",
    "train --update sometimes": "allowed: step, backward",
    "train --update backward": "clips all gradients after backward",
    "train --nonfinite ignore": "allowed: skip, raise",
    "train --keep 0": "--keep is 0",
    "train --save-every -1": "--save-every is -1",
    "train --synthetic --save-every 5": "give --run FOLDER",
    "train --synthetic --restarts 5": "give --run FOLDER",
    "train --resume /does/not/exist": "--resume is '/does/not/exist', which is no folder",
    "doctor --clean": "name the folders",
    "doctor /does/not/exist": "'/does/not/exist' is not a folder",
    "train surplus": "surplus",
    "demo --seconds 0": "--seconds",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_helpful_line(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("lowtide: ")
    assert MISTAKES[line] in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no.such.package:function", "cannot import"),
        ("tests.job.specimens:no_such_function", "has no function"),
        ("tests.job.specimens:returns_no_module", "not an nn.Module"),
    ],
)
def test_a_model_that_cannot_be_built_is_one_line(model: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--synthetic", "--steps", "1", "--model", model]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_run_folder_is_used_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert run(["train", "--run", str(tmp_path)]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_under_another_launcher_ranks_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run(["train", "--synthetic", "--ranks", "2"]) == 2
    assert "leave --ranks out" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"lowtide {lowtide.__version__}\n"


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--help"]) == 0
    out = capsys.readouterr().out
    flags = (
        "preset model data steps batch lr stage ranks threads seed run synthetic json memory disk activations update "
        "save-every keep resume background-saves restarts nonfinite"
    ).split()
    assert [flag for flag in flags if f"--{flag}" not in out] == []


def test_every_word_for_the_update_is_one_that_it_takes() -> None:
    assert [Update(word).when for word in UPDATES] == list(UPDATES)


def test_help_does_not_import_torch() -> None:
    code = "import sys; from lowtide.cli.main import run; run(['--help']); sys.stderr.write(str('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "False"
