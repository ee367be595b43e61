"""Checkpoints whose structure is another, with checksums that are right: what a reader has to judge by its meaning.

``Shaper.shaped`` changes a valid checkpoint in one to four places, by moves of two kinds. *Any*: walk to some node of the table
or the manifest, and replace, drop, double, exchange or wrap what is there. *Meant*: cut parts and blocks in two, let them
overlap, give them other kinds and names, spread them over two ranks, move states between the large and the small, permute
strides, rename, retype. Then every checksum is computed anew, so that nothing is refused for those.

``meaning`` reads a checkpoint in the plainest way, element by element, and says what is ambiguous in it. What lowtide accepts
must have one meaning, whichever pieces of it are read in whichever order (``judge``), and be what a model has after a load.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from lowtide.checkpoint.manifest import DTYPES, MANIFEST, OBJECT, File, parse_manifest, table_name, to_text
from lowtide.checkpoint.source import Source
from lowtide.errors import CheckpointError
from tests.kit.crashes import Board, start
from tests.kit.forgery import PAYLOAD, TABLE, Forger, MemoryFolder, examine
from tests.kit.hostile import EVIL, Mutator, signed
from tests.kit.optimizers import OPTIMIZERS

Files = dict[str, bytes]
Meaning = dict[tuple[str, str], Tensor]
Move = Callable[["Shaper", Any, random.Random], None]

_VALUES: list[Any] = []
for _text in EVIL:
    try:
        _VALUES.append(json.loads(_text))
    except (ValueError, RecursionError):
        continue
_NAMES = ["up.weight", "up.bias", "norm.weight", "norm.running_mean", "down.weight", "extra.tensor", "rng.torch", "", "x", "$"]


class Shaper:
    """See the module's docstring."""

    def __init__(self, forger: Forger) -> None:
        self.files, self.forger = forger.files, forger
        self.tokens = Mutator(forger.files[TABLE])
        self.payload = forger.files[PAYLOAD]

    def shaped(self, chosen: random.Random) -> Files:
        if chosen.random() < 0.08:
            return self.forger.forged(self.tokens.mutated(chosen))
        table = json.loads(self.files[TABLE])
        for _ in range(chosen.choice((1, 1, 1, 2, 2, 3, 4))):
            move = chosen.choice(MOVES) if chosen.random() < 0.7 else anything
            try:
                move(self, table, chosen)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
                continue  # another move has taken away what this one works on
        payload = bytearray(self.payload)
        if chosen.random() < 0.15:
            begin = 8 + int.from_bytes(payload[:8], "little")
            at = chosen.randrange(begin, len(payload))
            new = chosen.choice((chosen.randbytes(8), b"\0" * 8, b"\xff" * 8, b"\0\0\x80\x7f\0\0\xc0\x7f"))
            payload[at : at + 8] = new[: len(payload) - at]
        tables = [table]
        if isinstance(table, dict) and "second" in table:
            tables = [table, table.pop("second")]
        files: Files = {name: text for name, text in self.files.items() if name not in (MANIFEST, TABLE)}
        files[PAYLOAD] = bytes(payload)
        for rank, each in enumerate(tables):
            _seal(each, files, chosen)
            files[table_name(rank)] = json.dumps(each).encode(errors="surrogatepass")
        return {**files, MANIFEST: self._manifest(files, len(tables), chosen)}

    def _manifest(self, files: Files, world_size: int, chosen: random.Random) -> bytes:
        rows = tuple(File(name=n, nbytes=len(t), xxh3=xxhash.xxh3_64_hexdigest(t)) for n, t in sorted(files.items()))
        text = to_text(self.forger.manifest.model_copy(update={"files": rows, "world_size": world_size}))
        if chosen.random() > 0.06:
            return text
        fields = json.loads(text)
        with contextlib.suppress(IndexError, TypeError, OverflowError):
            _change(fields, chosen, fields)
        return signed(json.dumps(fields, separators=(",", ":")).encode())


def _seal(table: Any, files: Files, chosen: random.Random) -> None:
    """Checksums of all blocks that are one."""
    if not isinstance(table, dict) or not isinstance(table.get("blocks"), list):
        return
    for block in table["blocks"]:
        if isinstance(block, list) and len(block) == 5 and all(type(n) is int for n in block[:3]):
            file, offset, nbytes = block[:3]
            names = table.get("files")
            name = names[file] if isinstance(names, list) and 0 <= file < len(names) else None
            text = files.get(name) if isinstance(name, str) else None
            if text is not None and 0 <= offset and 0 <= nbytes <= len(text) and chosen.random() < 0.99:
                block[3] = xxhash.xxh3_64_intdigest(text[offset : offset + nbytes])


