"""Measuring how ranks talk: all choose alike, whatever their clocks say, and once for all channels. Clocks are made up."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from lowtide.comm import Group, Label, TorchTransport, Wire, links
from lowtide.comm.codec import BF16, EXACT
from lowtide.comm.measuring import RAIL, SIZES, TRIES, measure
from lowtide.comm.transport import LinkBroken
from lowtide.comm.tuning import ALL_GATHER, BROADCASTS, EXCHANGE, HALVING, MOST_BUCKET_BYTES, Choice, Tuning
from lowtide.comm.two_level import TwoLevel
from lowtide.errors import DeadlineExceeded, PeerFailed
from tests.conformance.test_transport import BY_HALVING, TORCH, TUNINGS, Hosts, conform_in_sums, gather_parts, transport
from tests.kit.dist import run_ranks

Costs = dict[str, float]


class Clock:
    """It stands still but for the collectives of ``over``, each of which takes as long as its algorithm is said to."""

    def __init__(self, over: TorchTransport, costs: Costs) -> None:
        self.looks = 0
        self.now = 0.0
        gather, reduced = over.gather, over.reduced

        def slow_gather(*given: Any) -> None:
            self.now += costs[over.tuning.gather.at(0)]
            gather(*given)

        def slow_reduced(*given: Any) -> Any:
            self.now += costs[over.tuning.reduce.at(0)]
            return reduced(*given)

        over.gather, over.reduced = slow_gather, slow_reduced  # type: ignore[method-assign, assignment]

    def __call__(self) -> float:
        self.looks += 1
        return self.now


GATHERS = [{BROADCASTS: 3e-4, ALL_GATHER: 1e-4, EXCHANGE: 1e-4}, {BROADCASTS: 3e-4, ALL_GATHER: 1e-3, EXCHANGE: 1e-4}]
# Alone, ranks 0 and 1 would halve and the others would not.
REDUCES = [{BROADCASTS: 1e-4, ALL_GATHER: 1e-4, EXCHANGE: 9e-4 / (r + 1), HALVING: 1e-4 * (r + 2)} for r in range(4)]


class Never(BF16):
    """What a codec does is not the network's."""

    def encode(self, *given: Any) -> None:
        raise AssertionError("encoded")


def measured(rank: int, size: int, costs: list[Costs]) -> tuple[Tuning, int]:
    with transport(TORCH) as over:
        assert isinstance(over, TorchTransport)
        clock = Clock(over, costs[rank])
        before = over.tuning
        codec = Never()
        over.use_codec(codec)
        found = measure(over, over, over.candidates, clock)
        assert over.tuning == before, "measuring changes nothing by itself"
        assert over.codec is codec
        over.use_codec(EXACT)
        assert over.buffer_bytes == 0
        assert over.crossing_seconds == 0
        del over.gather, over.reduced  # as they were
        over.tune(found)
        conform_in_sums(over)
        gather_parts(over, [64] * size)
        assert over.bucket_bytes == found.bucket_bytes
        return found, clock.looks


def test_the_slowest_rank_counts_for_all() -> None:
    for found, _ in run_ranks(2, measured, GATHERS):
        assert found.gather == Choice.always(BROADCASTS), "all-gather is faster on rank 0 only"
    for found, _ in run_ranks(2, measured, GATHERS[:1] * 2):
        assert found.gather == Choice.always(ALL_GATHER)


def test_four_ranks_with_four_clocks_choose_alike() -> None:
    found = run_ranks(4, measured, REDUCES)
    assert found == found[:1] * 4
    assert found[0][0].reduce == Choice.always(HALVING)


@pytest.mark.parametrize("slow", [0, 1])
def test_all_stop_where_one_is_slow(slow: int) -> None:
    """Or the others would wait for it at the next size."""
    costs = [dict.fromkeys(GATHERS[0], 1e-4), dict.fromkeys(GATHERS[0], 1e-4)]
    costs[slow] = dict.fromkeys(GATHERS[0], 0.04)
    candidates = 3  # two ways to gather, one to reduce
    for found, looks in run_ranks(2, measured, costs):
        assert looks == 1 + candidates * 2, "more than one try of the smallest size"
        assert found.latency == pytest.approx(0.04)
        assert found.bucket_bytes == MOST_BUCKET_BYTES
    for _, looks in run_ranks(2, measured, GATHERS):
        assert looks == 1 + len(SIZES) * candidates * TRIES * 2


def measured_on_rails(rank: int, size: int, hosts: Hosts) -> tuple[Tuning, int, float]:
    with transport(hosts) as over:
        assert isinstance(over, TwoLevel)
        rail = over._rail
        now = [0.0]

        def clock() -> float:
            now[0] += 1e-4 * (over.local.rank + 1)  # the second rail is slower
            return now[0]

        found = measure(rail, over, RAIL, clock)
        rail.tune(found)
        return found, over.bucket_bytes, found.latency


