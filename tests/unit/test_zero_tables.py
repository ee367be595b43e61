"""The published numbers: Table 1 of ZeRO cell by cell, and what ZeRO-Offload and ZeRO-Infinity say fits where.

ZeRO: Rajbhandari and others, arXiv 1910.02054. ZeRO-Offload: Ren and others, arXiv 2101.06840. ZeRO-Infinity: Rajbhandari and
others, arXiv 2104.07857. GB and TB are decimal, except in ZeRO-Infinity's figure 2a, whose digits come out in powers of 1024.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest

from lowtide.errors import DoesNotFit
from lowtide.planning.formulas import KindBytes, describe_states, from_precision, states_bytes_per_rank
from lowtide.planning.planner import make_plan
from lowtide.planning.request import Request
from lowtide.spec.architectures import architecture
from lowtide.spec.catalogue import load
from lowtide.spec.counts import bare_count
from lowtide.spec.hardware import Hardware
from lowtide.spec.model import ModelSpec
from lowtide.stages import STAGES

GB, TB = 10**9, 10**12
GIB, TIB = 2**30, 2**40
MIXED = from_precision("mixed")

# -- ZeRO, Table 1 ------------------------------------------------------------------------------------------------------

MODELS = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
DEGREES = (1, 4, 16, 64, 256, 1024)
TABLE_1 = {  # (model, stage): as printed, from 1 device to 1024
    ("7.5B", 1): "120 52.5 35.6 31.4 30.4 30.1",
    ("7.5B", 2): "120 41.3 21.6 16.6 15.4 15.1",
    ("7.5B", 3): "120 30 7.5 1.88 0.47 0.12",
    ("128B", 1): "2048 896 608 536 518 513",
    ("128B", 2): "2048 704 368 284 263 257",
    ("128B", 3): "2048 512 128 32 8 2",
    ("1T", 1): "16000 7000 4750 4187 4046 4011",
    ("1T", 2): "16000 5500 2875 2218 2054 2013",
    ("1T", 3): "16000 4000 1000 250 62.5 15.6",
}
CELLS = [
    (model, stage, degree, printed)
    for (model, stage), row in TABLE_1.items()
    for degree, printed in zip(DEGREES, row.split(), strict=True)
]
CUT_OFF = {  # cells that rounding would print one larger: 4187.5 and 257.75 stand as 4187 and 257
    ("128B", 1, 1024),
    ("128B", 2, 1024),
    *(("1T", stage, degree) for stage in (1, 2) for degree in (64, 256, 1024)),
}


def as_printed(nbytes: float) -> str:
    """The paper's digits: from 100 GB up whole GB, cut off; below, three digits and at most two decimals, rounded."""
    size = Decimal(nbytes) / GB
    if size >= 100:
        return str(size.quantize(Decimal(1), ROUND_DOWN))
    step = Decimal("0.1") if size >= 10 else Decimal("0.01")
    text = str(size.quantize(step, ROUND_HALF_UP))
    return text.rstrip("0").rstrip(".")


def test_the_table_has_54_cells() -> None:
    assert len(CELLS) == len(set(CELLS)) == 54


@pytest.mark.parametrize(("model", "stage", "degree", "printed"), CELLS)
def test_table_1(model: str, stage: int, degree: int, printed: str) -> None:
    numel = MODELS[model]
    states = states_bytes_per_rank(numel, STAGES[stage], degree, MIXED)
    assert as_printed(states.total) == printed
    described = describe_states(numel, degree, stage, "mixed")["states_bytes_per_rank"]
    assert isinstance(described, int)
    assert as_printed(described) == printed
    assert 0 <= described - states.total < 3, "every kind rounded up to whole bytes"
    rounded = str((Decimal(states.total) / GB).quantize(Decimal(printed), ROUND_HALF_UP))
    assert (rounded != printed) == ((model, stage, degree) in CUT_OFF)


def test_sixteen_bytes() -> None:
    """Section 3.1: 2 + 2 + 12 bytes per parameter; the 1.5 B parameters of GPT-2 need at least 24 GB."""
    assert MIXED.total == 16
    assert MIXED.optimizer == 12
    assert states_bytes_per_rank(1.5e9, STAGES[0], 1, MIXED).total == 24 * GB


