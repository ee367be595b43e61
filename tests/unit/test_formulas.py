"""The memory formulas on cases that are small enough to be worked by hand. Real runs are held to them in tests/memory."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.config import Partition
from lowtide.errors import ArgumentError
from lowtide.planning.blocks import share_of_nodes, total_seconds
from lowtide.planning.formulas import (
    PRECISIONS,
    Home,
    PhaseBytes,
    Setting,
    UnitBytes,
    describe_states,
    from_precision,
    peak,
    phase_table,
    states_bytes_per_rank,
    unit_from_facts,
    unit_from_layout,
)
from lowtide.planning.placement import Tier, UnitPlacement
from lowtide.spec.layout import ParamShape, lay_out
from lowtide.spec.model import UnitFacts
from lowtide.stages import STAGES

MB, GB, TB = 10**6, 10**9, 10**12


# -- states -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "optimizer", "total"),
    [
        ("fp32", "adam", 16),
        ("fp32", "sgd", 8),
        ("fp32", "sgd-momentum", 12),
        ("mixed", "adam", 16),
        ("mixed", "sgd", 8),
        ("bf16", "adamw", 18),
        ("fp16", "sgd-momentum", 14),
        ("pure-bf16", "adam", 8),
    ],
)
def test_bytes_per_parameter(precision: str, optimizer: str, total: int) -> None:
    assert from_precision(precision, optimizer).total == total


def test_every_named_precision_can_be_described() -> None:
    for word, kinds in PRECISIONS.items():
        described = describe_states(1000, 1, 0, word)
        assert described["states_bytes_per_rank"] == described["states_bytes"] == 1000 * kinds.total


def test_the_command_of_the_manual() -> None:
    """7.5e9 parameters on 64 ranks at stage 2: 2 x 7.5e9, and 14 x 7.5e9 / 64."""
    described = describe_states(7.5e9, 64, 2, "mixed")
    assert described["states_bytes_per_rank"] == 15_000_000_000 + 1_640_625_000
    assert described["parameters_bytes_per_rank"] == 15_000_000_000
    assert described["gradients_bytes_per_rank"] == 234_375_000
    assert described["optimizer_bytes_per_rank"] == 1_406_250_000
    assert all(type(v) in (int, str) for v in described.values())


def test_whole_bytes_are_rounded_up() -> None:
    described = describe_states(10, 3, 3, "fp32")
    assert described["parameters_bytes_per_rank"] == 14  # 40 / 3
    assert described["optimizer_bytes_per_rank"] == 27  # 80 / 3
    assert described["states_bytes_per_rank"] == 14 + 14 + 27


@pytest.mark.parametrize(
    "arguments",
    [(1e9, 0, 1, "fp32"), (-1, 1, 1, "fp32"), (math.inf, 1, 1, "fp32"), (1e9, 1, 4, "fp32"), (1e9, 1, 1, "fp8")],
)
def test_what_cannot_be_described(arguments: tuple[float, int, int, str]) -> None:
    with pytest.raises(ArgumentError):
        describe_states(*arguments)
    with pytest.raises(ArgumentError, match="optimizer is 'lion'"):
        from_precision("fp32", "lion")


def test_frozen_parameters_have_no_states() -> None:
    """LoRA: 1 % is trained. 100 parameters in bf16, of them 1 trained, on 2 ranks at stage 2."""
    states = states_bytes_per_rank(100, STAGES[2], 2, from_precision("bf16"), trained_numel=1)
    assert (states.parameters, states.gradients, states.optimizer) == (200, 2, 6)


@given(
    numel=st.integers(0, 10**13),
    ranks=st.integers(1, 4096),
    precision=st.sampled_from(sorted(PRECISIONS)),
)
def test_a_higher_stage_or_more_ranks_never_need_more(numel: int, ranks: int, precision: str) -> None:
    kinds = from_precision(precision)
    totals = [states_bytes_per_rank(numel, stage, ranks, kinds).total for stage in STAGES.values()]
    assert totals == sorted(totals, reverse=True)
    for stage in STAGES.values():
        more = states_bytes_per_rank(numel, stage, ranks + 1, kinds).total
        assert more <= states_bytes_per_rank(numel, stage, ranks, kinds).total
        described = describe_states(numel, ranks, stage.number, precision)
        exact = states_bytes_per_rank(numel, stage, ranks, kinds).total
        assert described["states_bytes_per_rank"] == pytest.approx(exact, abs=3, rel=1e-12)


# -- one unit -----------------------------------------------------------------------------------------------------------


def test_a_unit_with_the_engine_s_padding() -> None:
    """100 and 60 elements of 4 bytes on 2 ranks: 2 blocks of 64 and 1, hence 2 for each rank. Rank 0 has the 100."""
    layout = lay_out([ParamShape((100,), (1,), 4), ParamShape((60,), (1,), 4)], Partition(), 2)
    kinds = from_precision("fp32")
    first, second = (unit_from_layout("u", layout, rank, STAGES[3], kinds) for rank in (0, 1))
    assert (first.whole, first.parameters) == (4 * 256, 2 * 256)
    assert (first.gradients, first.optimizer) == (400, 800 + 4)
    assert (second.gradients, second.optimizer) == (240, 480 + 4)
    assert (first.reduction, second.reduction) == (2 * 400, 640), "rank 0 receives 100 elements from each, and sends 160"
    whole = unit_from_layout("u", layout, 0, STAGES[0], kinds)
    assert (whole.parameters, whole.gradients, whole.optimizer) == (4 * 256, 640, 1280 + 8)
    partly = unit_from_layout("u", layout, 1, STAGES[1], kinds)
    assert (partly.parameters, partly.gradients, partly.optimizer) == (4 * 256, 640, 480 + 4)


def test_a_unit_from_counts() -> None:
    facts = UnitFacts(
        name="u", numel=90, trained_numel=30, parameter_bytes=180, activation_bytes=7, input_bytes=3, transient_bytes=2
    )
    unit = unit_from_facts(facts, STAGES[2], 4, from_precision("bf16"))
    assert (unit.whole, unit.parameters) == (180, 180)
    assert (unit.gradients, unit.optimizer) == (30, 90)  # 4 x 30 / 4, 12 x 30 / 4
    assert (unit.local_gradients, unit.reduction) == (60, 120)
    assert (unit.activations, unit.inputs, unit.transient) == (7, 3, 2)
    assert unit_from_facts(facts, STAGES[3], 4, from_precision("bf16")).parameters == 45


@given(
    numels=st.lists(st.integers(1, 5000), min_size=1, max_size=5),
    ranks=st.integers(1, 5),
    stage=st.sampled_from(sorted(STAGES)),
)
def test_counts_and_layouts_agree_up_to_padding(numels: list[int], ranks: int, stage: int) -> None:
    layout = lay_out([ParamShape((n,), (1,), 4) for n in numels], Partition(), ranks)
    kinds = replace(from_precision("fp32"), counter=0)
    facts = UnitFacts(name="u", numel=sum(numels), trained_numel=sum(numels), parameter_bytes=4 * sum(numels))
    rough = unit_from_facts(facts, STAGES[stage], ranks, kinds)
    exact = [unit_from_layout("u", layout, rank, STAGES[stage], kinds) for rank in range(ranks)]
    padding = 4 * 64 * (len(numels) + ranks)
    assert all(0 <= unit.whole - rough.whole < padding for unit in exact)
    if STAGES[stage].optimizer:
        assert sum(unit.optimizer for unit in exact) == 8 * sum(numels), "the ranks together have each state once"
    else:
        assert all(unit.optimizer == 8 * sum(numels) for unit in exact)


# -- phases -------------------------------------------------------------------------------------------------------------

# three units in which every kind of bytes can be told from every other
UNITS = [
    UnitBytes(
        name=name,
        whole=size,
        parameters=size,
        gradients=2 * size,
        optimizer=3 * size,
        local_gradients=5 * size,
        reduction=7 * size,
        activations=1000 * size,
        inputs=100 * size,
        transient=10 * size,
    )
    for name, size in (("a", 1), ("b", 4), ("c", 2))
]
KEEP = [Home()] * 3


def row(table: tuple[PhaseBytes, ...], phase: str, unit: str = "", tier: str = "host") -> PhaseBytes:
    (found,) = [r for r in table if (r.phase, r.unit, r.tier) == (phase, unit, tier)]
    return found


def test_all_in_memory_on_one_rank() -> None:
    """Stage 0: states are 6 x 7, gradients are autograd's own, and activations grow and shrink."""
    units = [replace(u, local_gradients=u.gradients) for u in UNITS]
    table = phase_table(units, KEEP, Setting(stage=STAGES[0]))
    rest = row(table, "rest")
    assert (rest.parameters, rest.gradients, rest.optimizer, rest.total) == (7, 14, 21, 42)
    assert [row(table, "forward", u).activations for u in "abc"] == [1010, 5040, 7020]
    assert [row(table, "backward", u).activations for u in "cba"] == [7020, 5040, 1010]
    assert [row(table, "reduce", u).activations for u in "cba"] == [5000, 1000, 0]
    assert all(r.slots == r.buffers == r.in_flight == 0 for r in table)
    assert row(table, "update").total == rest.total
    assert peak(table).phase == "forward"
    assert peak(table).total == 42 + 7020
    assert peak(table, "disk").total == 0
    assert peak(table, "device").total == 0


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_that_are_kept_elsewhere_arrive_beside_them(stage: int) -> None:
    """In another width (bf16 to fp32), or where gradients are sharded, also on one rank: one unit's at a time."""
    table = phase_table(UNITS, KEEP, Setting(stage=STAGES[stage]))
    assert [row(table, "backward", u).in_flight for u in "cba"] == [10, 20, 5]
    assert [row(table, "reduce", u).in_flight for u in "cba"] == [10, 20, 5]
    assert row(table, "update").in_flight == row(table, "forward", "c").in_flight == 0


