"""Where a leak comes from: what there is more of now than when it was first suspected.

Looked for only once something is suspected, and again when it is certain, so that a healthy run pays nothing. With
``PYTHONTRACEMALLOC=1`` in the environment, Python itself remembers who allocated what, and the line of code is named as well.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import tracemalloc
from collections import Counter
from typing import cast

from torch import Tensor, nn

from lowtide.planning.text import size_text
from lowtide.reporting.leaks import FILE_DESCRIPTORS, NOT_OURS, SPOOL, THREADS
from lowtide.reporting.unit_bytes import held_by_unit
from lowtide.runtime.engine import Engine
from lowtide.tiers.store import Extent, Store

_NUMBER = re.compile(r"\d+")


class Scene:
    """What there was at one moment, as far as it can tell about ``series``."""

    def __init__(self, series: str, engine: Engine) -> None:
        self._series = series
        self._things: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._snapshot: tracemalloc.Snapshot | None = None
        if series == FILE_DESCRIPTORS:
            self._things.update(_open_files())
        elif series == THREADS:
            self._things.update(_NUMBER.sub("N", thread.name) for thread in threading.enumerate())
        elif series == SPOOL:
            for name, nbytes in _extents(engine.store):
                self._things[name] += 1
                self._bytes[name] += nbytes
        elif series == NOT_OURS:
            self._look_at_tensors()
        else:
            self._bytes.update(held_by_unit(engine, series.partition(" ")[2]))
        if tracemalloc.is_tracing():
            self._snapshot = tracemalloc.take_snapshot()

    def _look_at_tensors(self) -> None:
        seen: set[int] = set()
        for thing in gc.get_objects():
            if type(thing) not in (Tensor, nn.Parameter):  # kinds of somebody's own may answer anything, or do it slowly
                continue
            with contextlib.suppress(Exception):  # a tensor without memory
                storage = thing.untyped_storage()
                if storage.data_ptr() in seen:
                    continue
                seen.add(storage.data_ptr())
                name = f"{str(thing.dtype).removeprefix('torch.')} {list(thing.shape)}"
                self._things[name] += 1
                self._bytes[name] += storage.nbytes()

    def what_is_new(self, before: Scene) -> str:
        """In words; empty if nothing stands out."""
        more = self._things - before._things
        sized = self._bytes - before._bytes
        parts: list[str] = []
        if more:
            ranked = sized if sized else more
            name = ranked.most_common(1)[0][0]
            size = f", {size_text(sized[name])}" if sized.get(name) else ""
            what = {FILE_DESCRIPTORS: "open", THREADS: "threads named", NOT_OURS: "tensors"}.get(self._series, "extents for")
            parts.append(f"since it was noticed: {more[name]} more {what} {name}{size}")
        elif sized:
            name = sized.most_common(1)[0][0]
            parts.append(f"since it was noticed: {size_text(sized[name])} more for {name}")
        if self._snapshot is not None and before._snapshot is not None:
            lines = self._snapshot.compare_to(before._snapshot, "lineno")
            grown = [line for line in lines if line.size_diff > 0 and tracemalloc.__file__ not in str(line.traceback)]
            if grown:
                frame = grown[0].traceback[0]
                parts.append(f"allocated at {frame.filename}:{frame.lineno}")
        elif self._series == NOT_OURS:
            parts.append("PYTHONTRACEMALLOC=1 would name the line of code")
        return "; ".join(parts)


def _open_files() -> list[str]:
    """What every file descriptor leads to; numbers are left out, so that things of one sort count together."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append(_NUMBER.sub("N", os.readlink(f"/proc/self/fd/{name}")))
    return found


def _extents(store: Store | None) -> list[tuple[str, int]]:
    """Every extent of a store that can say so: its unit and kind, and its bytes."""
    listed = getattr(store, "extents", None)
    extents = cast("list[Extent]", listed()) if callable(listed) else []
    return [(f"{_NUMBER.sub('N', e.key.kind)} of {e.key.unit!r}", e.nbytes) for e in extents]
