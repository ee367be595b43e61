"""One rank that trains a preset for a few steps and counts what passes between the ranks in the last of them.

Its argument is a JSON object with ``preset``, ``stage``, ``rank``, ``world_size`` and ``rendezvous``; it prints a JSON list of
``[verb, unit, kind of exchange, bytes]``, in the order of each channel. Ranks talk over torch.distributed, because ranks that
share memory have no gathers to count.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

import lowtide
from lowtide.api import engine_of
from lowtide.comm.channel import Channel, Label, Wire
from lowtide.job.models import build_model
from lowtide.job.options import Options

STEPS = 3  # in the first the order of units is not known yet


class Counting:
    """A transport that notes what is asked of it, and asks another to do it."""

    def __init__(self, channel: Channel, transport: Any, seen: list[tuple[str, int, str, int]]) -> None:
        self._channel, self._transport, self._seen = channel, transport, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def gather(self, whole: torch.Tensor, cuts: Any) -> None:
        self._note("gather", cuts[-1] - cuts[0])
        self._transport.gather(whole, cuts)

    def reduced(self, counts: Any, dtype: torch.dtype, fill: Any, *, whole: bool = False) -> Any:
        self._note("reduce to all" if whole else "reduce", sum(counts) * dtype.itemsize)
        return self._transport.reduced(counts, dtype, fill, whole=whole)

    def _note(self, how: str, nbytes: int) -> None:
        at = self._channel._current  # what the channel's thread, which is this one, works at
        if at is not None:
            self._seen.append((at.label.kind, at.label.unit, how, nbytes))


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rendezvous = f"file://{order['rendezvous']}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=order["rank"], world_size=order["world_size"])
    torch.manual_seed(0)
    built = build_model(Options(preset=order["preset"]))
    optimizer = torch.optim.AdamW(built.model.parameters())
    model, optimizer = lowtide.shard(
        built.model, optimizer, stage=order["stage"], comm=lowtide.Comm(transport="torch"), activations="keep"
    )
    engine = engine_of(model)
    seen: dict[str, list[tuple[str, int, str, int]]] = {}
    for channel in (engine.gathers, engine.reductions):
        wire, mine = channel._wire, seen.setdefault(channel.name, [])
        channel._wire = Wire(Counting(channel, wire.shard, mine), wire.replicate, wire.world)
    for _ in range(STEPS):
        for mine in seen.values():
            mine.clear()
        tokens = torch.randint(0, 256, (2, 64))
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        for channel in (engine.gathers, engine.reductions):  # all that the step has asked for is done
            channel.run(Label("mark", -1, "the end of a step"), lambda _, __: None)
    print(json.dumps([list(note) for mine in seen.values() for note in mine]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
