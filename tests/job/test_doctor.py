"""``lowtide doctor``: the figures it remembers, what it says is wrong, and what it never does unasked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.cli.doctor_collectives import REPEATS, collective_lines, measure_collectives
from lowtide.cli.main import run
from lowtide.errors import DeadlineExceeded, PeerFailed
from lowtide.spec.catalogue import parse
from lowtide.spec.hardware import Collective, Compute, Disk, Hardware, Wire
from lowtide.spec.probe import cache_machine, cached_machine

HARDWARE = Hardware(
    name="made up",
    source="measured 2000-01-01",
    compute=Compute(name="cpu", flops={"fp32": 122e9, "bf16": 0.33e9}, bandwidth=32e9, op_seconds=2e-6, fault_seconds=0.5e-9),
    host_bytes=2**33,
    host_bandwidth=14e9,
    inside=Wire(bandwidth=1.25e9, latency=2e-4),
    disk=Disk(read=2.25e9, write=0.3e9, mixed=1.5e9, free_bytes=2**40),
    collectives=(
        Collective(transport="torch", verb="gather", nbytes=1 << 16, seconds=2e-4),
        Collective(transport="torch", verb="gather", nbytes=1 << 20, seconds=1e-3),
        Collective(transport="shared", verb="reduce", nbytes=1 << 20, seconds=2e-4),
    ),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = tmp_path / "scratch"
    found.mkdir()
    return found


@pytest.fixture
def measured(folder: Path) -> Path:
    cache_machine(HARDWARE, str(folder))
    return folder


def test_quick_says_what_was_measured_and_what_is_wrong(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--quick", str(measured)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for line in (
        "products   fp32 122, bf16 0.33 GFLOPS",
        "bytes      14.0 GB/s copied, 32.0 GB/s elementwise, 0.54 s per GiB of fresh memory",
        "kernels    2.0 µs to start one",
        "ranks      1.25 GB/s each way between two on this host, 200 µs",
        "collectives                       64.0 KiB                 1.0 MiB",
        "  torch   gather         200 µs, 0.33 GB/s       1.0 ms, 1.05 GB/s",
        "  shared  reduce                                 200 µs, 5.24 GB/s",
        "figures    measured 2000-01-01",
        "disk       read 2.25, write 0.30, mixed 1.50 GB/s",
        "wrong: bf16 products are 370 times slower than fp32 here",
        "   do: compute in fp32; use bf16 only as a storage format",
        f"wrong: {measured}: the disk is slow: it writes 300 MB/s",
    ):
        assert line in out
    assert out.count("370 times") == 1


def test_one_line_of_json_has_everything(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--quick", "--json", str(measured)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert set(found) == {"machine", "folders", "hardware", "disks", "limits", "accelerators", "advice", "notes"}
    assert found["hardware"]["compute"]["flops"] == {"fp32": 122e9, "bf16": 0.33e9}
    assert found["hardware"]["disk"] == found["disks"][str(measured)]
    assert found["disks"][str(measured)]["write"] == 0.3e9
    assert found["limits"]["cores"] >= 1
    assert found["hardware"]["collectives"][2] == {
        "transport": "shared",
        "verb": "reduce",
        "nbytes": 1 << 20,
        "seconds": 2e-4,
    }
    assert {"what", "do"} == set(found["advice"][0])
    described = parse(json.dumps(found["hardware"]), where="the doctor's answer")  # it can be saved and planned with elsewhere
    assert described.compute == HARDWARE.compute
    assert described.collectives == HARDWARE.collectives


def test_without_a_folder_it_says_how_to_measure_a_disk(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--quick"]) == 0
    assert "none measured: `lowtide doctor DIR`" in capsys.readouterr().out


def test_clean_measures_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--clean", "--json", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"] is None
    assert found["disks"] == {str(folder): None}
    assert found["advice"] == []
    assert cached_machine(None) is None
    assert run(["doctor", "--clean", str(folder)]) == 0
    assert "nothing was left" in capsys.readouterr().out


def test_a_good_machine_is_told_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache_machine(replace(HARDWARE, compute=replace(HARDWARE.compute, flops={"fp32": 1e12, "bf16": 2e12})), None)
    assert run(["doctor", "--quick", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert not [item for item in advice if "products" in item["what"]]
    assert run(["doctor", "--quick"]) == 0
    out = capsys.readouterr().out
    assert ("nothing is wrong with this machine" in out) == ("wrong: " not in out)


# -- collectives --------------------------------------------------------------------------------------------------------


def test_both_transports_are_timed_at_every_size() -> None:
    found = measure_collectives(deadline=120.0, repeats={4096: 2, 1 << 18: 2})
    timed = [(sample.transport, sample.verb, sample.nbytes) for sample in found]
    assert timed == [(t, v, n) for t in ("torch", "shared") for v in ("gather", "reduce") for n in (4096, 1 << 18)]
    assert all(sample.seconds > 0 for sample in found)
    assert len(collective_lines(found)) == 5
    assert min(REPEATS) == 64 << 10
    assert max(REPEATS) == 16 << 20


def test_ranks_that_fail_or_hang_are_ended_with_a_cause() -> None:
    with pytest.raises(DeadlineExceeded, match="gather and reduce"):
        measure_collectives(deadline=0.0)
    with pytest.raises(PeerFailed, match="no median"):
        measure_collectives(deadline=120.0, repeats={4096: 0})


def test_figures_of_an_older_version_are_still_used(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = (measured.parent / "cache" / "lowtide" / "hardware").glob("machine-*.json")
    content = json.loads(path.read_text())
    del content["hardware"]["collectives"]
    path.write_text(json.dumps(content))
    assert run(["doctor", "--quick", str(measured)]) == 0
    out = capsys.readouterr().out
    assert "ranks      1.25 GB/s" in out
    assert "collectives none measured: `lowtide doctor` does" in out


def test_a_collective_that_took_no_time_is_not_believed(measured: Path) -> None:
    (path,) = (measured.parent / "cache" / "lowtide" / "hardware").glob("machine-*.json")
    path.write_text(path.read_text().replace('"seconds": 0.001', '"seconds": 0.0'))
    heard: list[str] = []
    assert cached_machine(None, tell=heard.append) is None
    assert "its numbers are impossible" in heard[0]


@pytest.mark.soak
def test_a_whole_examination_is_remembered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json", str(folder)]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["hardware"]["source"].startswith("measured 20")
    assert list(folder.iterdir()) == []
    assert run(["doctor", "--quick", "--json", str(folder)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["notes"] == []
    assert again["hardware"]["compute"] == measured["hardware"]["compute"]
    assert again["hardware"]["collectives"] == measured["hardware"]["collectives"] != []
    assert again["disks"][str(folder)]["read"] == measured["disks"][str(folder)]["read"]