# -- any change -------------------------------------------------------------------------------------------------------


def anything(_: Shaper, table: Any, chosen: random.Random) -> None:
    _change(table, chosen, table)


def _some_node(whole: Any, chosen: random.Random) -> tuple[Any, Any]:
    """A container and a key or index in it."""
    tree = whole
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            raise IndexError
        key = chosen.choice(keys)
        inside = tree[key]
        if not isinstance(inside, dict | list) or not inside or (tree is not whole and chosen.random() < 0.15):
            return tree, key
        tree = inside


def _change(tree: Any, chosen: random.Random, whole: Any) -> None:
    inside, key = _some_node(tree, chosen)
    value, kind = inside[key], chosen.randrange(8)
    if kind == 0:
        inside[key] = copy.deepcopy(chosen.choice(_VALUES))
    elif kind == 1 and type(value) is int:
        inside[key] = chosen.choice((value + 1, value - 1, 2 * value, -value, 0, 2**62 - 1, 2**31, value + 8, float(value)))
    elif kind == 2:
        other, at = _some_node(whole, chosen)
        inside[key] = copy.deepcopy(other[at])
    elif kind == 3:
        del inside[key]
    elif kind == 4 and isinstance(inside, list):
        inside.insert(chosen.randrange(len(inside) + 1), copy.deepcopy(value))
    elif kind == 4:
        inside[chosen.choice(_NAMES)] = copy.deepcopy(value)
    elif kind == 5:
        other = chosen.choice(list(inside) if isinstance(inside, dict) else list(range(len(inside))))
        inside[key], inside[other] = inside[other], inside[key]
    elif kind == 6:
        inside[key] = chosen.choice(([value], {"$": "tuple", "items": [value]}, {"x": value}, [value, value]))
    elif isinstance(value, str):
        inside[key] = chosen.choice((value + "x", value[:-1], chosen.choice(_NAMES), "optimizer.exp_avg", "float32", "int64"))
    else:
        inside[key] = chosen.choice((None, True, 0, [], {}, "", 0.5))


# -- changes that mean something --------------------------------------------------------------------------------------


def _block(table: Any, chosen: random.Random) -> Any:
    return chosen.choice(table["blocks"])


def _width(table: Any, part: Any) -> int:
    return DTYPES[table["kinds"][part[0]][1]].itemsize


def cut_a_part(_: Shaper, table: Any, chosen: random.Random) -> None:
    """In two, that meet, overlap or leave a gap; in their order or the other."""
    block = _block(table, chosen)
    part = chosen.choice(block[4])
    at = chosen.randrange(part[2], part[3] + 1)
    off = chosen.choice((0, 0, 0, 1, -1))
    width = _width(table, part)
    rows = [
        [part[0], part[1], part[2], at, part[4]],
        [part[0], part[1], at + off, part[3], part[4] + (at + off - part[2]) * width],
    ]
    block[4].remove(part)
    block[4] += rows if chosen.random() < 0.5 else rows[::-1]


def cut_a_block(_: Shaper, table: Any, chosen: random.Random) -> None:
    """In two, at an element of its only part or next to one."""
    block = _block(table, chosen)
    (part,) = block[4]
    width, count = _width(table, part), chosen.randrange(part[3] - part[2] + 1)
    cut = count * width + chosen.choice((0, 0, 0, 1, -1))
    table["blocks"].remove(block)
    kind, name, lo, hi, at = part
    table["blocks"] += [
        [block[0], block[1], cut, 0, [[kind, name, lo, lo + count, at]]],
        [block[0], block[1] + cut, block[2] - cut, 0, [[kind, name, lo + count, hi, at]]],
    ]


def move_a_part(_: Shaper, table: Any, chosen: random.Random) -> None:
    source, target = _block(table, chosen), _block(table, chosen)
    target[4].append(source[4].pop(chosen.randrange(len(source[4]))))


