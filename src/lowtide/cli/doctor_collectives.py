"""How long gathers and reductions between two ranks of this host take, on each transport and for several sizes.

The transports are those that a job uses, so this stands above them and not beside the other probes.

``python -m lowtide.cli.doctor_collectives RANK FOLDER PLAN`` is one of the two ranks.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lowtide.spec.hardware import Collective
from lowtide.spec.probe_ranks import RANKS, answer, ask_two_ranks, be_one_of_two, gloo_of_two, wrong_answer

if TYPE_CHECKING:
    from lowtide.comm.transport import Transport

REPEATS: dict[int, int] = {64 << 10: 60, 1 << 20: 30, 16 << 20: 8}
"""How often each number of bytes is timed."""
DEADLINE_SECONDS = 15.0
"""Of which the two need most to start."""
_WAIT_SECONDS = 10.0
_WIDTH = 24


def measure_collectives(*, deadline: float = DEADLINE_SECONDS, repeats: dict[int, int] | None = None) -> tuple[Collective, ...]:
    """Start two ranks and time them. Raises PeerFailed or DeadlineExceeded, and leaves no process behind. A transport that this
    system does not have is left out."""
    found = ask_two_ranks(
        "lowtide.cli.doctor_collectives",
        REPEATS if repeats is None else repeats,
        what="two processes that gather and reduce",
        deadline=deadline,
    )
    try:
        return tuple(Collective(**sample) for sample in found)
    except TypeError as error:
        raise wrong_answer(found) from error


def collective_lines(found: Sequence[Collective]) -> list[str]:
    """A row per transport and verb, a column per size."""
    from lowtide.planning.text import seconds_text, size_text

    sizes = sorted({sample.nbytes for sample in found})
    lines = [f"{'collectives':<18}" + "".join(f"{size_text(nbytes):>{_WIDTH}}" for nbytes in sizes)] if sizes else []
    for transport, verb in dict.fromkeys((sample.transport, sample.verb) for sample in found):
        row = {s.nbytes: s.seconds for s in found if (s.transport, s.verb) == (transport, verb)}
        cells = [f"{seconds_text(row[n])}, {n / row[n] / 1e9:.2f} GB/s" if n in row else "" for n in sizes]
        lines.append(f"  {transport:<8}{verb:<8}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells))
    return lines


# -- one of the two ranks ----------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Rank 0 answers a list of samples."""
    import torch

    torch.set_num_threads(1)
    rank, folder = int(arguments[0]), arguments[1]
    repeats = {int(nbytes): int(number) for nbytes, number in json.loads(arguments[2]).items()}
    transports = _transports(rank, folder)
    samples: list[dict[str, Any]] = []
    for name, over in transports.items():
        for verb, make in (("gather", _gather), ("reduce", _reduce)):
            for nbytes, number in repeats.items():
                seconds = _seconds(over, make(over, nbytes), number)
                samples.append({"transport": name, "verb": verb, "nbytes": nbytes, "seconds": seconds})
    if rank == 0:
        answer(samples)


def _transports(rank: int, folder: str) -> dict[str, Transport]:
    import torch

    from lowtide.comm import futex
    from lowtide.comm.local import LocalTransport
    from lowtide.comm.shared import CannotShare
    from lowtide.comm.transport import TorchTransport

    over_gloo = TorchTransport(gloo_of_two(rank, folder))

    def share(mine: bytes) -> list[bytes]:
        rows = over_gloo.all_gather_small(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        return [row.numpy().tobytes() for row in rows]

    found: dict[str, Transport] = {"torch": over_gloo}
    if futex.available():
        try:
            found["shared"] = LocalTransport(rank, RANKS, share=share, timeout=_WAIT_SECONDS)
        except CannotShare as error:  # both ranks hear of it, so both leave it out
            sys.stderr.write(f"{error}\n")
    return found


def _gather(over: Transport, nbytes: int) -> Callable[[], None]:
    import torch

    whole = torch.ones(nbytes, dtype=torch.uint8)
    cuts = [nbytes * rank // over.size for rank in range(over.size + 1)]
    return lambda: over.gather(whole, cuts)


def _reduce(over: Transport, nbytes: int) -> Callable[[], None]:
    import torch

    count = nbytes // 4 // over.size
    numbers = torch.ones(count * over.size)

    def fill(buffer: torch.Tensor) -> None:
        buffer.copy_(numbers)

    def reduce() -> None:
        with over.reduced([count] * over.size, torch.float32, fill):
            pass

    return reduce


def _seconds(over: Transport, action: Callable[[], None], repeats: int) -> float:
    """The median over ``repeats`` of the slower rank's seconds; the first one, which takes the memory, does not count."""
    import torch

    times: list[float] = []
    for _ in range(repeats + 1):
        over.all_gather_small(torch.zeros(1))  # all begin together
        before = time.perf_counter()
        action()
        times.append(time.perf_counter() - before)
    slower = over.all_gather_small(torch.tensor(times[1:], dtype=torch.float64)).amax(dim=0)
    return statistics.median(slower.tolist())


if __name__ == "__main__":
    be_one_of_two(main)
