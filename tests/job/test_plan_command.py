"""``lowtide plan`` as a user runs it, every command of its page, and ``lowtide.plan``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cli.main import run
from lowtide.config import Activations, Precision
from lowtide.errors import ArgumentError, DoesNotFit
from lowtide.job.words import spoken
from lowtide.planning.formulas import OPTIMIZERS, PRECISIONS
from lowtide.planning.plan import Plan
from lowtide.spec.architectures import architecture
from lowtide.spec.catalogue import load
from tests.job.specimens import tiny_gpt

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
SHELL = [line for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) for line in block.splitlines()]
PYTHON = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
TINY = "--model tests.job.specimens:tiny_gpt"

MISTAKES = {
    "plan": "what is to be planned?",
    "plan --preset gpt-98m --arch gpt2": "--preset and --arch are given",
    "plan --preset gpt-98": "Did you mean 'gpt-98m'?",
    "plan --model nonsense": "package.module:function",
    "plan --arch lama-2-7b": "Did you mean 'llama-2-7b'?",
    "plan --params seven": "is not a number of parameters",
    "plan --params 7B --batch 2": "give --sequence too",
    "plan --params 7B --batch auto --sequence 9": "--batch auto needs to know what activations take",
    "plan --arch gpt2 --batch 0": "--batch is '0'; give a whole number >= 1, or auto",
    "plan --arch gpt2 --batch many": "--batch is 'many'",
    "plan --arch gpt2 --sequence 0": "--sequence is 0",
    "plan --arch gpt2 --sequence 9999": "knows 1024 positions",
    "plan --preset gpt-17m --sequence 9999": "looks at 256 tokens",
    "plan --arch gpt2 --hardware h100": "did you mean 'h100-80g'?",
    "plan --arch gpt2 --hardware ./none.json": "cannot be read",
    "plan --arch gpt2 --world-size 0": "--world-size is 0",
    "plan --arch gpt2 --world-size three": "--world-size",
    "plan --arch gpt2 --cluster 16x8": "write nodes=16,gpus=8",
    "plan --arch gpt2 --cluster gpus=8": "say how many nodes",
    "plan --arch gpt2 --cluster nodes=none": "nodes is 'none'",
    "plan --arch gpt2 --cluster nodes=2,nodes=3": "not understood",
    "plan --arch gpt2 --cluster nodes=2,hardware=cpu-2 --hardware cpu-2": "choose one",
    "plan --arch gpt2 --cluster nodes=2,gpus=2 --world-size 3": "--cluster has 4 ranks",
    "plan --arch gpt2 --memory lots": "--memory is 'lots'",
    "plan --arch gpt2 --rank-memory lots,4GiB": "--rank-memory is 'lots'",
    "plan --arch gpt2 --rank-memory 8GiB,4GiB --memory 8GiB": "leave out --memory, --cluster and --disk",
    "plan --arch gpt2 --rank-memory 8GiB,4GiB --disk /tmp": "leave out --memory, --cluster and --disk",
    "plan --arch gpt2 --rank-memory 8GiB,4GiB --world-size 3": "2 memories for 3 ranks",
    "plan --arch gpt2 --rank-memory 8GiB,4GiB --stage 0": "share nothing at stage 0",
    "plan --arch gpt2 --rank-memory 8GiB,4GiB --hardware h100-80g": "without an accelerator",
    "plan --arch gpt2 --rank-memory 8GiB,4GiB --what-if memory=2..4GiB": "leave out --explain",
    "plan --arch gpt2 --device-memory lots": "--device-memory is 'lots'",
    "plan --arch gpt2 --disk /does/not/exist": "which is not a folder",
    "plan --arch gpt2 --hardware h100-80g --disk /": "give a size",
    "plan --arch gpt2 --stage 4": "0 (nothing sharded)",
    "plan --arch gpt2 --precision fp8": "precision is 'fp8'",
    "plan --arch gpt2 --optimizer lion": "optimizer is 'lion'",
    "plan --arch gpt2 --activations kept": "Did you mean 'keep'?",
    "plan --arch gpt2 --activations disk": "needs a disk",
    "plan --arch gpt2 --update sometimes": "update is 'sometimes'",
    "plan --arch gpt2 --accumulate 0": "accumulate is 0",
    "plan --arch gpt2 --update backward --accumulate 2": "cannot accumulate",
    "plan --arch gpt2 --objective money": "objective is 'money'",
    "plan --arch gpt2 --what-if speed=1..2": "such as memory=2..16GiB",
    "plan --arch gpt2 --what-if memory=4GiB": "--what-if is 'memory=4GiB'; '4GiB' is one size",
    "plan --arch gpt2 --what-if memory=8..4GiB": "the first size must be below the second",
    "plan --arch gpt2 --what-if memory=a..4GiB": "the size is 'a'",
    "plan --arch gpt2 --what-if memory=2..4GiB --explain": "leave out --explain",
    "plan --arch gpt2 --what-if device-memory=2..4GiB": "no device with memory of its own",
    "plan --arch gpt2 --what-if disk=2..4GiB": "give --disk too",
    f"plan {TINY} --svg /does/not/exist/x.svg": "--svg is '/does/not/exist/x.svg'; give a file, in a folder that is there",
    "plan --arch gpt2 --josn": "--json",
    "plan surplus": "surplus",
}


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No figures of an earlier `lowtide doctor`: the same answers everywhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def answer(capsys: pytest.CaptureFixture[str], line: str, *, code: int = 0) -> str:
    """What one command prints; nothing goes to standard error."""
    assert run(["plan", *line.split()]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def as_json(capsys: pytest.CaptureFixture[str], line: str, *, code: int = 0) -> dict[str, Any]:
    out = answer(capsys, f"{line} --json", code=code)
    assert out.count("\n") == 1
    return json.loads(out)


# -- mistakes, help, the page ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_helpful_line(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert MISTAKES[line] in err
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_flag_and_does_not_import_torch() -> None:
    code = (
        "import sys; from lowtide.cli.main import run; run(['plan', '--help']); sys.stderr.write(str('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "False"
    flags = "preset model arch params batch sequence hardware world-size cluster memory rank-memory device-memory disk stage "
    flags += "precision optimizer activations update accumulate objective explain what-if svg html save json"
    assert [flag for flag in flags.split() if f"--{flag}" not in done.stdout] == []


def test_help_has_every_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert [word for word in [*PRECISIONS, *OPTIMIZERS] if word not in out] == []


@pytest.mark.parametrize("line", SHELL)
def test_every_command_of_the_page_runs(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    command, _, comment = line.partition("#")
    program, *arguments = command.split()
    assert program == "lowtide"
    assert run(arguments) == (1 if comment.strip() == "exit code 1" else 0)
    out, err = capsys.readouterr()
    assert out
    assert err == ""
    written = {word for word in arguments if word.endswith((".svg", ".html")) or word == "plan.json"}
    assert {path.name for path in tmp_path.iterdir()} == written


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_every_program_of_the_page_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, str(PAGE), "exec"), {})
    assert capsys.readouterr().out


# -- answers -----------------------------------------------------------------------------------------------------------


def test_the_question_of_the_zero_paper(capsys: pytest.CaptureFixture[str]) -> None:
    """Table 1: 7.5 B parameters on 64 devices, stage 2: 16.6 GB."""
    found = as_json(capsys, "--params 7.5e9 --world-size 64 --stage 2 --precision mixed")
    assert found["states_bytes_per_rank"] == 16_640_625_000
    assert found["states_bytes"] == 120_000_000_000
    for written in ("7.5B", "7500000000"):
        again = as_json(capsys, f"--params {written} --world-size 64 --stage 2 --precision mixed")
        assert again["states_bytes_per_rank"] == found["states_bytes_per_rank"]


def test_states_are_the_same_whether_it_fits_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--params 7.5e9 --world-size 64 --stage 3 --precision mixed --hardware h100-80g"
    fits, short = as_json(capsys, line), as_json(capsys, f"{line} --device-memory 1GiB --memory 2GiB", code=1)
    assert (fits["fits"], short["fits"]) == (True, False)
    assert fits["states_bytes_per_rank"] == short["states_bytes_per_rank"] == 1_875_000_000


def test_a_count_that_is_too_large_is_an_error_only_where_a_place_was_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, "--params 1T")
    assert "does not fit" in text
    assert "14.55 TiB" in text
    assert answer(capsys, "--params 1T --memory 4GiB", code=1)


def test_what_does_not_fit_says_how_much_and_what_helps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    found = as_json(capsys, f"{TINY} --memory 100MiB --svg {picture}", code=1)
    assert found["short_bytes"] == found["needed_bytes"] - found["budget_bytes"] > 0
    assert found["tier"] == "host"
    assert 1 <= len(found["ways_out"]) <= 3
    assert not picture.exists()
    text = answer(capsys, f"{TINY} --memory 100MiB", code=1)
    assert "ways out, the cheapest first" in text
    assert all(spoken(way["change"]) in text for way in found["ways_out"])


def test_a_saved_plan_comes_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = [tmp_path / "plan.json", tmp_path / "plan.svg", tmp_path / "plan.html"]
    text = answer(capsys, f"{TINY} --save {names[0]} --svg {names[1]} --html {names[2]}")
    plan = Plan.from_json(names[0].read_text())
    assert text.startswith(str(plan))
    assert ElementTree.parse(names[1]).getroot().tag.endswith("svg")
    assert names[2].read_text().startswith("<!DOCTYPE html>")


def test_json_has_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, f"{TINY} --batch 4")
    assert found["batch"] == "4×32 tokens"
    assert found["parameters"] == found["params"] == sum(p.numel() for p in tiny_gpt().parameters())
    assert found["predicted_seconds"] > 0
    assert any("lowtide doctor" in note for note in found["notes"])
    plan = Plan.from_json(json.dumps(found))  # what is added beside the plan does not matter
    assert plan.predicted_seconds == found["predicted_seconds"]


def test_a_longer_sequence_and_a_larger_batch_are_slower(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = [as_json(capsys, f"{TINY} {more}")["predicted_seconds"] for more in ("--sequence 8", "", "--batch 8")]
    assert seconds[0] < seconds[1] < seconds[2]


def test_a_model_that_shifts_its_labels_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "--model tests.job.specimens:hugging_face_like")["predicted_seconds"] > 0


def test_a_model_that_cannot_be_built_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run(["plan", "--model", "tests.job.specimens:fails_on_rank_1"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "cannot be built without memory (ZeroDivisionError: a mistake on rank 1)" in err


def test_16_bits_are_half_of_the_activations(capsys: pytest.CaptureFixture[str]) -> None:
    def activations(precision: str) -> int:
        line = f"--preset gpt-17m --hardware h100-80g --activations keep --precision {precision}"
        return as_json(capsys, line)["tiers"][0]["parts"]["activations"]

    assert 0.4 < activations("bf16") / activations("fp32") < 0.7


def test_the_best_batch_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--arch gpt2 --hardware h100-80g --precision bf16 --batch auto")
    size = int(found["batch"].partition("×")[0])
    one = as_json(capsys, "--arch gpt2 --hardware h100-80g --precision bf16 --batch 1")
    assert size / found["predicted_seconds"] >= 1 / one["predicted_seconds"]


def test_a_cluster_is_so_many_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--arch llama-2-7b --cluster nodes=4,gpus=2,hardware=h100-80g --precision bf16")
    assert (found["world_size"], found["hosts"]) == (8, 4)
    slow = as_json(capsys, "--arch llama-2-7b --cluster nodes=4,gpus=2,hardware=h100-80g,network=1GB --precision bf16")
    assert slow["predicted_seconds"] > found["predicted_seconds"]


def test_ranks_on_this_machine_share_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, f"{TINY} --world-size 2 --memory 2GiB")
    assert found["hosts"] == 1
    assert found["tiers"][0]["capacity_bytes"] == 1 << 30


def test_a_disk_is_a_folder_a_size_or_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def room(disk: str) -> int | None:
        line = f"--arch gpt2-large --batch 1 --sequence 128 --memory 4GiB {disk}"
        found = [t["capacity_bytes"] for t in as_json(capsys, line)["tiers"] if t["tier"] == "disk"]
        return found[0] if found else None

    assert room("--disk 15GiB") == room(f"--disk {tmp_path}:15GiB") == 15 << 30
    assert (room(f"--disk {tmp_path}") or 0) > 15 << 30
    short = as_json(capsys, "--arch gpt2-large --memory 4GiB", code=1)
    assert any("disk" in way["change"] for way in short["ways_out"])


def test_an_emulated_device_has_a_tier_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, f"{TINY} --device-memory 1GiB")
    assert (found["tiers"][0]["tier"], found["tiers"][0]["capacity_bytes"]) == ("device", 1 << 30)


def test_ranks_with_unequal_memory_get_parts(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--preset gpt-98m --rank-memory 2.5GiB,1.2GiB --explain"
    found = as_json(capsys, line)
    large, small = found["shares"]
    assert large + small == pytest.approx(1, abs=1e-3)
    assert large > small > 0
    assert (found["world_size"], found["hosts"]) == (2, 2)
    words = " ".join(answer(capsys, line).split())
    assert f"partition=lowtide.Partition(shares=({large:g}, {small:g}))), without memory=" in words
    assert "Equal parts do not fit" in words
    assert "memory of the slowest" in words


def test_equal_parts_where_they_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, f"{TINY} --rank-memory 8GiB,4GiB --explain")
    assert found["shares"] is None
    assert "The ranks have 8.00 GiB, 4.00 GiB, and equal parts fit on all of them." in found["reasons"]


def test_explain_gives_every_limit_a_price(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also what is worth nothing: there is more disk than is used."""
    line = f"--preset gpt-98m --memory 1GiB --disk {tmp_path} --explain"
    prices = {p["change"]: p["seconds"] for p in as_json(capsys, line)["prices"]}
    assert prices["1 GiB more host memory"] > 0
    assert prices["a disk twice as fast"] > 0
    assert prices["1 GiB more disk space"] == 0
    words = answer(capsys, line)
    assert re.search(r"1 GiB more disk space +nothing", words)
    assert "1 unit is brought ahead of compute." in words
    beside = as_json(capsys, f"{TINY} --device-memory 1GiB --explain")["prices"]
    assert "1 GiB more device memory" in [p["change"] for p in beside]