def test_rails_agree() -> None:
    found = run_ranks(4, measured_on_rails, ((0, 1), (2, 3)))
    assert found == found[:1] * 4
    assert found[0][2] == pytest.approx(2e-4, rel=0.01)
    assert found[0][1] == found[0][0].bucket_bytes


# -- once for all channels --------------------------------------------------------------------------------------------------


def counted(how: str, mesh: tuple[int, int] | None, codec: str) -> tuple[int, list[Any]]:
    """How often something was measured, and what the transports of three channels then do."""
    calls: list[TorchTransport] = []

    def spy(over: TorchTransport, *rest: Any) -> Tuning:
        calls.append(over)
        made = TUNINGS[BY_HALVING] if over.size == 4 else TUNINGS[TORCH]
        return Tuning(made.gather, made.reduce, 1.0, 1.0, (1 << 20) + over.size)

    real, links.measure = links.measure, spy
    try:
        group = Group.join(init_device_mesh("cpu", mesh) if mesh else None, deadline=20, transport=how, codec=codec)
        channels = [group.channel(name) for name in ("one", "two", "three")]
    finally:
        links.measure = real

    def look(wire: Wire, notes: list[bytes]) -> list[Any]:
        axes = (wire.shard, wire.replicate, wire.world)
        return [
            (axis.bucket_bytes, axis.tuning.reduce == TUNINGS[BY_HALVING].reduce, axis.codec.name)
            for axis in axes
            if isinstance(axis, TorchTransport)
        ]

    seen = [channel.run(Label("look", 0, "axes"), look) for channel in channels]
    group.close()
    assert seen == seen[:1] * 3
    return len(calls), seen[0]


def counts(rank: int, size: int) -> list[Any]:
    bf16 = BF16().name
    return [counted("torch", None, "exact"), counted("torch", (2, 2), bf16), counted("auto", None, "exact")]


def test_measured_once_per_set_of_ranks() -> None:
    all_four, pair = ((1 << 20) + 4, True), ((1 << 20) + 2, False)
    for flat, mesh, shared in run_ranks(4, counts):
        assert flat == (1, [(*all_four, "exact")] * 2), "the shard axis and the world are the same ranks"
        assert mesh == (3, [(*pair, "bf16"), (*pair, "bf16"), (*all_four, "bf16")])
        assert shared == (0, [])


def hanging(rank: int, size: int, who: int) -> tuple[str, str]:
    """Rank ``who`` does not come out of a measurement."""
    real = links.measure

    def late(*given: Any) -> Tuning:
        group.deadlines.settled()
        if rank == who:
            time.sleep(4)
        return real(*given)

    links.measure = late
    group = Group.join(None, deadline=1, first_deadline=60, transport="torch")  # a rank may be slow to begin
    error: PeerFailed | DeadlineExceeded | None = None
    try:
        group.channel("one")
    except (PeerFailed, DeadlineExceeded) as raised:
        error = raised
    finally:
        links.measure = real
    group.close()
    assert error is not None
    return type(error).__name__, error.report


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_hangs_meanwhile_is_in_everybody_s_report(who: int) -> None:
    ends = run_ranks(3, hanging, who)
    assert "DeadlineExceeded" in [name for name, _ in ends]
    for _, report in ends:
        assert "measure of 'the network'" in report.splitlines()[0]
        assert re.search(r"lowtide-one: .* in late$", report, re.MULTILINE), "where the rank that hangs is"


def losing(rank: int, size: int) -> str:
    def broken(*given: Any) -> Tuning:
        raise LinkBroken("closed by peer")

    real, links.measure = links.measure, broken
    group = Group.join(None, deadline=5, transport="torch")
    try:
        with pytest.raises(PeerFailed) as caught:
            group.channel("one")
    finally:
        links.measure = real
    group.close()
    return str(caught.value)


def test_a_connection_that_is_lost_meanwhile_is_told() -> None:
    for text in run_ranks(2, losing):
        assert "measure of 'the network'" in text


def really(rank: int, size: int) -> tuple[Tuning, list[str]]:
    """With the real clock: only what must hold for any times."""
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lowtide.comm.measuring")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with transport(TORCH) as over:
            assert isinstance(over, TorchTransport)
            found = measure(over, over, over.candidates)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return found, lines


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_agree_by_the_real_clock(size: int) -> None:
    found = run_ranks(size, really)
    tuning = found[0][0]
    assert all(other == tuning for other, _ in found)
    assert tuning.latency > 0
    assert [len(lines) for _, lines in found] == [1] + [0] * (size - 1)
    assert f"{size} ranks gather by {tuning.gather}; reduce by {tuning.reduce}" in found[0][1][0]
    assert ("halving" in found[0][1][0]) == (size == 4)
