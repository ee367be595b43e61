"""Limits reached by what is in a folder, and limits of the process: later saves succeed, and nothing is taken for damage that
is not; memory follows from what files hold, and not from what they claim."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

import lowtide
from lowtide.checkpoint.export import export_hf
from lowtide.checkpoint.folder import checkpoints
from lowtide.checkpoint.importing import import_hf
from lowtide.checkpoint.manifest import COUNT_LIMIT, MANIFEST, File, parse_manifest, table_name, to_text
from lowtide.checkpoint.source import open_source, verify
from lowtide.errors import ArgumentError, CheckpointError, CheckpointTooNew, CheckpointUnread, Error, Refused
from lowtide.files import allowed_bytes, json_bytes
from lowtide.reporting.extras import read_extras
from lowtide.spec.weights import open_weights
from tests.kit.crashes import apart, forked
from tests.kit.forgery import PAYLOAD, TABLE, Forger
from tests.kit.hostile import signed

# -- counts -----------------------------------------------------------------------------------------------------------


def with_fields(path: Path, **fields: Any) -> None:
    """A manifest with other fields, and the checksum that belongs to them."""
    text = json.loads((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_bytes(signed(json.dumps({**text, **fields}, separators=(",", ":")).encode()))


@pytest.mark.parametrize("field", ["sequence", "step"])
def test_the_largest_count(field: str, tmp_path: Path) -> None:
    """Of a checkpoint that is in the folder, and loaded: saves go on, and each is the newest."""
    forger = Forger(tmp_path)
    with_fields(forger.path, **{field: COUNT_LIMIT - 1})
    lowtide.load(forger.path, forger.model, forger.optimizer, state={"kept": forger.kept})
    for name in ("z-later", "a-last", "m-newest"):
        forger.train()
        lowtide.save(tmp_path / name, forger.model, forger.optimizer, state={"kept": forger.kept}, extra={"name": name}).wait()
        assert checkpoints(tmp_path)[0][0].path.name == name
        assert lowtide.load(tmp_path, forger.model, forger.optimizer, state={"kept": forger.kept})["name"] == name
        verify(tmp_path / name)


# -- descriptors ------------------------------------------------------------------------------------------------------


def of_many_ranks(forger: Forger, count: int) -> None:
    """The same checkpoint, as if ``count`` ranks had written it, of which most had nothing to write."""
    empty = json.loads(forger.files[TABLE])
    empty |= {"names": [], "kinds": [], "blocks": [], "files": [], "objects": {"rng": None, "small": {}, "state": {}}}
    files = {name: text for name, text in forger.files.items() if name != MANIFEST}
    files |= {table_name(rank): json.dumps({**empty, "rank": rank}).encode() for rank in range(1, count)}
    rows = tuple(File(name=n, nbytes=len(t), xxh3=xxhash.xxh3_64_hexdigest(t)) for n, t in sorted(files.items()))
    text = to_text(forger.manifest.model_copy(update={"files": rows, "world_size": count}))
    forger.write({**files, MANIFEST: text})


def few_descriptors(folder: Path, ranks: int) -> list[str]:
    """Load with fewer and fewer; the older checkpoint beside is never taken for the newer one."""
    forger = Forger(folder / "run")
    lowtide.save(folder / "run" / "older", forger.model, extra={"epoch": -1}).wait()
    with_fields(folder / "run" / "older", sequence=0)
    of_many_ranks(forger, ranks)
    said: list[str] = []
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    used = len(os.listdir("/proc/self/fd"))
    for spare in (80, 20, 6, 3, 1, 0):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1 + spare, hard))
        try:
            said.append(str(lowtide.load(folder / "run", forger.model, strict=False)["epoch"]))
        except CheckpointUnread as error:
            said.append("unread" if "ulimit -n" in str(error) else str(error))
        except CheckpointError as error:
            said.append(f"error: {error}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return said


def test_more_files_than_may_be_open(quick_path: Path) -> None:
    (quick_path / "run").mkdir()
    said = apart(few_descriptors, quick_path, 90)
    assert said[:2] == ["3", "3"], said
    assert set(said) <= {"3", "unread"} or all("folder cannot be read" in each for each in set(said) - {"3", "unread"}), said


# -- memory -----------------------------------------------------------------------------------------------------------


def many(text: bytes, count: int) -> Any:
    return b"[" + b",".join([text] * count) + b"]"


def in_extra(forger: Forger, value: bytes) -> dict[str, bytes]:
    table = json.loads(forger.files[TABLE])
    table["objects"]["model"]["extra"] = {"x": "@"}
    return forger.forged(json.dumps(table).encode().replace(b'"@"', value))


def in_table(forger: Forger, key: str, value: bytes) -> dict[str, bytes]:
    table = json.loads(forger.files[TABLE])
    table[key] = "@"
    return forger.forged(json.dumps(table).encode().replace(b'"@"', value))


def with_a_hole(forger: Forger, objects: int, size: int) -> Callable[[], int]:
    """The payload has a hole at its end, and tensors of ``extra`` are there."""

    def make() -> int:
        table = json.loads(forger.files[TABLE])
        begin = len(forger.files[PAYLOAD])
        digest = xxhash.xxh3_64_intdigest(bytes(size))
        kind = len(table["kinds"])
        table["kinds"].append(["object", "uint8"])
        for number in range(objects):
            table["names"].append(f"hole.{number}")
            part = [kind, len(table["names"]) - 1, 0, size, 0]
            table["blocks"].append([table["files"].index(PAYLOAD), begin + number * size, size, digest, [part]])
            row = {"$": "tensor", "name": f"hole.{number}", "dtype": "uint8", "shape": [size]}
            table["objects"]["model"]["extra"][f"hole{number}"] = row
        text = json.dumps(table).encode()
        files = {name: data for name, data in forger.files.items() if name != MANIFEST} | {TABLE: text}
        rows = [File(name=n, nbytes=len(t), xxh3=xxhash.xxh3_64_hexdigest(t)) for n, t in sorted(files.items()) if n != PAYLOAD]
        rows.append(File(name=PAYLOAD, nbytes=begin + objects * size))  # as a spool file: no checksum of the whole
        manifest = to_text(forger.manifest.model_copy(update={"files": tuple(rows)}))
        forger.write({**files, MANIFEST: manifest})
        os.truncate(forger.path / PAYLOAD, begin + objects * size)
        return sum(len(t) for t in files.values())

    return make


MIB = 1 << 20
COSTLY: dict[str, Callable[[Forger], Any]] = {
    "lists in extra": lambda f: in_extra(f, many(b"[]", 4 * MIB)),
    "lists of lists in extra": lambda f: in_extra(f, many(b"[[],[],[]]", MIB)),
    "dicts in extra": lambda f: in_extra(f, many(b"{}", 4 * MIB)),
    "numbers in extra": lambda f: in_extra(f, many(b"1000", 3 * MIB)),
    "texts in extra": lambda f: in_extra(f, many(b'"a"', 3 * MIB)),
    "dicts as pairs": lambda f: in_extra(f, many(b'{"$":"dict","pairs":[]}', MIB)),
    "blocks": lambda f: in_table(f, "blocks", many(b"[0,0,0,0,[]]", MIB)),
    "parts": lambda f: in_table(f, "blocks", b"[[0,0,0,0," + many(b"[0,0,0,0,0]", MIB) + b"]]"),
    "names": lambda f: in_table(f, "names", many(b'"a"', 3 * MIB)),
    "kinds": lambda f: in_table(f, "kinds", many(b'["object","int8"]', MIB)),
    "files": lambda f: in_table(f, "files", many(b'"rank-00000.safetensors"', MIB)),
    "a hole": lambda f: with_a_hole(f, 1, 400 * MIB),
    "many holes": lambda f: with_a_hole(f, 100, 8 * MIB),
}


def memory_of(folder: Path, what: str) -> tuple[int, int]:
    """Bytes that the files hold, and by how much a load and a check of them made this process larger."""
    forger = Forger(folder)
    made = COSTLY[what](forger)
    if callable(made):
        stored = made()
    else:
        forger.write(made)
        stored = sum(len(text) for text in made.values())
    del made
    before = _peak(reset=True)
    forger.load()
    forger.verify()
    return stored, _peak() - before


def _peak(*, reset: bool = False) -> int:
    """The most memory since it was reset; then what there is now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@pytest.mark.parametrize("what", COSTLY)