def test_explain_gives_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, f"{TINY} --memory 8GiB --explain")
    assert found["reasons"]
    assert found["reasons"][0] in " ".join(answer(capsys, f"{TINY} --memory 8GiB --explain").split())


def test_what_if(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = f"--preset gpt-17m --what-if memory=256MiB..4GiB --disk {tmp_path}"
    svg, html = tmp_path / "f.svg", tmp_path / "f.html"
    text = answer(capsys, f"{line} --svg {svg} --html {html}")
    assert "does not fit" in text
    assert "plain" in text
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "<table>" in html.read_text()
    points = as_json(capsys, line)["what_if"]
    assert points[0]["nbytes"] == 256 << 20
    assert [p["fits"] for p in points] == sorted(p["fits"] for p in points)
    assert answer(capsys, "--preset gpt-17m --what-if memory=1..100MiB", code=1)


def test_from_the_shell(tmp_path: Path) -> None:
    """A terminal that knows no bars gets the numbers all the same."""
    command = [sys.executable, "-m", "lowtide", "plan", "--arch", "gpt2", "--hardware", "cpu-64", "--svg", "x.svg"]
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(lowtide.__file__).parents[1]), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path, env=environment)
    assert done.stderr == ""
    assert "seconds per step" in done.stdout
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")