@pytest.mark.parametrize(("stage", "times"), [(1, 4), (2, 8)])
def test_limits_of_stages_1_and_2(stage: int, times: int) -> None:
    """Section 5: with many devices, 4 times less with sharded optimizer states, 8 times less with sharded gradients too."""
    assert 16e9 / states_bytes_per_rank(1e9, STAGES[stage], 10**6, MIXED).total == pytest.approx(times, rel=1e-4)


# -- ZeRO-Offload -------------------------------------------------------------------------------------------------------

V100 = 32 * GB
DGX2_GPUS, DGX2_HOST, DGX2_NVME = 16, 1.5 * TB, 28 * TB


def test_offload_what_leaves_the_device() -> None:
    """ZeRO-Offload, table 1: 16 M on the device; 14 M without gradients; 4 M without the update; 2 M without both."""
    p, g, o = MIXED.parameters, MIXED.gradients, MIXED.optimizer
    assert [p + g + o, p + o, p + g, p] == [16, 14, 4, 2]
    assert (p + g + o) / p == 8


def test_offload_13_billion_on_one_v100() -> None:
    """The claim: 13 B parameters on one 32 GB V100, 1.4 B without offloading.

    On the device are the fp16 parameters, 2 bytes each; the other 14 are in host memory. What is left on the device is for
    activations and buffers, which the paper's formula does not give, so the formulas bound the claim and do not derive it."""
    states = states_bytes_per_rank(13e9, STAGES[2], 1, MIXED)
    assert states.parameters == 26 * GB
    assert V100 - states.parameters == 6 * GB
    assert states.gradients + states.optimizer == 182 * GB < DGX2_HOST
    largest = V100 / MIXED.parameters
    assert largest == 16e9 > 13e9
    without = V100 / MIXED.total
    assert without == 2e9 > 1.4e9


def test_offload_13_billion_here() -> None:
    """lowtide keeps fp32 gradients unless told otherwise: 16 bytes on the host instead of 14. On the device it needs slots, not
    all parameters: three of GPT-like blocks (12 hidden^2; 65 blocks of hidden 4096 are 13 B) take 1.2 GB, not 26."""
    ours = states_bytes_per_rank(13e9, STAGES[3], 1, from_precision("fp16"))
    assert ours.total - ours.parameters == 208 * GB < DGX2_HOST
    block = 12 * 4096**2
    assert 65 * block == pytest.approx(13e9, rel=0.01)
    assert 3 * 2 * block == 1_207_959_552


def test_offload_70_billion_on_a_dgx2() -> None:
    """The claim: 70 B on one DGX-2 with model parallelism over its 16 GPUs, 4.5 times the 15 B of model parallelism alone.

    16 ways of model parallelism cut the fp16 parameters to 8.75 GB a GPU, and 980 GB are in host memory. lowtide has no model
    parallelism: at stage 2, 140 GB of parameters would be whole on each GPU; stage 3 cuts them as far."""
    states = states_bytes_per_rank(70e9, STAGES[2], DGX2_GPUS, MIXED)
    assert states.parameters == 140 * GB > V100, "the paper's stage alone is not enough"
    assert states.parameters / DGX2_GPUS == 8.75 * GB < V100
    assert DGX2_GPUS * (states.gradients + states.optimizer) == 980 * GB < DGX2_HOST
    assert states_bytes_per_rank(70e9, STAGES[3], DGX2_GPUS, MIXED).parameters == 8.75 * GB
    assert 15e9 * MIXED.total / DGX2_GPUS == 15 * GB < V100, "model parallelism alone, 15 B"
    assert 70e9 * MIXED.total / DGX2_GPUS == 70 * GB > V100, "and not 70 B"


# -- ZeRO-Infinity ------------------------------------------------------------------------------------------------------

INFINITY = KindBytes(parameters=2, gradients=2, masters=4 + 4, moment=4)
"""Section 3 counts an fp32 gradient beside the fp32 parameter, momentum and variance: 20 bytes, not ZeRO's 16."""


def transformer_numel(layers: int, hidden: int) -> int:
    """Equation 1: linear layers of (h, 3h), (h, h), (h, 4h) and (4h, h) in every block."""
    return 12 * layers * hidden**2


def checkpoint_bytes(batch: int, seq: int, hidden: int, layers: int, interval: int = 1) -> float:
    """Equation 3: the fp16 input of every ``interval``-th block."""
    return 2 * batch * seq * hidden * layers / interval


