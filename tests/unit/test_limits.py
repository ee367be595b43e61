"""What control groups leave: every limit of every group on the way to the root, in a tree of files as the kernel shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.spec import limits

MIB = 1 << 20


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hierarchy of version 2 in which this process is in ``/job/step``, and a machine with more memory than any limit."""
    own = tmp_path / "self"
    own.write_text("0::/job/step\n")
    groups = tmp_path / "cgroup"
    (groups / "job" / "step").mkdir(parents=True)
    monkeypatch.setattr(limits, "_CGROUP", groups)
    monkeypatch.setattr(limits, "_OWN_GROUPS", own)
    monkeypatch.setattr(limits, "_meminfo", lambda _: 1 << 40)
    return groups


def describe(group: Path, **files: str | int) -> None:
    for name, value in files.items():
        (group / name.replace("_", ".")).write_text(f"{value}\n")


def test_high_is_a_limit_like_max(tree: Path) -> None:
    step = tree / "job" / "step"
    describe(step, memory_max=1000 * MIB, memory_high="max", memory_current=300 * MIB)
    assert limits.memory_left() == 700 * MIB
    describe(step, memory_high=600 * MIB)
    assert limits.memory_left() == 300 * MIB, "above it the kernel slows the group down"
    describe(step, memory_max="max")
    assert limits.memory_left() == 300 * MIB, "also where nothing else limits it"


def test_high_of_a_group_above_counts_for_all_below(tree: Path) -> None:
    describe(tree / "job" / "step", memory_max=1000 * MIB, memory_high="max", memory_current=300 * MIB)
    describe(tree / "job", memory_max="max", memory_high=900 * MIB, memory_current=700 * MIB)
    assert limits.memory_left() == 200 * MIB
    describe(tree / "job", memory_current=950 * MIB)
    assert limits.memory_left() == 0, "a group above its limit leaves nothing, and not less"


def test_pages_of_files_do_not_count_against_high(tree: Path) -> None:
    step = tree / "job" / "step"
    describe(step, memory_high=600 * MIB, memory_current=500 * MIB)
    (step / "memory.stat").write_text(f"inactive_file {150 * MIB}\nactive_file {50 * MIB}\n")
    assert limits.memory_left() == 300 * MIB


def test_a_group_without_limits_takes_nothing_away(tree: Path) -> None:
    describe(tree / "job" / "step", memory_max="max", memory_high="max", memory_current=500 * MIB)
    assert limits.memory_left() == 1 << 40
