"""The simulated device is compiled once; without a compiler its tests are skipped, and in CI that is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.simdevice import build, needs_compiler, worker


def test_the_library_is_known_by_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build._key()
    for source in build.SOURCES.iterdir():
        (tmp_path / source.name).write_text(source.read_text())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._key() == before
    (tmp_path / "engine.h").write_text("// another one\n")
    assert build._key() != before


@needs_compiler
def test_what_does_not_compile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "simdevice.cpp").write_text("#error a mistake\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="a mistake"):
        build.library()


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    monkeypatch.setenv("CI", "")
    mark = worker._needs_compiler().mark
    assert mark.args == (True,)
    assert "needs a C++ compiler" in mark.kwargs["reason"]
    monkeypatch.setenv("CI", "true")
    with pytest.raises(RuntimeError, match="nothing of the simulated device would be tested"):
        worker._needs_compiler()
