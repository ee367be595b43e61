"""Whether something that was dropped is gone, and what keeps it if it is not."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

_PATIENCE = 20.0  # seconds
_STEPS_BACK = 5


def collected(*refs: weakref.ref[Any]) -> None:
    """Fails if one of them stays. Not at once: ``gc.collect`` does nothing while another thread collects, and a thread may be
    about to let go."""
    end = time.monotonic() + _PATIENCE
    gc.collect()
    while any(ref() is not None for ref in refs) and time.monotonic() < end:
        time.sleep(0.02)
        gc.collect()
    kept = [ref for ref in refs if ref() is not None]
    assert not kept, f"{len(kept)} of {len(refs)} are still referenced; what leads to the first:\n{_referrers(kept[0])}"


def _referrers(ref: weakref.ref[Any]) -> str:
    found, seen, lines = [ref()], set[int](), list[str]()
    for _ in range(_STEPS_BACK):
        seen |= {id(thing) for thing in (found, seen, lines, *found)}
        found = [r for thing in found for r in gc.get_referrers(thing) if id(r) not in seen and not hasattr(r, "f_code")]
        lines += [f"{type(r).__name__}: {r!r:.200}" for r in found[:10]]
    return "\n".join(lines)