# -- lowtide.plan ------------------------------------------------------------------------------------------------------


def stack(width: int = 64, depth: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def test_a_module_with_its_batch() -> None:
    model = stack()
    before = [p.clone() for p in model.parameters()]
    plan = lowtide.plan(model, torch.optim.AdamW(model.parameters()), batch=torch.zeros(8, 64), memory="1GiB")
    assert plan.model == "Sequential"
    assert plan.predicted_seconds > 0
    assert plan.states_bytes == 16 * sum(p.numel() for p in model.parameters())
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))
    assert Plan.from_json(plan.to_json()) == plan


def test_without_a_batch_only_bytes() -> None:
    plan = lowtide.plan(stack(), memory="1GiB")
    assert (plan.batch, plan.predicted_seconds) == ("", 0.0)
    assert plan.states_bytes == 16 * 4 * (64 * 64 + 64)


@pytest.mark.parametrize(
    ("make", "bytes_per_element"),
    [
        (lambda p: torch.optim.AdamW(p), 16),
        (lambda p: torch.optim.SGD(p, lr=0.1), 8),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 12),
        (lambda _: "sgd", 8),
        (lambda _: None, 16),
    ],
)
def test_states_are_those_of_the_optimizer(make: Any, bytes_per_element: int) -> None:
    model = stack()
    plan = lowtide.plan(model, make(model.parameters()), memory="1GiB")
    assert plan.states_bytes == bytes_per_element * plan.parameters


