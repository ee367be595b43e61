"""How fast some ranks talk, by algorithm and size: measured once, when they have just been connected.

[Note: bounded] It starts small. A larger size is tried only if the last one, scaled, would be over in a moment, and if all of
it has not taken long so far. On a slow link little is known then, and little has been waited for.

[Note: all ranks see the same] After every size all ranks show each other their times; what counts is the slowest rank, and the
best of a few tries. So all of them go on, stop and choose alike, whatever each of their clocks said.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

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
"""After which nothing larger is begun."""

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
    before = over.tuning
    timed = {(verb, name): dict[int, float]() for verb in candidates for name in candidates[verb] if _needed(verb, candidates)}
    began = clock()
    for nbytes, larger in zip(SIZES, [*SIZES[1:], 0], strict=True):
        mine = list[list[float]]()
        for verb, name in timed:
            chosen = Choice.always(name)
            over.tune(Tuning(chosen, before.reduce) if verb == "gather" else Tuning(before.gather, chosen))
            mine.append(_times(everyone, _gather(over, nbytes) if verb == "gather" else _reduce(over, nbytes), clock))
        mine.append([clock() - began] * TRIES)
        *times, spent = everyone.all_gather_small(torch.tensor(mine, dtype=torch.float64)).amax(dim=0).tolist()
        for samples, tries in zip(timed.values(), times, strict=True):
            samples[nbytes] = min(tries)
        shortest = min(samples[nbytes] for samples in timed.values())
        if shortest * larger / nbytes > ONE_SECONDS or spent[0] > ALL_SECONDS:
            break
    over.tune(before)
    over.forget()
    found = _tuning(timed, before, rails=everyone.size // over.size)
    if everyone.rank == 0:
        _log.info("%s", _told(found, timed, everyone.size))
    return found


def _told(tuning: Tuning, timed: Timed, ranks: int) -> str:
    sizes = list(next(iter(timed.values())))
    times = (f"{verb} by {name} {', '.join(f'{s[n] * 1e3:.2f}' for n in sizes)}" for (verb, name), s in timed.items())
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
    fixed, speed = fixed_and_speed({n: by_verb["reduce"][reduce.at(n)][n] for n in next(iter(timed.values()))})
    speed *= rails  # each handles its part of a reduction at the same time
    return Tuning(gather, reduce, fixed, speed, bucket_bytes(fixed, speed))


def _times(everyone: Transport, action: Callable[[], None], clock: Callable[[], float]) -> list[float]:
    everyone.all_gather_small(torch.zeros(1))  # all begin together
    found: list[float] = []
    for _ in range(TRIES):
        began = clock()
        action()
        found.append(clock() - began)
    return found


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