def test_memory_follows_from_what_files_hold(what: str, quick_path: Path) -> None:
    stored, taken = apart(forked_memory, quick_path, what)
    assert taken <= allowed_bytes(stored), f"{taken / MIB:.0f} MiB for {stored / MIB:.0f} MiB of files"


def forked_memory(folder: Path, what: str) -> tuple[int, int]:
    return forked(memory_of, folder, what, seconds=250).result()


def test_an_estimate_that_is_never_too_small_for_what_is_written(forger: Forger) -> None:
    """A checkpoint that has few numbers and little else is far below the limit; a save that no reader would take is refused."""
    assert json_bytes(forger.files[TABLE]) < allowed_bytes(0) // 20
    many_values = {"x": [[] for _ in range(10**6)]}
    with pytest.raises(CheckpointError, match="more memory than readers allow"):
        lowtide.save(forger.path.parent / "odd", forger.model, forger.optimizer, extra=many_values).wait()
    assert not (forger.path.parent / "odd").exists()


def header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("inside", [b'{"x":' + many(b"[]", 4 * MIB) + b"}", many(b"{}", 4 * MIB), many(b"[[],[],[]]", MIB)])
def test_headers_and_tables_of_runs(inside: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(inside))
    with pytest.raises(Refused, match="more memory"):
        open_weights(path)
    (tmp_path / "config.json").write_bytes(inside)
    (tmp_path / "events.jsonl").write_bytes(inside + b'\n{"event": "save", "step": 3}\n')
    extras = read_extras(tmp_path)
    assert extras.config == {}
    assert [each.what for each in extras.happenings] == ["checkpoint"]