def copy_a_part(_: Shaper, table: Any, chosen: random.Random) -> None:
    part = copy.deepcopy(chosen.choice(_block(table, chosen)[4]))
    part[chosen.randrange(5)] += chosen.choice((0, 0, 1, -1, 4))
    _block(table, chosen)[4].append(part)


def merge_blocks(_: Shaper, table: Any, chosen: random.Random) -> None:
    """Two neighbours, or two blocks with all between them."""
    one, two = sorted((_block(table, chosen), _block(table, chosen)), key=lambda block: block[1])
    begin, end = one[1], two[1] + two[2]
    parts = one[4] + [[*part[:4], part[4] + two[1] - begin] for part in two[4]] if two is not one else one[4]
    table["blocks"] = [block for block in table["blocks"] if block is not one and block is not two]
    table["blocks"].append([one[0], begin, end - begin, 0, parts])


def shift_a_block(_: Shaper, table: Any, chosen: random.Random) -> None:
    block = _block(table, chosen)
    block[chosen.choice((1, 2))] += chosen.choice((1, -1, 4, -4, 8, 64))


def empty_parts(_: Shaper, table: Any, chosen: random.Random) -> None:
    part = copy.deepcopy(chosen.choice(_block(table, chosen)[4]))
    part[2] = part[3] = chosen.choice((0, part[2], part[3], 10**6, 2**61))
    _block(table, chosen)[4].append(part)


def shuffle(_: Shaper, table: Any, chosen: random.Random) -> None:
    chosen.shuffle(chosen.choice((table["blocks"], _block(table, chosen)[4], table["names"], table["kinds"], table["files"])))


def twice_in_a_list(_: Shaper, table: Any, chosen: random.Random) -> None:
    """One more number for the same name, kind or file, that some parts use."""
    key, column = chosen.choice((("names", 1), ("kinds", 0)))
    table[key].append(copy.deepcopy(chosen.choice(table[key])))
    for block in table["blocks"]:
        for part in block[4]:
            if table[key][part[column]] == table[key][-1] and chosen.random() < 0.5:
                part[column] = len(table[key]) - 1


