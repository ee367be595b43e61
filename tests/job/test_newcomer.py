"""What a newcomer meets in the first hour: interrupts while it starts, a full disk, models that are almost right, remarks."""

from __future__ import annotations

import errno
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.cli.main import run
from lowtide.errors import ArgumentError
from lowtide.job import run_folder, story
from lowtide.job.options import Options, cores, remarks
from lowtide.job.run_folder import RunFolder, refuse_unusable_run
from lowtide.job.words import in_flags

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ["train", "--synthetic", "--steps", "2", "--threads", "1", "--model", "tests.job.specimens:tiny_gpt"]

# -- Ctrl-C ---------------------------------------------------------------------------------------------------------------

_INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner's child may have been told to ignore it
sys.meta_path.insert(0, Finder())
from lowtide.cli.main import run

sys.exit(run(sys.argv[2:]))
"""
_MOMENTS = [
    *(("lowtide.cli.app", TRAIN), ("pydantic", ["plan", "--params", "1e9"]), ("numpy", TRAIN), ("torch._tensor", TRAIN)),
    *(("torch.optim", ["ckpt", "ls"]), ("lowtide.runtime.engine", TRAIN), ("torch.fx", ["doctor", "--clean", "."])),
]


@pytest.mark.parametrize(("module", "words"), _MOMENTS, ids=[module for module, _ in _MOMENTS])
def test_ctrl_c_in_the_middle_of_an_import_ends_without_a_word(module: str, words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", _INTERRUPTED, module, *words]
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=surroundings, timeout=120, check=False)
    assert done.returncode in (-signal.SIGINT, 130)
    assert (done.stdout, done.stderr) == ("", "")


# -- folders --------------------------------------------------------------------------------------------------------------


def test_a_try_that_found_the_disk_full_is_not_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of the first try is gone with it: the second one meets the full disk again, and the third one goes on."""
    monkeypatch.setattr(run_folder, "_PATIENCE", 0.0)
    opened = os.listdir("/proc/self/fd")
    with monkeypatch.context() as full:

        def pwrite(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(os, "pwrite", pwrite)
        for _ in range(2):
            with pytest.raises(ArgumentError, match="No space left"):
                RunFolder(tmp_path / "run")
            refuse_unusable_run(str(tmp_path / "run"))
    assert os.listdir("/proc/self/fd") == opened
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(run_folder.RunInUse, match=f"process {os.getpid()}"):
        refuse_unusable_run(str(tmp_path / "run"))
    folder.close()
    refuse_unusable_run(str(tmp_path / "run"))


def test_strangers_files_are_told_of_and_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "holds other files (notes.txt)" in " ".join(remarks(Options(run=str(tmp_path))))
    (tmp_path / "metrics.jsonl").write_text("mine, too")
    assert run([*TRAIN, "--run", str(tmp_path)]) == 2
    assert "holds a metrics.jsonl that no run has written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "notes.txt"]
    assert (tmp_path / "metrics.jsonl").read_text() == "mine, too"


# -- numbers that are allowed, and probably mistakes ----------------------------------------------------------------------


def test_remarks() -> None:
    assert remarks(Options()) == []
    (said,) = remarks(Options(threads=64 * cores()))
    assert f"--threads {64 * cores()} asks for" in said
    (said,) = remarks(Options(lr=1e3))
    assert "--lr is 1000" in said


# -- models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("knows_few_tokens", "its embeddings have 100 and 256 rows, but it would get tokens up to 8191"),
        ("looks_at_few_places", "Set model.vocab_size and model.context"),
        ("without_targets", "cannot be called with (tokens, targets)"),
        ("returns_logits", "the model returned Tensor. A model for --model has forward(tokens, targets) -> mean loss"),
    ],
)
def test_a_model_that_is_almost_right_is_told_what_it_must_be(
    model: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*TRAIN[:-1], f"tests.job.specimens:{model}"]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert "Traceback" not in err


# -- words ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_the_library", "of_the_command_line"),
    [
        (
            "Give disk='/a/folder', or raise memory to at least 5 MiB",
            "Give --disk /a/folder, or raise --memory to at least 5 MiB",
        ),
        ("memory is '1GX'; write a unit", "--memory is '1GX'; write a unit"),
        ("deferred(disk='/proc'): no file can be made there", "--disk /proc: no file can be made there"),
        ("call `shard(disk='/a')` for it", "call `shard(disk='/a')` for it"),
        ("--what-if is 'memory=4GiB'; write memory=2..16GiB", "--what-if is 'memory=4GiB'; write memory=2..16GiB"),
    ],
)
def test_words_of_the_library_become_flags_and_what_was_typed_stays(of_the_library: str, of_the_command_line: str) -> None:
    assert in_flags(of_the_library) == of_the_command_line


def test_the_story_names_commands_as_this_shell_finds_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = story.command_name()
    assert command.endswith("/lowtide")
    found = tmp_path / "lowtide"
    found.touch(mode=0o755)
    assert story.command_name() == "lowtide"


@pytest.mark.parametrize(("script", "package"), [("hf_finetune", "transformers"), ("image_five_nodes", "sklearn")])
def test_an_example_without_its_package_says_how_to_get_it(script: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match="pip install -c constraints"):
        runpy.run_path(str(ROOT / "examples" / f"{script}.py"))