def operator_bytes(hidden: int) -> int:
    """Equation 4, MSWM: fp16 parameters and gradients of the largest linear layer, (h, 4h)."""
    return 4 * hidden * 4 * hidden


def recomputed_bytes(batch: int, seq: int, hidden: int, heads: int, interval: int = 1) -> int:
    """Equation 5, AWM: activations between two checkpoints."""
    return batch * seq * interval * (16 * hidden + 2 * heads * seq)


# layers, hidden in units of 1024, heads; parameters in trillions, states in TB, checkpoints in TB (batch 32, sequence 1024)
FIGURE_2A = [
    (80, 10, 128, "0.10", "1.83", "0.05"),
    (100, 20, 160, "0.50", "9.16", "0.12"),
    (128, 25, 256, "1.01", "18.31", "0.20"),
    (195, 64, 512, "10.05", "182.81", "0.76"),
    (315, 160, 1024, "101.47", "1845.70", "3.08"),
]


@pytest.mark.parametrize(("layers", "kilo", "heads", "trillions", "states", "checkpoints"), FIGURE_2A)
def test_infinity_figure_2a(layers: int, kilo: int, heads: int, trillions: str, states: str, checkpoints: str) -> None:
    hidden = 1024 * kilo
    numel = transformer_numel(layers, hidden)
    assert f"{numel / 1e12:.2f}" == trillions
    total = states_bytes_per_rank(numel, STAGES[0], 1, INFINITY).total
    assert total == 240 * layers * hidden**2, "equation 2"
    assert f"{total / TIB:.2f}" == states
    assert f"{checkpoint_bytes(32, 1024, hidden, layers) / TIB:.2f}" == checkpoints


@pytest.mark.parametrize(("kilo", "gib"), [(20, 6.25), (25, 9.765625), (64, 64), (160, 400)])
def test_infinity_largest_operator(kilo: int, gib: float) -> None:
    """MSWM: from 64 K on it is more than a V100 has, which the paper meets with tiling. lowtide does not tile: the smallest
    thing that it makes whole is a unit (``units=``), so such a layer would be refused with ``DoesNotFit``."""
    assert operator_bytes(1024 * kilo) == gib * GIB
    assert (operator_bytes(1024 * kilo) > V100) == (kilo >= 64)


def test_infinity_activations_of_a_block() -> None:
    """AWM at 64 K, 4 samples a GPU: 8 GiB. The batch of 32 a node is 2 a GPU on a DGX-2 and 4 on a node of 8."""
    assert recomputed_bytes(4, 1024, 64 * 1024, 512) == 8 * GIB
    assert recomputed_bytes(2, 1024, 64 * 1024, 512) == 4 * GIB


