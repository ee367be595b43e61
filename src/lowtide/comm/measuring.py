"""How fast some ranks talk, by algorithm and size: measured once, as the first work of the first channel that connects them.

[Note: bounded] It starts small. A larger size is tried only if the last one, scaled, would be over in a moment, and everything
ends with the first exchange that took long, or that was over when all together had. Every algorithm has been tried once by
then, at the smallest size. On a slow link little is known afterwards, and little has been waited for.

[Note: all ranks see the same] After every try all ranks show each other their times; what counts is the slowest rank, and the
middle of a few tries. So all of them go on, stop and choose alike, whatever each of their clocks said.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from lowtide.comm.codec import EXACT
from lowtide.comm.transport import TorchTransport, Transport
from lowtide.comm.tuning import EXCHANGE, Choice, Tuning, bucket_bytes, choose, fixed_and_speed

_log = logging.getLogger(__name__)

SIZES = (16 << 10, 256 << 10, 2 << 20)
"""In bytes, one after the other."""
TRIES = 3
"""How often each is timed; the first time takes the memory, and others may be disturbed."""
ONE_SECONDS = 0.03
"""Longer than this no exchange is meant to take."""
ALL_SECONDS = 0.1
"""After which nothing is begun."""

Candidates = Mapping[str, Sequence[str]]
"""The algorithms to choose among for ``gather`` and for ``reduce``, the usual one first."""
Timed = Mapping[tuple[str, str], Mapping[int, float]]
"""Seconds by verb and algorithm, and by bytes."""
RAIL: Candidates = {"reduce": (EXCHANGE,)}
"""Between hosts there is one way for each; what is asked is how much it should handle at once."""


def measure(
    over: TorchTransport,
    everyone: Transport,
    candidates: Candidates,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuning:
    """Collective over ``everyone``: the ranks of ``over`` itself, or of all rails that work side by side with it. Reductions
    are timed even where there is one way only, because buckets are sized by them."""
    before, codec = over.tuning, over.codec
    over.use_codec(EXACT)  # how long it takes to encode is not the network's
    verbs = sorted(candidates, reverse=True)  # reductions first: most depends on them
    timed = {(verb, name): dict[int, float]() for verb in verbs for name in candidates[verb] if _needed(verb, candidates)}
    began, late = clock(), False

    def slowest(action: Callable[[], None]) -> float:
        """Of all ranks, which then are together again; whether it becomes late."""
        nonlocal late
        start = clock()
        action()
        end = clock()
        mine = torch.tensor([end - start, end - began], dtype=torch.float64)
        took, spent = everyone.all_gather_small(mine).amax(dim=0).tolist()
        late = took > ONE_SECONDS or spent > ALL_SECONDS
        return took

    for nbytes, larger in zip(SIZES, [*SIZES[1:], 0], strict=True):
        quickest = math.inf
        for (verb, name), samples in timed.items():
            chosen = Choice.always(name)
            over.tune(Tuning(chosen, before.reduce) if verb == "gather" else Tuning(before.gather, chosen))
            action = _gather(over, nbytes) if verb == "gather" else _reduce(over, nbytes)
            tries = [slowest(action)]
            while len(tries) < TRIES and not late:
                tries.append(slowest(action))
            # The first may have been slow, because it takes the memory, or quick, because a slow link let a burst through.
            samples[nbytes] = median(tries)
            quickest = min(quickest, samples[nbytes])
            if late and nbytes != SIZES[0]:
                break
        if late or quickest * larger / nbytes > ONE_SECONDS:
            break
    over.tune(before)
    over.use_codec(codec)
    over.forget()
    found = _tuning(timed, before, rails=everyone.size // over.size)
    if everyone.rank == 0:
        _log.info("%s", _told(found, timed, everyone.size))
    return found


def _told(tuning: Tuning, timed: Timed, ranks: int) -> str:
    sizes = list(next(iter(timed.values())))
    times = (f"{verb} by {name} {', '.join(f'{t * 1e3:.2f}' for t in s.values())}" for (verb, name), s in timed.items())
    return (
        f"{ranks} ranks gather by {tuning.gather}; reduce by {tuning.reduce}, {tuning.bucket_bytes >> 20} MiB at a time "
        f"(fixed {tuning.latency * 1e3:.2f} ms, {tuning.bandwidth / 1e9:.2f} GB/s). "
        f"Milliseconds for {', '.join(map(str, sizes))} bytes: {'; '.join(times)}"
    )


def _needed(verb: str, candidates: Candidates) -> bool:
    return verb == "reduce" or len(candidates[verb]) > 1


def _tuning(timed: Timed, before: Tuning, rails: int) -> Tuning:
    by_verb: dict[str, dict[str, Mapping[int, float]]] = {}
    for (verb, name), samples in timed.items():
        by_verb.setdefault(verb, {})[name] = samples
    gather = choose(by_verb["gather"]) if "gather" in by_verb else before.gather
    reduce = choose(by_verb["reduce"])
    used = {n: t for name, samples in by_verb["reduce"].items() for n, t in samples.items() if reduce.at(n) == name}
    fixed, speed = fixed_and_speed(used)
    speed *= rails  # each handles its part of a reduction at the same time
    return Tuning(gather, reduce, fixed, speed, bucket_bytes(fixed, speed))


def _gather(over: TorchTransport, nbytes: int) -> Callable[[], None]:
    part = max(nbytes // over.size, 1)
    whole = torch.zeros(part * over.size, dtype=torch.uint8)
    return lambda: over.gather(whole, range(0, whole.numel() + 1, part))


def _reduce(over: TorchTransport, nbytes: int) -> Callable[[], None]:
    counts = [nbytes // 4 // over.size] * over.size

    def fill(buffer: torch.Tensor) -> None:
        buffer.zero_()

    def reduce() -> None:
        with over.reduced(counts, torch.float32, fill):
            pass

    return reduce