def test_frozen_parameters_have_no_states() -> None:
    model = stack()
    model[0].requires_grad_(requires_grad=False)
    assert lowtide.plan(model, memory="1GiB").states_bytes == (4 + 3 * 16) * (64 * 64 + 64)


@pytest.mark.parametrize(
    ("precision", "word", "bytes_per_element"),
    [
        (None, "fp32", 16),
        ("bf16", "bf16", 18),
        (Precision(param="bf16"), "bf16", 18),
        (Precision(), "fp32", 16),
        ("mixed", "mixed", 16),
        (Precision(param="fp16"), "fp16", 18),
    ],
)
def test_precisions(precision: str | Precision | None, word: str, bytes_per_element: int) -> None:
    plan = lowtide.plan(stack(), precision=precision, batch=torch.zeros(8, 64), memory="1GiB")
    assert plan.precision == word
    assert plan.states_bytes == bytes_per_element * plan.parameters


def test_a_module_is_traced_in_the_precision_asked_for() -> None:
    model = stack()

    def activations(precision: str) -> int:
        batch = {"input": torch.zeros(512, 64)}
        plan = lowtide.plan(model, precision=precision, batch=batch, hardware="h100-80g", activations="keep")
        return plan.tiers[0].parts["activations"]

    assert activations("fp32") == 2 * activations("bf16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_model_in_bf16_is_planned_as_it_is() -> None:
    plan = lowtide.plan(stack().to(torch.bfloat16), memory="1GiB")
    assert (plan.precision, plan.states_bytes) == ("pure-bf16", 8 * plan.parameters)


def test_names_and_numbers() -> None:
    named = lowtide.plan("llama-2-7b", batch=(1, 2048), world_size=8, hardware="a100-80g", precision="bf16")
    spec = architecture("llama-2-7b", batch=1, sequence=2048, dtype="bf16")
    assert named == lowtide.plan(spec, world_size=8, hardware=load("a100-80g"), precision="bf16")
    counts = [lowtide.plan(n, world_size=64, hardware="h100-80g", precision="mixed") for n in (7.5e9, "7.5B", 7_500_000_000)]
    assert counts[0] == counts[1] == counts[2]
    assert counts[0].parameters == 7_500_000_000


def test_hardware_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**json.loads(_file_of("cpu-2")), "name": "mine"}))
    assert lowtide.plan("gpt2", batch=1, hardware=path).hardware == "mine"