# -- words and shapes -------------------------------------------------------------------------------------------------

ODD_TEXTS = ["\ud800", "a\udc80b", "\x1b]0;x\x07", "\x9b31m", "\u202e", "\n\r\x00"]


@pytest.mark.parametrize("shape", [[0, 2**62 - 1, 2**62 - 1], [2**62 - 1, 0], [0] * 65, [1] * 65])
def test_shapes_that_no_tensor_has(shape: list[int], tmp_path: Path) -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(header(text))
    with pytest.raises(Error):
        import_hf(tmp_path, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("name", ODD_TEXTS, ids=ascii)
def test_odd_names(name: str, tmp_path: Path) -> None:
    """Everywhere a name or a text may be given: it works, or an error says that it is none. Never without a type."""
    text = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(header(text, b"1234"))
    halves = any("\ud800" <= c <= "\udfff" for c in name)
    if halves:
        with pytest.raises(Refused, match="no text"):
            import_hf(tmp_path, tmp_path / "imported")
    else:
        import_hf(tmp_path, tmp_path / "imported")
        export_hf(tmp_path / "imported", tmp_path / "exported")
    model = nn.Sequential()
    model.add_module(name, nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lowtide.shard(model, optimizer, run=tmp_path / "run")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for extra in ({"x": name}, {name: 1}, {"x": {name: [name]}}):
        if halves:
            with pytest.raises(ArgumentError, match="no text"):
                lowtide.save(tmp_path / "saved", model, optimizer, extra=extra)
        else:
            lowtide.save(tmp_path / "saved", model, optimizer, extra=extra).wait()
            assert lowtide.load(tmp_path / "saved", model, optimizer) == extra
    with pytest.raises(Refused, match="cannot be pickled"):
        pickle.dumps(optimizer)


@pytest.mark.parametrize("text", ["\x1b]0;x\x07", "\x9b31m", "\u202e"], ids=ascii)
def test_errors_print_nothing_that_a_terminal_acts_upon(text: str, forger: Forger) -> None:
    """In whatever field of a checkpoint the text stands."""

    def fields(tree: Any) -> list[tuple[Any, Any]]:
        rows = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
        inside = [place for _, value in rows if isinstance(value, dict | list) for place in fields(value)]
        return [*((tree, key) for key, value in rows if isinstance(value, str)), *inside]

    said: list[str] = []
    newer = {**json.loads(forger.files[MANIFEST]), "version": 2, "lowtide": text}
    with pytest.raises(CheckpointTooNew) as caught:
        parse_manifest(signed(json.dumps(newer, separators=(",", ":")).encode()), "")
    said.append(str(caught.value))
    for number in range(len(fields(json.loads(forger.files[TABLE])))):
        table = json.loads(forger.files[TABLE])
        tree, key = fields(table)[number]
        tree[key] = text
        forger.write(forger.forged(json.dumps(table).encode()))
        said += [forger.load(), forger.verify()]
    for key in ("objects", "blocks", "rank"):
        table = json.loads(forger.files[TABLE])
        table[text] = table[key]
        table["objects"]["model"]["parameters"][text] = {"shape": "x"}
        forger.write(forger.forged(json.dumps(table).encode()))
        said.append(forger.load())
    assert len(set(said)) > 10
    assert not [each for each in said if not each.isprintable()]


def test_memory_that_the_system_does_not_give() -> None:
    apart(without_memory)


def without_memory() -> None:
    from lowtide.tiers.arena import _reserve

    lines = Path("/proc/self/status").read_text().splitlines()
    data = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (data + MIB, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with pytest.raises(MemoryError, match="ulimit"):
        _reserve(256 * MIB, torch.device("cpu"), forked=False)


SHORTAGES: dict[str, BaseException] = {
    "Python": MemoryError(),
    "torch": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes."),
    "the kernel": OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
}


@pytest.mark.parametrize("who", SHORTAGES)
@pytest.mark.parametrize("call", ["fill", "stored_bytes"])
def test_no_memory_is_no_damage(who: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has none: the older checkpoint is not taken for the newest one."""
    forger = Forger(tmp_path)
    lowtide.save(tmp_path / "newer", forger.model, forger.optimizer, state={"kept": forger.kept}, extra={"new": True}).wait()

    def fail(*_: object) -> None:
        raise SHORTAGES[who]

    if who == "the kernel":
        monkeypatch.setattr(os, "preadv", fail)
    elif call == "fill":
        monkeypatch.setattr("lowtide.checkpoint.source.Source.read_into", fail)
    else:
        monkeypatch.setattr("lowtide.checkpoint.folder.OpenFolder.stored_bytes", fail)
    with pytest.raises(CheckpointUnread):
        lowtide.load(tmp_path, forger.model, forger.optimizer, state={"kept": forger.kept})
    monkeypatch.undo()
    assert lowtide.load(tmp_path, forger.model, forger.optimizer, state={"kept": forger.kept}) == {"new": True}


def test_a_source_names_what_is_wrong(forger: Forger) -> None:
    """The files are opened before any of them is read, and one that is missing is still told by its name."""
    os.unlink(forger.path / PAYLOAD)
    with open_source(forger.path) as source:
        table = source.tables[0]
        number = next(n for n, block in enumerate(table.blocks) if table.files[block.file] == PAYLOAD)
        with pytest.raises(CheckpointError, match=PAYLOAD):
            source.read_block(0, number)