def test_several_ranks_have_slots_and_buffers() -> None:
    """Stage 3: at most three slots and two buffers of the largest unit; the gradients of two units are on their way."""
    table = phase_table(UNITS, KEEP, Setting(stage=STAGES[3], world_size=2, outside_activations=9))
    assert {(r.slots, r.buffers) for r in table if r.tier == "host"} == {(3 * 4, 2 * 28)}
    assert [row(table, "backward", u).in_flight for u in "cba"] == [10, 30, 25]
    assert row(table, "forward", "a").activations == 1010 + 9
    two = phase_table(UNITS[:2], KEEP[:2], Setting(stage=STAGES[3], world_size=2))
    assert row(two, "rest").slots == 2 * 4, "no more slots than units"
    assert row(phase_table(UNITS, KEEP, Setting(stage=STAGES[2], world_size=2)), "rest").slots == 0, "parameters are whole"


@pytest.mark.parametrize(
    ("policy", "forward", "backward", "disk"),
    [
        ("keep", [1010, 5040, 7020], [7020, 5040, 1010], [0, 0, 0]),
        # inputs of all units so far; in backward the unit's own activations again
        ("recompute", [110, 540, 720], [500 + 200 + 2020, 100 + 400 + 4040, 100 + 1010], [0, 0, 0]),
        # 600 are under way at most
        ("disk", [10 + 600, 40 + 600, 20 + 600], [20 + 600, 40 + 600, 10 + 600], [1000, 5000, 7000]),
        ("host", [1010, 5040, 7020], [7020, 5040, 1010], [0, 0, 0]),  # the host is where they are
    ],
)
def test_activation_policies(policy: str, forward: list[int], backward: list[int], disk: list[int]) -> None:
    table = phase_table(UNITS, [Home(activations=policy)] * 3, Setting(stage=STAGES[0], spill_buffers=600))
    assert [row(table, "forward", u).activations for u in "abc"] == forward
    assert [row(table, "backward", u).activations for u in "cba"] == backward
    assert [row(table, "forward", u, "disk").activations for u in "abc"] == disk


