"""What the simulated device does beyond plain layers: masks, random numbers, autocast, errors, counts, a clock."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.dist import RanksFailed
from tests.kit.simdevice import (
    LATE,
    SCHEDULES,
    SYNC,
    Report,
    configure,
    needs_compiler,
    on_sim,
    report,
    scheduled,
    set_hardware,
)

pytestmark = needs_compiler


def _same_on_both(function: Any, *tensors: Tensor) -> None:
    """Results and gradients of a function on the CPU and, in every schedule, on the device."""

    def run(device: str) -> list[Tensor]:
        inputs = [t.detach().to(device).requires_grad_(t.is_floating_point()) for t in tensors]
        out = function(*inputs)
        wanted = [t for t in inputs if t.requires_grad]
        grads = torch.autograd.grad(out.square().sum(), wanted) if out.requires_grad else ()
        return [t.detach().cpu() for t in (out, *grads)]

    expected = run("cpu")
    for schedule in SCHEDULES:
        with scheduled(schedule):
            got = run("sim")
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def _convolution(transposed: bool) -> None:
    function = F.conv_transpose2d if transposed else F.conv2d
    _same_on_both(
        lambda x, w, b: function(x, w, b, stride=2, padding=1), torch.randn(2, 4, 9, 9), torch.randn(4, 4, 3, 3), torch.randn(4)
    )


def _recurrent(kind: str, bidirectional: bool) -> None:
    net = getattr(nn, kind)(6, 5, num_layers=2, bidirectional=bidirectional)
    names = [name for name, _ in net.named_parameters()]
    run = lambda x, *weights: torch.func.functional_call(net, dict(zip(names, weights, strict=True)), (x,))[0]  # noqa: E731
    _same_on_both(run, torch.randn(4, 3, 6), *net.parameters())


def _masks() -> None:
    x = torch.randn(5, 4)
    _same_on_both(lambda x: x[x > 0] * 2, x)
    _same_on_both(lambda x: torch.where(x > 0, x, -x).masked_fill(x > 1, 7.0), x)
    _same_on_both(lambda x: x.clone().index_put((x[:, 0] > 0,), torch.tensor(3.0).to(x.device)), x)
    _same_on_both(lambda x: x.masked_select(x < 0), x)
    _same_on_both(lambda x: x.nonzero().float(), x)


def _bags(mode: str) -> None:
    index, offsets = torch.tensor([3, 1, 2, 3, 0, 5]), torch.tensor([0, 2, 2])
    _same_on_both(lambda w, i, o: F.embedding_bag(i, w, o, mode=mode), torch.randn(7, 4), index, offsets)


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(transposed: bool) -> None:
    on_sim(_convolution, transposed)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_nets(kind: str, bidirectional: bool) -> None:
    on_sim(_recurrent, kind, bidirectional)


def test_masks_whose_result_has_a_shape_that_depends_on_values() -> None:
    on_sim(_masks)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str) -> None:
    on_sim(_bags, mode)


def _random() -> None:
    configure(LATE)
    torch.manual_seed(3)
    host = [torch.rand(50), torch.randn(50), torch.randperm(9), torch.bernoulli(torch.full((20,), 0.3))]
    torch.manual_seed(3)
    state = torch.sim.get_rng_state()  # type: ignore[attr-defined]
    there = [torch.rand(50, device="sim"), torch.randn(50, device="sim"), torch.randperm(9, device="sim")]
    there.append(torch.bernoulli(torch.full((20,), 0.3, device="sim")))
    for a, b in zip(host, there, strict=True):
        assert torch.equal(a, b.cpu())
    torch.sim.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(torch.rand(50, device="sim").cpu(), host[0])
    own = torch.Generator("sim").manual_seed(3)
    assert torch.equal(torch.rand(50, device="sim", generator=own).cpu(), host[0])
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.rand(5, device="sim", generator=torch.Generator())
    before = torch.get_rng_state()
    torch.rand(5, device="sim")
    assert torch.equal(before, torch.get_rng_state()), "the host's numbers are its own"


def test_random_numbers_of_the_device_are_its_own_and_the_cpus_for_the_same_seed() -> None:
    on_sim(_random)


def _autocast() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to("sim")
    x = torch.randn(2, 8, device="sim")
    seen: dict[str, Any] = {}
    for schedule in SCHEDULES:
        with scheduled(schedule), torch.autocast("sim", dtype=torch.bfloat16):
            hidden = model[0](x)
            normed, out = model[1](hidden), model(x)
            loss = F.mse_loss(out, torch.zeros_like(out))
            assert (hidden.dtype, normed.dtype, out.dtype, loss.dtype) == (
                torch.bfloat16,
                torch.float32,
                torch.bfloat16,
                torch.float32,
            )
            grads = torch.autograd.grad(loss, list(model.parameters()))
            seen[str(schedule)] = [g.cpu() for g in grads]
    return seen


def test_autocast_by_pytorchs_lists() -> None:
    first, *others = on_sim(_autocast).values()
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def _late_error() -> tuple[str, str]:
    configure(LATE)
    table, index = torch.randn(4, 3, device="sim"), torch.tensor([1, 9]).to("sim")
    out = F.embedding(index, table)  # queued: nothing is wrong yet
    with pytest.raises(RuntimeError) as first:
        out.sum().item()
    with pytest.raises(RuntimeError) as second:
        table + 1
    configure(SYNC)
    assert (table * 0 + 1).sum().item() == 12, "a new beginning"
    return str(first.value), str(second.value)


def test_an_error_in_a_queued_kernel_comes_late_and_stays() -> None:
    first, second = on_sim(_late_error)
    assert "'aten::index_select' on the main stream of sim:0 failed while it ran" in first
    assert "index out of range" in first
    assert first == second


def _counts() -> tuple[Report, Report, Report]:
    model = nn.Linear(16, 16).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, pinned = torch.randn(4, 16), torch.randn(4, 16).pin_memory()

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step(x.to("sim"))
    configure(LATE, watch_host=True)
    step(pinned.to("sim", non_blocking=True))
    quiet = report()
    configure(LATE, watch_host=True)
    step(x.to("sim")).item()
    torch.ones(3).sqrt()
    loud = report()
    configure(LATE)
    return quiet, loud, report()


def test_counts_of_waits_kernels_and_bytes() -> None:
    quiet, loud, nothing = on_sim(_counts)
    assert (quiet.host_waits, quiet.pageable_in, quiet.pinned_in) == (0, 0, 256)
    assert (loud.host_waits, loud.pageable_in, loud.pageable_out, loud.pinned_in) == (2, 256, 4, 0)
    assert quiet.kernels == loud.kernels
    assert quiet.kernels["aten::_fused_adamw_"] == 1
    assert (quiet.host_kernels.get("aten::sqrt", 0), loud.host_kernels["aten::sqrt"]) == (0, 1)
    assert not [name for name in quiet.host_kernels if "adam" in name]
    assert (nothing.host_waits, nothing.kernels) == (0, {})


def _overlap(pinned: bool, waits: bool) -> tuple[float, float, float, float]:
    """Four units that are copied in while the one before computes."""
    set_hardware("rtx4090")
    homes = [torch.randn(512, 512) for _ in range(4)]
    homes = [home.pin_memory() for home in homes] if pinned else homes
    slots, x = [torch.empty(512, 512, device="sim") for _ in homes], torch.randn(4096, 512, device="sim")
    configure(LATE)
    compute, side = torch.accelerator.current_stream(), torch.Stream("sim")
    for home, slot in zip(homes, slots, strict=True):
        with side:
            slot.copy_(home, non_blocking=True)
            copied = side.record_event()
        if waits:
            copied.synchronize()
        compute.wait_event(copied)
        x = x @ slot
    time = report().time
    return time.makespan, time.compute, time.copies_in, time.host


def test_the_virtual_clock_shows_overlap() -> None:
    makespan, compute, copies_in, _ = on_sim(_overlap, True, False)
    assert compute == pytest.approx(4 * 2 * 4096 * 512 * 512 / 82.6e12)
    assert copies_in == pytest.approx(4 * (512 * 512 * 4 / 31.5e9 + 1e-5))
    assert copies_in < makespan < copies_in + compute, "copies and kernels overlap"
    assert on_sim(_overlap, True, False)[0] == makespan, "no noise"
    assert on_sim(_overlap, True, True)[0] > makespan, "a host that waits for every copy starts the next one later"
    slow, _, slow_copies, host = on_sim(_overlap, False, False)
    assert slow_copies == pytest.approx(4 * (512 * 512 * 4 * (1 / 31.5e9 + 1 / 41.6e9) + 1e-5))
    assert slow > makespan
    assert host >= slow_copies, "pageable memory holds the host"


def _perturbed() -> dict[str, bool]:
    def run(optimizer: type[torch.optim.Optimizer], where: str, perturbed: bool, **options: Any) -> Tensor:
        configure(LATE, perturbed=perturbed)
        p = nn.Parameter(torch.linspace(-1, 1, 5000, device=where))
        update = optimizer([p], lr=0.1, **options)  # type: ignore[call-arg]
        p.grad = torch.linspace(1, 2, 5000, device=where)
        update.step()
        return p.detach().cpu()

    kinds = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}
    return {
        f"{name} on {where}": torch.equal(
            run(torch.optim.AdamW, where, True, **options), run(torch.optim.AdamW, where, False, **options)
        )
        for name, options in kinds.items()
        for where in ("cpu", "sim")
    }


def test_a_perturbed_device_shows_which_processor_did_the_update() -> None:
    for name, same in on_sim(_perturbed).items():
        assert same == name.endswith("cpu"), name


def _threads() -> int:
    """One thread waits for copies and makes references to tensors, the other drops tensors while it holds Python's lock."""
    done: list[int] = []
    for schedule in SCHEDULES:
        configure(schedule)

        def copies() -> None:
            host = torch.empty(64)
            for _ in range(100):
                host.copy_(torch.ones(64, device="sim") * 2)
            done.append(int(host.sum()))

        threads = [threading.Thread(target=copies) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not report().races
    return sum(done)


def test_threads_of_the_host_do_not_lock_each_other_out() -> None:
    assert on_sim(_threads, timeout=60) == 5 * 3 * 128


def _touch() -> None:
    import ctypes

    ctypes.string_at(torch.ones(4, device="sim").data_ptr(), 4)


def test_the_host_cannot_touch_the_devices_memory() -> None:
    with pytest.raises(RanksFailed) as error:
        on_sim(_touch, fresh=True)
    assert error.value.exit_codes == [-11]