@pytest.mark.parametrize(("trillions", "gpus"), [(0.1, 63), (1, 625), (10, 6250)])
def test_infinity_gpus_for_the_states_alone(trillions: float, gpus: int) -> None:
    """Section 3: 100 B need 64 GPUs, 1 T more than 512, 10 T more than 1536."""
    assert -(-trillions * 1e12 * INFINITY.total // V100) == gpus


def test_infinity_1_trillion_on_one_node() -> None:
    """The claim: 1 T parameters on one DGX-2 with 1.5 TB of host memory and 28 TB of NVMe, without model parallelism."""
    states = states_bytes_per_rank(1e12, STAGES[3], DGX2_GPUS, INFINITY)
    assert DGX2_GPUS * states.total == 20 * TB
    assert DGX2_GPUS * V100 + DGX2_HOST < 20 * TB < DGX2_NVME, "only with the NVMe"
    assert DGX2_NVME / INFINITY.total == 1.4e12
    # on each GPU: parameters and gradients of the largest layer, and one block of activations (128 layers, hidden 25 K)
    assert operator_bytes(25 * 1024) + recomputed_bytes(4, 1024, 25 * 1024, 256) < V100
    # lowtide: 18 bytes on disk with updates in step, 14 with updates in backward, where no gradient is kept
    ours = from_precision("fp16")
    assert (ours.total, ours.total - ours.gradients) == (18, 14)


def test_infinity_32_trillion_on_32_nodes() -> None:
    """The claim: 32 T on 32 DGX-2 nodes, 512 GPUs: as much on each node as 1 T on one."""
    ranks = 32 * DGX2_GPUS
    states = states_bytes_per_rank(32e12, STAGES[3], ranks, INFINITY)
    assert ranks * states.total == 640 * TB
    assert DGX2_GPUS * states.total == 20 * TB < DGX2_NVME
    assert states.total == 1.25 * TB > V100


# -- the same claims, as plans ------------------------------------------------------------------------------------------

LITTLE_HOST = 4 * GIB


def dgx2() -> Hardware:
    """The catalogue's V100 in the papers' node: 16 of them, 1.5 TB of memory, 28 TB of NVMe."""
    v100 = load("v100-32g")
    if v100.disk is None:
        pytest.fail("the description has no disk")
    disk = replace(v100.disk, free_bytes=28 * TB)
    return replace(v100, host_bytes=int(DGX2_HOST), disk=disk, ranks_per_host=DGX2_GPUS)


def thirds_of_blocks(layers: int, hidden: int) -> ModelSpec:
    """Units as large as the largest linear layer, 4 h^2, of which a block has three."""
    return bare_count(transformer_numel(layers, hidden), layers=3 * layers, dtype="fp16", tokens=1024)


def test_plan_13_billion_on_one_v100() -> None:
    """On the machine of the catalogue, with its 512 GB; and not without host memory for what leaves the device."""
    model, v100 = architecture("gpt3-13b", batch=1, sequence=1024, dtype="fp16"), load("v100-32g")
    plan = make_plan(model, v100, Request(precision="mixed", disk_bytes=0))
    device, host = plan.tier("device"), plan.tier("host")
    assert plan.world_size == 1
    assert plan.placement == "streamed"
    assert device is not None
    assert host is not None
    assert device.peak_bytes <= device.capacity_bytes == 32 * GIB
    assert 13 * 10**9 * MIXED.total * 0.7 < host.peak_bytes < v100.host_bytes, "most of the states are there"
    with pytest.raises(DoesNotFit) as caught:
        make_plan(model, v100, Request(precision="mixed", disk_bytes=0, memory_bytes=LITTLE_HOST))
    assert caught.value.tier == "host"


def test_plan_1_4_billion_without_offloading() -> None:
    """As plain PyTorch: everything on the device, nothing moved."""
    request = Request(precision="mixed", disk_bytes=0, memory_bytes=LITTLE_HOST)
    plan = make_plan(bare_count(1_400_000_000, dtype="fp16", tokens=1024), load("v100-32g"), request)
    assert plan.placement == "plain"


def test_plan_70_billion_on_a_dgx2() -> None:
    """Stage 3 fits, in host memory; the paper's stage 2 alone does not fit on the devices."""
    model = bare_count(70_000_000_000, dtype="fp16", tokens=1024)
    plan = make_plan(model, dgx2(), Request(precision="mixed", disk_bytes=0, world_size=DGX2_GPUS))
    assert (plan.stage, plan.hosts) == (3, 1)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(model, dgx2(), Request(precision="mixed", disk_bytes=0, world_size=DGX2_GPUS, stage=2))
    assert caught.value.tier == "device"


def test_plan_1_trillion_on_one_node() -> None:
    """With the NVMe it fits, without it does not. Units are single layers: three whole blocks are more than a V100 has."""
    model = thirds_of_blocks(128, 25 * 1024)
    assert model.numel > 10**12
    request = Request(precision="mixed", world_size=DGX2_GPUS)
    plan = make_plan(model, dgx2(), request)
    disk = plan.tier("disk")
    assert (plan.stage, plan.hosts) == (3, 1)
    assert disk is not None
    assert DGX2_GPUS * disk.peak_bytes > 14 * TB
    with pytest.raises(DoesNotFit) as caught:
        make_plan(model, dgx2(), replace(request, disk_bytes=0))
    assert caught.value.tier == "host"


def test_plan_refuses_a_layer_that_is_larger_than_the_device() -> None:
    """Hidden 64 K: 10 T parameters on ten nodes, which the paper meets with tiling."""
    with pytest.raises(DoesNotFit) as caught:
        make_plan(thirds_of_blocks(195, 64 * 1024), dgx2(), Request(precision="mixed", world_size=10 * DGX2_GPUS, stage=3))
    assert caught.value.tier == "device"
