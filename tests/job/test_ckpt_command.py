"""``lowtide ckpt``: every command for a person and for a program, its exit codes, and its mistakes as one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import lowtide
from lowtide.checkpoint.folder import new_name
from lowtide.cli.main import run
from tests.checkpoint.exchange import Job, assert_same_bits
from tests.kit.checkpoints import Setup
from tests.kit.models_hf import HUGGING_FACE

Out = pytest.CaptureFixture[str]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Two checkpoints of a model on disk in ``run``."""
    made = Job(tmp_path, "gpt2")
    for _ in range(2):
        made.train()
        made.save(extra={"epoch": made.steps})
    return made


@pytest.fixture
def folder(job: Job) -> Path:
    return job.folder / "run"


def answer(capsys: Out, *arguments: object, code: int | None = 0) -> dict[str, Any]:
    """The one line of JSON. ``code``: how the command must end, ``None`` for any way."""
    capsys.readouterr()
    assert run(["ckpt", *map(str, arguments), "--json"]) == code or code is None
    out, err = capsys.readouterr()
    assert err == ""
    (line,) = out.splitlines()
    return json.loads(line)


def text(capsys: Out, *arguments: object, code: int = 0) -> str:
    capsys.readouterr()
    assert run(["ckpt", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def damage(checkpoint: Path) -> None:
    payload = checkpoint / "rank-00000.safetensors"
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)


def test_ls(folder: Path, capsys: Out) -> None:
    found = answer(capsys, "ls", folder)
    assert [(row["name"], row["step"], row["world_size"], row["stage"]) for row in found["checkpoints"]] == [
        ("step-2", 2, 1, 3),
        ("step-1", 1, 1, 3),
    ]
    assert all(row["linked_bytes"] > 0 and row["copied_bytes"] > 0 for row in found["checkpoints"])
    assert (found["damaged"], found["leftovers"]) == ([], [])
    lines = text(capsys, "ls", folder).splitlines()
    assert lines[0].split()[:2] == ["name", "step"]
    assert [line.split()[0] for line in lines[1:]] == ["step-2", "step-1"]
    (folder / "step-2" / "manifest.json").write_text("{}")
    assert answer(capsys, "ls", folder)["damaged"][0]["path"].endswith("step-2")
    assert "damaged: step-2" in text(capsys, "ls", folder)


def test_ls_of_an_empty_folder(tmp_path: Path, capsys: Out) -> None:
    assert "no checkpoint" in text(capsys, "ls", tmp_path)
    assert answer(capsys, "ls", tmp_path)["checkpoints"] == []


def test_show(folder: Path, capsys: Out) -> None:
    found = answer(capsys, "show", folder)
    assert found["path"].endswith("step-2")
    assert (found["step"], found["optimizer"], found["extra"]) == (2, "AdamW", {"epoch": 2})
    assert found["tied"] == {"lm_head.weight": "transformer.wte.weight"}
    assert set(found["kinds"]) == {"parameters", "optimizer.exp_avg", "optimizer.exp_avg_sq"}
    assert "tensors" not in found
    row = answer(capsys, "show", folder / "step-1", "--tensors")["tensors"][0]
    assert row["name"] == "transformer.wte.weight"
    assert (row["shape"], row["dtype"]) == ([61, 24], "float32")
    out = text(capsys, "show", folder, "--tensors")
    for part in ("step                   2", '{"epoch": 2}', "transformer.wte.weight  (61, 24)  float32", "linked spool files"):
        assert part in out


def test_verify(folder: Path, capsys: Out) -> None:
    found = answer(capsys, "verify", folder)
    assert found["ok"]
    assert [Path(row["path"]).name for row in found["checkpoints"]] == ["step-2", "step-1"]
    assert text(capsys, "verify", folder).count("every byte is as it was written") == 2
    damage(folder / "step-2")
    found = answer(capsys, "verify", folder, code=1)
    assert [(Path(row["path"]).name, row["problem"] is None) for row in found["checkpoints"]] == [
        ("step-2", False),
        ("step-1", True),
    ]
    assert "step-2: DAMAGED" in text(capsys, "verify", folder / "step-2", code=1)
    assert answer(capsys, "verify", folder / "step-1")["ok"]
    (folder / "step-1" / "manifest.json").write_text("{}")
    assert not answer(capsys, "verify", folder, code=1)["ok"]


def _write_at(path: Path, at: int, data: bytes) -> None:
    """In place: a spool file is the live job's, too."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_verify_and_a_load_agree_on_every_byte(job: Job, folder: Path, capsys: Out) -> None:
    """Bytes all over the files are flipped, one at a time: verify says of what a load takes all the same, and of no more."""
    checkpoint = folder / "step-2"
    taken: dict[bool, int] = {True: 0, False: 0}
    for path in sorted(checkpoint.glob("rank-00000*")):
        whole = path.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little") if path.suffix == ".safetensors" else 0
        for at in {0, 20, header // 2, header, len(whole) // 2, len(whole) - 1}:
            _write_at(path, at, bytes([whole[at] ^ 1]))
            (row,) = answer(capsys, "verify", checkpoint, code=None)["checkpoints"]
            try:
                lowtide.load(checkpoint, job.model, job.optimizer)
                loaded = True
            except lowtide.Error:
                loaded = False
            said = row["problem"] is None or "goes on from it" in row["problem"]
            assert said == loaded, (path.name, at, row)
            taken[row["problem"] is not None and loaded] += 1
            _write_at(path, at, whole[at : at + 1])
    assert min(taken.values()) > 0, "neither a header that no load reads, nor a block, was hit"
    lowtide.load(checkpoint, job.model, job.optimizer)


def test_export_and_import(job: Job, folder: Path, tmp_path: Path, capsys: Out) -> None:
    expected = job.tensors()
    config: Any = HUGGING_FACE["gpt2"].build(0)
    config.config.save_pretrained(tmp_path / "config")
    options = ["--like", tmp_path / "config", "--shard-size", "10KB"]
    found = answer(capsys, "export", folder, tmp_path / "hf", *options)
    assert found["source"].endswith("step-2")
    assert "model.safetensors.index.json" in found["files"]
    assert "config.json" in found["files"]
    model: Any = type(config).from_pretrained(tmp_path / "hf")
    assert_same_bits(model.state_dict(), expected)
    assert "28 tensors" in text(capsys, "import", tmp_path / "hf", tmp_path / "imported" / "start")
    other = Job(tmp_path, "gpt2", Setup())
    lowtide.load(tmp_path / "imported", other.model)
    assert_same_bits(other.tensors(), expected)
    assert answer(capsys, "diff", "--model", folder, tmp_path / "imported")["identical"]


def test_export_to_another_dtype(folder: Path, tmp_path: Path, capsys: Out) -> None:
    text(capsys, "export", folder, tmp_path / "hf", "--dtype", "bf16")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert {str(t.dtype) for t in found.values()} == {"torch.bfloat16"}


def test_export_of_a_whole_checkpoint(folder: Path, tmp_path: Path, capsys: Out) -> None:
    found = answer(capsys, "export", "--checkpoint", folder / "step-1", tmp_path / "copy")
    assert found["files"] == ["rank-00000.json", "rank-00000.safetensors"]
    assert answer(capsys, "verify", tmp_path / "copy")["ok"]
    assert text(capsys, "diff", folder / "step-1", tmp_path / "copy").startswith("identical: every bit of ")


def test_diff(folder: Path, capsys: Out) -> None:
    found = answer(capsys, "diff", folder / "step-1", folder / "step-2", code=1)
    assert not found["identical"]
    row = next(r for r in found["differences"] if r["section"] == "parameters")
    assert row["what"] == "elements"
    assert 0 < row["different"] <= row["count"]
    assert row["largest"] > 0
    out = text(capsys, "diff", folder / "step-1", folder / "step-2", code=1)
    assert out.splitlines()[-1].startswith("different: ")
    assert answer(capsys, "diff", folder, folder / "step-2")["identical"]


def test_gc(folder: Path, capsys: Out) -> None:
    left = folder / new_name(folder / "step-3")
    left.mkdir()
    found = answer(capsys, "gc", folder, "--keep", 1, "--now", "--dry-run")
    assert (found["leftovers"], len(found["checkpoints"]), found["dry_run"]) == ([str(left)], 1, True)
    assert left.is_dir()
    assert "left alone: it was changed" in text(capsys, "gc", folder)
    out = text(capsys, "gc", folder, "--keep", 1, "--now")
    assert f"{left.name}: removed" in out
    assert "step-1: removed, there are enough newer ones" in out
    assert "a job still uses it" in out
    assert sorted(p.name for p in folder.iterdir()) == ["LATEST", "step-2"]


MISTAKES = {
    "ckpt ls nowhere": "'nowhere' is not a folder",
    "ckpt ls run/step-1": "give the folder around it",
    "ckpt show nowhere": "'nowhere' is not a folder",
    "ckpt show spool": "there is no checkpoint in 'spool'",
    "ckpt show": "CHECKPOINT",
    "ckpt shwo run": "'show'",
    "ckpt verify nowhere": "'nowhere' is not a folder",
    "ckpt export run run": "'run' is there already",
    "ckpt export run run/step-1": "is there already",
    "ckpt export run out --dtype int8": "allowed: fp32, fp16, bf16",
    "ckpt export run out --shard-size lots": "--shard-size is 'lots'",
    "ckpt export run out --like spool": "no config.json",
    "ckpt export run out --checkpoint --dtype bf16": "leave out --dtype",
    "ckpt import nowhere out": "'nowhere' does not exist",
    "ckpt import spool out": "neither",
    "ckpt import run/LATEST out": "not a .safetensors file",
    "ckpt diff run": "CHECKPOINT",
    "ckpt diff run nowhere": "'nowhere' is not a folder",
    "ckpt gc nowhere": "'nowhere' is not a folder",
    "ckpt gc run/step-1": "give the folder around it",
    "ckpt gc run --keep 0": "--keep is 0; at least 1 checkpoint stays",
    "ckpt gc run --keep x": "--keep",
}


def test_a_mistake_is_one_helpful_line(folder: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    before = sorted(folder.parent.rglob("*"))
    capsys.readouterr()
    for line, message in MISTAKES.items():
        code = run(line.split())
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1), (line, out, err)
        assert err.startswith("lowtide: "), line
        assert message in err, (line, err)
    assert sorted(folder.parent.rglob("*")) == before


def test_damage_is_one_line_too(folder: Path, tmp_path: Path, capsys: Out) -> None:
    (folder / "step-2" / "manifest.json").write_text("{}")
    for arguments in (["show", folder / "step-2"], ["export", folder / "step-2", tmp_path / "x"]):
        capsys.readouterr()
        assert run(["ckpt", *map(str, arguments)]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "step-2" in err


def test_help_names_every_command_and_does_not_import_torch() -> None:
    code = (
        "import sys; from lowtide.cli.main import run; code = run(['ckpt', '--help']); "
        "sys.stderr.write(f\"{code} {'torch' in sys.modules}\")"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "0 False"
    assert [c for c in ("ls", "show", "verify", "export", "import", "diff", "gc") if f" {c} " not in done.stdout] == []


@pytest.mark.parametrize("command", ["ls", "show", "verify", "export", "import", "diff", "gc"])
def test_every_command_has_json(command: str, capsys: Out) -> None:
    assert run(["ckpt", command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out