def _file_of(name: str) -> str:
    return (Path(lowtide.__file__).parent / "hardware" / f"{name}.json").read_text()


def test_what_does_not_fit_names_the_ways_out() -> None:
    with pytest.raises(DoesNotFit, match=r"It would fit with: .*disk") as caught:
        lowtide.plan("gpt2-large", batch=(1, 128), hardware="cpu-64", memory="4GiB")
    assert caught.value.needed_bytes > caught.value.budget_bytes == 4 << 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "no-such-model"}, "architecture is 'no-such-model'"),
        ({"model": "gpt2", "batch": "two"}, "batch is 'two'"),
        ({"model": "gpt2", "optimizer": 3}, "optimizer is a int"),
        ({"model": "gpt2", "stage": 7}, "stage is 7"),
        ({"model": "gpt2", "memory": "much"}, "memory is 'much'"),
        ({"model": "gpt2", "disk": "/does/not/exist"}, "not a folder"),
        ({"model": "gpt2", "disk": "/", "hardware": "cpu-64"}, "give a size"),
        ({"model": "gpt2", "activations": "disk"}, "needs a disk"),
        ({"model": "gpt2", "activations": Activations("keep", units=(("a", "keep"),))}, "one policy"),
        ({"model": "gpt2", "update": "never"}, "update is 'never'"),
        ({"model": "gpt2", "world_size": 0}, "world_size is 0"),
        ({"model": "gpt2", "precision": Precision(param="bf16", moments="bf16")}, "cannot be planned"),
        ({"model": -5}, "is not a number of parameters"),
        ({"model": stack().double()}, "the model is in fp64"),
    ],
)
def test_mistakes_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        lowtide.plan(**arguments)


def test_a_sharded_model_is_refused() -> None:
    model, _ = lowtide.shard(stack())
    with pytest.raises(ArgumentError, match="sharded already"):
        lowtide.plan(model)