def another_kind(_: Shaper, table: Any, chosen: random.Random) -> None:
    names = ("parameters", "masters", "object", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.step", "optimizer.x")
    row = chosen.choice(table["kinds"])
    row[chosen.randrange(2)] = chosen.choice(names if chosen.random() < 0.5 else list(DTYPES))


def another_name(_: Shaper, table: Any, chosen: random.Random) -> None:
    at = chosen.randrange(len(table["names"]))
    table["names"][at] = chosen.choice([*_NAMES, *table["names"]])


def a_master(_: Shaper, table: Any, chosen: random.Random) -> None:
    """Of other bytes that are there."""
    table["kinds"].append(["masters", chosen.choice(("float32", "float64", "bfloat16", "int32"))])
    block = _block(table, chosen)
    name = table["names"].index(chosen.choice(("up.weight", "up.bias", "norm.weight")))
    block[4].append([len(table["kinds"]) - 1, name, 0, chosen.choice((5, 30)), 0])


def another_shape(_: Shaper, table: Any, chosen: random.Random) -> None:
    row = chosen.choice(list(table["objects"]["model"]["parameters"].values()))
    fields = [row["shape"], row["stride"]]
    change = chosen.randrange(5)
    if change == 0:
        for each in fields:
            each.reverse()
    elif change == 1:
        chosen.choice(fields).reverse()
    elif change == 2:
        at = chosen.randrange(len(row["shape"]) + 1)
        row["shape"].insert(at, 1)
        row["stride"].insert(at, chosen.choice((0, 1, 7, 2**61)))
    elif change == 3:
        each = chosen.choice(fields)
        each[chosen.randrange(len(each))] = chosen.choice((0, 1, 2, 3, 5, 6, 30, 2**31, 2**62 - 1))
    else:
        row["dtype"] = chosen.choice(list(DTYPES))


def from_large_to_small(_: Shaper, table: Any, chosen: random.Random) -> None:
    """A state leaves the files and stands beside the others, as a scalar, a tensor or something else."""
    small = table["objects"]["small"]
    name = chosen.choice(list(small))
    kinds = [i for i, row in enumerate(table["kinds"]) if row[0].startswith("optimizer.")]
    kind, at = chosen.choice(kinds), table["names"].index(name)
    if chosen.random() < 0.8:
        for block in table["blocks"]:
            block[4] = [part for part in block[4] if part[:2] != [kind, at]]
    small[name][table["kinds"][kind][0].removeprefix("optimizer.")] = _some_value(table, chosen)


def _some_value(table: Any, chosen: random.Random) -> Any:
    kind = chosen.randrange(4)
    if kind == 0:
        return {"$": "scalar", "dtype": chosen.choice(list(DTYPES)), "value": chosen.choice((0, 1, 0.5, -1, 300, 1e30))}
    if kind == 1:
        return copy.deepcopy(chosen.choice(_VALUES))
    name = f"new.{chosen.randrange(3)}"
    shape = chosen.choice(([], [0], [1], [2, 2], [5], [6, 5], [5, 6], [30], [1] * 5, [3, 0, 2]))
    count = 1
    for size in shape:
        count *= size
    dtype = chosen.choice(("float32", "float32", "int64", "bool", "uint8", "complex64"))
    table["kinds"].append([OBJECT, dtype])
    table["names"].append(name)
    _block(table, chosen)[4].append([len(table["kinds"]) - 1, len(table["names"]) - 1, 0, count, 0])
    return {"$": "tensor", "name": name, "dtype": dtype, "shape": shape}


def as_pairs(_: Shaper, table: Any, chosen: random.Random) -> None:
    """A dict as one that may have any keys; with one of the large states in it, or with a key twice."""
    objects = table["objects"]
    rows = chosen.choice((objects["small"], objects["small"], objects["state"], objects["model"]))
    name = chosen.choice([name for name, row in rows.items() if isinstance(row, dict) and "$" not in row])
    pairs: list[Any] = [[key, value] for key, value in rows[name].items()]
    if chosen.random() < 0.7:
        key = chosen.choice(("exp_avg", "exp_avg_sq", "step", 0, 0.5, None, True, {"$": "tuple", "items": [1, "x"]}))
        pairs.insert(chosen.randrange(len(pairs) + 1), [key, _some_value(table, chosen)])
    rows[name] = {"$": "dict", "pairs": pairs}


def another_value(_: Shaper, table: Any, chosen: random.Random) -> None:
    """Somewhere among what is no tensor."""
    model = table["objects"]["model"]
    places = [*table["objects"]["small"].values(), *(group["options"] for group in model["groups"]), model["buffers"]]
    places += [model["extra"], table["objects"]["rng"], table["objects"]["state"]]
    place = chosen.choice(places)
    place[chosen.choice([*place, "new"])] = _some_value(table, chosen)


def options(_: Shaper, table: Any, chosen: random.Random) -> None:
    group = chosen.choice(table["objects"]["model"]["groups"])["options"]
    values = (
        None,
        True,
        False,
        0,
        -1,
        1e308,
        0.5,
        "x",
        [],
        [0.9],
        [0.9, 0.99],
        [0.9, 2.0],
        {},
        {"$": "tuple", "items": [0.5, 0.5]},
    )
    inf = {"$": "float", "text": "inf"}
    group[chosen.choice(list(group))] = copy.deepcopy(chosen.choice((*values, inf)))


def groups(_: Shaper, table: Any, chosen: random.Random) -> None:
    model = table["objects"]["model"]
    rows = model["groups"]
    change = chosen.randrange(5)
    if change == 0:
        chosen.shuffle(rows)
    elif change == 1:
        rows.append(copy.deepcopy(chosen.choice(rows)))
    elif change == 2:
        one, two = chosen.choice(rows)["parameters"], chosen.choice(rows)["parameters"]
        two.append(one.pop())
    elif change == 3:
        model["optimizer"] = chosen.choice((None, "SGD", "AdamW", "", "x" * 1000))
    else:
        model["aliases"][chosen.choice(_NAMES)] = chosen.choice(_NAMES)


def random_numbers(_: Shaper, table: Any, chosen: random.Random) -> None:
    """Other positions and words; other bytes of torch's state are a change of the payload."""
    rng = table["objects"]["rng"]
    if chosen.random() < 0.5:
        rng["numpy"]["items"][chosen.randrange(5)] = chosen.choice((0, 624, 625, -1, 2**31 - 1, 1.0, None, "MT19937", [1]))
    else:
        words = rng["python"]["items"]
        words[chosen.randrange(3)] = chosen.choice((3, 2, None, 0.5, {"$": "tuple", "items": [0] * 625}, words[1]))


def two_ranks(_: Shaper, table: Any, chosen: random.Random) -> None:
    """Some blocks are said to be another rank's; some are said so by both."""
    second = copy.deepcopy(table)
    second.pop("second", None)
    second["rank"] = 1
    kept, given = [], []
    for block in table["blocks"]:
        kinds = {table["kinds"][part[0]][0] for part in block[4]}
        to = chosen.choice("ab" if chosen.random() < 0.97 else ("both", "none")) if OBJECT not in kinds else "object"
        if to in ("a", "both", "object"):
            kept.append(block)
        if to in ("b", "both"):
            given.append(copy.deepcopy(block))
    objects = second["objects"]
    second["objects"] = {**objects, "rng": None, "state": {}} if chosen.random() < 0.8 else objects
    if chosen.random() < 0.8:
        second["objects"].pop("model")
        second["objects"]["small"] = {}
    table["blocks"], second["blocks"] = kept, given
    if chosen.random() < 0.3:
        anything(_, second, chosen)
    table["second"] = second


MOVES: tuple[Move, ...] = (
    *(cut_a_part, cut_a_block, move_a_part, copy_a_part, merge_blocks, shift_a_block, empty_parts, shuffle, twice_in_a_list),
    *(another_kind, another_name, a_master, another_shape, from_large_to_small, as_pairs, another_value, options, groups),
    *(random_numbers, two_ranks, two_ranks),
)


# -- what it means ----------------------------------------------------------------------------------------------------


def meaning(files: Files) -> tuple[Meaning, list[str]]:
    """Every tensor of a checkpoint that can be read, element by element; and what in it has several meanings or none."""
    manifest = json.loads(files[MANIFEST])
    out: Meaning = {}
    wrong: list[str] = []
    times: dict[tuple[str, str], Tensor] = {}
    tables = [json.loads(files[table_name(rank)]) for rank in range(manifest["world_size"])]
    facts = tables[0]["objects"]["model"]["parameters"]
    ends: dict[tuple[str, str], int] = {}
    rows: list[tuple[tuple[str, str], torch.dtype, int, int, bytes]] = []
    for table in tables:
        for file, offset, _, _, parts in table["blocks"]:
            text = files[table["files"][file]]
            for kind, name, lo, hi, at in parts:
                sort, dtype = table["kinds"][kind][0], DTYPES[table["kinds"][kind][1]]
                key = (f"{OBJECT} {table['rank']}" if sort == OBJECT else sort, table["names"][name])
                raw = text[offset + at : offset + at + (hi - lo) * dtype.itemsize]
                rows.append((key, dtype, lo, hi, raw))
                ends[key] = max(ends.get(key, 0), hi if hi > lo else 0)
    for key, dtype, lo, hi, raw in rows:
        if ends[key] > 10**6:
            wrong.append(f"{key} has {ends[key]} elements")
            continue
        whole = out.setdefault(key, torch.zeros(ends[key], dtype=dtype))
        count = times.setdefault(key, torch.zeros(ends[key], dtype=torch.int64))
        if whole.dtype is not dtype:
            wrong.append(f"{key} is {dtype} and {whole.dtype}")
        elif lo < hi:
            whole[lo:hi] = torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().view(dtype)
            count[lo:hi] += 1
    wrong += [f"{key}: an element is there {int(n.min())} to {int(n.max())} times" for key, n in times.items() if n.ne(1).any()]
    for name, row in facts.items():
        numel = 1
        for size in row["shape"]:
            numel *= size
        places = torch.zeros(1, dtype=torch.int64)
        for size, step in zip(row["shape"], row["stride"], strict=True):
            if numel <= 10**6:
                places = (places[:, None] + torch.arange(size) * step).flatten()
        if numel > 10**6 or places.sort().values.tolist() != list(range(numel)):
            wrong.append(f"the places of {name}")
        wrong += [
            f"{kind} of {name}" for kind, of in out if of == name and not kind.startswith(OBJECT) and ends[kind, of] != numel
        ]
    return out, wrong


def judge(files: Files, shapes: dict[str, tuple[int, ...]], chosen: random.Random) -> bool:
    """Whether lowtide accepts it as far as that goes without a model. Raises AssertionError if it should not have, and lets
    nothing but a CheckpointError be raised inside."""
    try:
        manifest = parse_manifest(files[MANIFEST], "shaped")
        source = Source(MemoryFolder(files), manifest)
        for number, table in enumerate(source.tables):
            for block in range(len(table.blocks)):
                source.read_block(number, block)
    except CheckpointError:
        return False
    found, wrong = meaning(files)
    assert not wrong, wrong
    examine(files, shapes)
    for (kind, name), whole in found.items():
        if kind.startswith(OBJECT) or not whole.numel():
            continue
        lo = chosen.randrange(whole.numel())
        hi = chosen.randrange(lo, whole.numel()) + 1
        out = torch.empty(hi - lo, dtype=whole.dtype)
        source.read_into(kind, name, lo, hi, out)
        assert _same(out, whole[lo:hi]), f"elements {lo}:{hi} of {kind} of {name}"
    return True


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def judge_load(forger: Forger, files: Files) -> str:
    """Write, verify, load and take a step: "refused", "mismatch" or "loaded". Raises AssertionError if what was loaded is not
    what the files mean, or if `verify` says one thing and a load another."""
    forger.write(files)
    verified = forger.verify()
    said = forger.load()
    if said.startswith("refused"):
        if forger.poisoned:
            forger.write(forger.files)
            assert forger.load() == "loaded", "the one after it"
        forger.train()
        return "refused" if verified != "verified" else "mismatch"
    unread = "the random numbers of rank 1" in verified  # one rank loads: those of another are not its business
    assert verified == "verified" or unread, f"loaded, and {verified}"
    found, wrong = meaning(files)
    assert not wrong, wrong
    facts = json.loads(files[TABLE])["objects"]["model"]
    name_of = {param: name for name, param in forger.model.named_parameters()}
    order = [name_of[param] for group in forger.optimizer.param_groups for param in group["params"]]
    whole = forger.optimizer.state_dict()["state"]
    for name, param in forger.model.state_dict().items():
        if name not in name_of.values():
            continue
        saved = name if name in facts["parameters"] else facts["aliases"][name]
        row = facts["parameters"][saved]
        kind = "masters" if DTYPES[row["dtype"]] is not param.dtype and ("masters", saved) in found else "parameters"
        value = found[kind, saved].as_strided(row["shape"], row["stride"]).to(param.dtype)
        assert _same(param, value), name
        for state, kept in whole.get(order.index(name), {}).items() if name in order else ():
            large = found.get((f"optimizer.{state}", saved))
            if large is not None and isinstance(kept, Tensor):
                assert _same(kept, large.as_strided(row["shape"], row["stride"]).to(kept.dtype)), (name, state)
    forger.train()
    return "loaded"


def fuzz(folder: Path, first: int, count: int, board: Board, load: bool, make: str, options: dict[str, Any]) -> dict[str, int]:
    """Cases ``first:first + count``, each known by its number alone; how many ended how. The board has that of the last."""
    logging.disable()
    options = {**options, "disk": str(folder)} if options.get("disk") else options
    forger = Forger(folder, OPTIMIZERS[make], **options)
    shaper = Shaper(forger)
    found: dict[str, int] = {}
    for seed in range(first, first + count):
        board[0] = seed
        chosen = random.Random(seed)
        files = shaper.shaped(chosen)
        try:
            end = judge_load(forger, files) if load else "accepted" if judge(files, forger.shapes, chosen) else "refused"
        except Exception as error:
            raise AssertionError(f"case {seed}: {type(error).__name__}: {error}") from error
        found[end] = found.get(end, 0) + 1
    return found


def in_chunks(folder: Path, first: int, count: int, load: bool, make: str, options: dict[str, Any]) -> dict[str, int]:
    """``fuzz`` in processes that one case may end; each does as many as are worth its start."""
    total: dict[str, int] = {}
    chunk = 2000 if load else 50_000
    for number, begin in enumerate(range(first, first + count, chunk)):
        board, own = Board(), folder / str(number)
        own.mkdir()
        child = start(fuzz, own, begin, min(chunk, first + count - begin), board, load, make, options, seconds=3000)
        ended = child.wait()
        assert ended.status == 0, f"case {board[0]}: exit status {ended.status}\n{ended.error}"
        for end, times in ended.value.items():
            total[end] = total.get(end, 0) + times
        shutil.rmtree(own)
    return total