def test_policies_unit_by_unit() -> None:
    homes = [Home(activations=p) for p in ("recompute", "keep", "disk")]
    table = phase_table(UNITS, homes, Setting(stage=STAGES[0], spill_buffers=10**9))
    assert row(table, "forward", "c").activations == 100 + 4000 + 2000 + 20
    assert row(table, "reduce", "b").activations == 100
    assert row(table, "backward", "c", "disk").activations == 2000
    assert row(table, "backward", "b", "disk").activations == 0, "read back and gone"


def test_states_on_disk() -> None:
    """Parameters of b, all gradients, and half of a's and all of c's optimizer states are on disk."""
    homes = [
        Home(gradients=0, optimizer=0.5),
        Home.of(UnitPlacement(Tier.DISK, Tier.DISK, Tier.HOST, "keep")),
        Home(gradients=0, optimizer=0),
    ]
    table = phase_table(UNITS, homes, Setting(stage=STAGES[3], chunk_buffers=50))
    host, disk = row(table, "rest"), row(table, "rest", tier="disk")
    assert (host.parameters, host.gradients, host.optimizer) == (3, 0, 2 + 12)
    assert (disk.parameters, disk.gradients, disk.optimizer) == (4, 14, 1 + 6)
    assert (host.slots, host.buffers) == (4, 50), "one unit is not at home in memory; no reduction on one rank"
    assert host.parameters + disk.parameters + host.gradients + disk.gradients + host.optimizer + disk.optimizer == 42


def test_updates_in_backward_keep_no_gradients() -> None:
    for ranks, in_flight in ((1, [10, 20, 5]), (2, [10 + 4, 30 + 8, 25 + 2])):
        setting = Setting(stage=STAGES[3], world_size=ranks, in_backward=True)
        table = phase_table(UNITS, KEEP, setting)
        assert all(r.gradients == 0 for r in table)
        assert [row(table, "reduce", u).in_flight for u in "cba"] == in_flight


def test_a_device_apart() -> None:
    """Homes are on the host, compute is on the device; units on disk pass through host memory."""
    homes = [Home(activations="host"), Home(parameters=0, activations="keep"), Home(activations="disk")]
    setting = Setting(stage=STAGES[3], world_size=2, apart=True, spill_buffers=300, chunk_buffers=50)
    table = phase_table(UNITS, homes, setting)
    device, host = row(table, "rest", tier="device"), row(table, "rest")
    assert (device.parameters, device.slots, device.buffers) == (0, 12, 56)
    assert (host.parameters, host.slots, host.buffers) == (3, 4, 50)
    assert row(table, "forward", "c", "device").activations == 4000 + 20 + 300
    assert row(table, "forward", "c", "host").activations == 1000
    assert row(table, "forward", "c", "disk").activations == 2000
    assert row(table, "backward", "b", "device").in_flight == 30
    assert row(table, "backward", "b", "host").in_flight == 0
    assert peak(table, "device").unit == "b"


def test_tables_that_cannot_be() -> None:
    for homes in ([Home()], [Home(optimizer=1.1)] * 3, [Home(activations="auto")] * 3):
        with pytest.raises(ArgumentError):
            phase_table(UNITS, homes, Setting(stage=STAGES[0]))
    with pytest.raises(ArgumentError):
        phase_table(UNITS, KEEP, Setting(stage=STAGES[0], world_size=0))


def test_no_units() -> None:
    table = phase_table([], [], Setting(stage=STAGES[3], world_size=2, chunk_buffers=5))
    assert peak(table).total == 5


sizes = st.integers(0, 1000)
shares = st.sampled_from([0.0, 0.3, 1.0])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[UnitBytes], list[Home], Setting]:
    names = (
        "whole",
        "parameters",
        "gradients",
        "optimizer",
        "local_gradients",
        "reduction",
        "activations",
        "inputs",
        "transient",
    )
    count = draw(st.integers(1, 6))
    units = [UnitBytes(name=str(i), **{n: draw(sizes) for n in names}) for i in range(count)]
    policies = st.sampled_from(["keep", "recompute", "disk", "host"])
    homes = [
        Home(parameters=draw(shares), gradients=draw(shares), optimizer=draw(shares), activations=draw(policies)) for _ in units
    ]
    setting = Setting(
        stage=STAGES[draw(st.integers(0, 3))],
        world_size=draw(st.integers(1, 3)),
        in_backward=draw(st.booleans()),
        spill_buffers=draw(sizes),
        apart=draw(st.booleans()),
    )
    return units, homes, setting


@given(cases())
def test_states_are_somewhere_in_every_phase(case: tuple[list[UnitBytes], list[Home], Setting]) -> None:
    """All tiers together hold the states once; every phase is there once for every unit; moving to disk frees memory."""
    units, homes, setting = case
    table = phase_table(units, homes, setting)
    tiers = 3 if setting.apart else 2
    assert len(table) == tiers * (2 + 3 * len(units))
    keeps = 0 if setting.in_backward else 1
    states = sum(u.parameters + keeps * u.gradients + u.optimizer for u in units)
    for at in range(0, len(table), tiers):
        assert sum(r.parameters + r.gradients + r.optimizer for r in table[at : at + tiers]) == states
    assert all(value >= 0 for r in table for value in (r.total, r.activations, r.in_flight, r.slots))
    moved = phase_table(units, [replace(h, optimizer=0.0) for h in homes], setting)
    assert peak(moved).total <= peak(table).total


# -- blocks -------------------------------------------------------------------------------------------------------------


def test_100_mb_on_5_nodes_of_20_mb() -> None:
    """The parameters alone fill the nodes to the byte. With gradients and Adam's states they are 400 MB: a block of 80 MB, of
    which a quarter is in memory, passes through in 4 rounds, and 60 MB are on each node's disk."""
    parameters = share_of_nodes(100 * MB, 5, 20 * MB)
    assert (parameters.block_bytes, parameters.memory_bytes, parameters.disk_bytes) == (20 * MB, 20 * MB, 0)
    assert (parameters.reuse_factor, parameters.rounds) == (1.0, 1)
    states = share_of_nodes(4 * 100 * MB, 5, 20 * MB)
    assert (states.block_bytes, states.memory_bytes, states.disk_bytes) == (80 * MB, 20 * MB, 60 * MB)
    assert (states.reuse_factor, states.rounds) == (0.25, 4)
    # and with 8 MB to work with (two slots of 4 MB), 12 MB are left: 80 / 12 are 7 rounds
    working = share_of_nodes(4 * 100 * MB, 5, 20 * MB, working_bytes=8 * MB)
    assert (working.memory_bytes, working.disk_bytes, working.rounds) == (12 * MB, 68 * MB, 7)
    assert working.reuse_factor == 0.15


def test_10_tb_on_4_nodes_of_64_gb() -> None:
    """Block 10 / 4 TB; 64 GB are 0.0256 of it; 39.0625 rounds are 40; 2.436 TB are on each disk."""
    blocks = share_of_nodes(10 * TB, 4, 64 * GB)
    assert (blocks.block_bytes, blocks.memory_bytes, blocks.disk_bytes) == (2500 * GB, 64 * GB, 2436 * GB)
    assert (blocks.reuse_factor, blocks.rounds) == (0.0256, 40)
    # read at 5 GB/s, compute 100 s, write at 2.5 GB/s, half a second for the nodes to meet after each round
    phases = [blocks.block_bytes / (5 * GB), 100, blocks.block_bytes / (2.5 * GB)]
    assert phases == [500, 100, 1000]
    assert total_seconds(phases, blocks.rounds, 0.5) == 1620


def test_blocks_at_the_edges() -> None:
    assert share_of_nodes(10, 3, 100).block_bytes == 4
    assert share_of_nodes(10, 3, 100).reuse_factor == 25
    empty = share_of_nodes(0, 2, 0)
    assert (empty.block_bytes, empty.rounds, empty.reuse_factor) == (0, 0, math.inf)
    assert total_seconds([], 0, 1.0) == 0
    for arguments in ((10, 0, 5), (-1, 1, 5), (10, 1, 0)):
        with pytest.raises(ArgumentError):
            share_of_nodes(*arguments)
    with pytest.raises(ArgumentError, match="leave nothing"):
        share_of_nodes(10, 1, 5, working_bytes=5)


@given(st.integers(0, 10**14), st.integers(1, 100), st.integers(1, 10**12))
def test_blocks_hold_everything(states: int, nodes: int, node: int) -> None:
    blocks = share_of_nodes(states, nodes, node)
    assert blocks.memory_bytes + blocks.disk_bytes == blocks.block_bytes
    assert states <= nodes * blocks.block_bytes < states + nodes
    assert blocks.memory_bytes <= node
    assert (blocks.rounds - 1) * node < blocks.block_bytes <= blocks.rounds * node or not states


# -- the manual ---------------------------------------------------------------------------------------------------------


def test_the_numbers_of_the_manual_are_those_of_the_functions() -> None:
    """Every line of an example in docs/formulas.md is an assignment, or an expression and, after ``# ->``, what it is."""
    names = {**globals()}
    page = (Path(__file__).resolve().parents[2] / "docs" / "formulas.md").read_text()
    examples = [line for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    for line in examples:
        expression, arrow, expected = line.partition("# ->")
        if arrow:
            assert eval(expression, names) == eval(expected, names), line
        else:
            exec(line, names)
    assert sum("# ->" in line for line in examples) == page.count("# ->") - 1, "one stands in the text"
    assert len(examples) > 25
