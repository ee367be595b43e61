"""Eight mistakes that programs for accelerators make: each is found, and the program without it is not blamed.

A missing wait is reported by the happens-before check in every schedule, even where the numbers are right by luck, and some
schedule makes the numbers wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kit.simdevice import (
    LATE,
    RANDOM,
    SCHEDULES,
    SIDE_EARLY,
    SIDE_LATE,
    Schedule,
    configure,
    needs_compiler,
    on_sim,
    report,
)

pytestmark = needs_compiler

N = 1000


def _pinned(value: float) -> Tensor:
    return torch.full((N,), value, dtype=torch.float32).pin_memory()


def no_wait_after_a_copy(mended: bool) -> tuple[Tensor, float]:
    weights, source = torch.zeros(N, device="sim"), _pinned(1)
    torch.accelerator.synchronize()
    side = torch.Stream("sim")
    with side:
        weights.copy_(source, non_blocking=True)
        copied = side.record_event()
    if mended:
        torch.accelerator.current_stream().wait_event(copied)
    result = weights * 2
    torch.accelerator.synchronize()
    return result, 2.0


def no_wait_before_a_copy(mended: bool) -> tuple[Tensor, float]:
    """A slot is filled again while kernels still read what was in it."""
    slot, source = torch.full((N,), 3.0, device="sim"), _pinned(1)
    torch.accelerator.synchronize()
    result = slot * 2
    side = torch.Stream("sim")
    if mended:
        side.wait_event(torch.accelerator.current_stream().record_event())
    with side:
        slot.copy_(source, non_blocking=True)
    torch.accelerator.synchronize()
    return result, 6.0


def staging_given_back_early(mended: bool) -> tuple[Tensor, float]:
    """The wait of a stream is taken for one of the host; then the disk fills the staging with the next unit."""
    staging, slot = _pinned(1), torch.zeros(N, device="sim")
    torch.accelerator.synchronize()
    side = torch.Stream("sim")
    with side:
        slot.copy_(staging, non_blocking=True)
        copied = side.record_event()
    torch.accelerator.current_stream().wait_event(copied)
    if mended:
        copied.synchronize()
    staging.fill_(2)  # as an I/O thread does
    result = slot * 1
    torch.accelerator.synchronize()
    return result, 1.0


def host_write_under_a_copy(mended: bool) -> tuple[Tensor, float]:
    """The update writes new values into a home of which a copy is queued."""
    home, slot = _pinned(5), torch.empty(N, device="sim")
    slot.copy_(home, non_blocking=True)
    if mended:
        torch.accelerator.current_stream().synchronize()
    home.mul_(2)
    torch.accelerator.synchronize()
    return slot, 5.0


def wait_on_another_device(mended: bool) -> tuple[Tensor, float]:
    """A thread whose current device is 0 orders device 0's stream, and device 1 computes."""
    weights, source = torch.zeros(N, device="sim:1"), _pinned(1)
    torch.accelerator.synchronize(1)
    side = torch.Stream("sim:1")
    with side:
        weights.copy_(source, non_blocking=True)
        copied = side.record_event()
    torch.accelerator.current_stream(torch.device("sim", 1 if mended else 0)).wait_event(copied)
    result = weights * 2
    torch.accelerator.synchronize(1)
    return result, 2.0


def freed_under_another_stream(mended: bool) -> tuple[Tensor, float]:
    """The block is the first stream's next one as soon as Python lets go, and the second stream still reads it."""
    values, result = torch.full((N,), 4.0, device="sim"), torch.empty(N, device="sim")
    side = torch.Stream("sim")
    side.wait_event(torch.accelerator.current_stream().record_event())
    with side:
        torch.mul(values, 2, out=result)
    if mended:
        values.record_stream(side)
    del values
    torch.full((N,), 9.0, device="sim")
    torch.accelerator.synchronize()
    return result, 8.0


Plant = Callable[[bool], tuple[Tensor, float]]
SILENT: list[Plant] = [
    no_wait_after_a_copy,
    no_wait_before_a_copy,
    staging_given_back_early,
    host_write_under_a_copy,
    wait_on_another_device,
    freed_under_another_stream,
]
# the schedule that makes the numbers wrong, and what the report must name
SHOWN_BY = {
    no_wait_after_a_copy: (LATE, ["aten::mul", "copy to the device"]),
    no_wait_before_a_copy: (SIDE_EARLY, ["aten::mul", "copy to the device"]),
    staging_given_back_early: (LATE, ["the host writes", "copy to the device"]),
    host_write_under_a_copy: (LATE, ["the host writes", "copy to the device"]),
    wait_on_another_device: (LATE, ["aten::mul", "copy to the device", "sim:1"]),
    freed_under_another_stream: (SIDE_LATE, ["aten::fill_", "aten::mul"]),
}


def _run(plant: Plant, schedule: Schedule, mended: bool) -> tuple[bool, list[str]]:
    configure(schedule)
    result, expected = plant(mended)
    races = report().races
    return bool((result.cpu() == expected).all()), races


def _all_schedules(plant: Plant, mended: bool) -> dict[str, tuple[bool, list[str]]]:
    return {str(schedule): _run(plant, schedule, mended) for schedule in (*SCHEDULES, *RANDOM[1:])}


@pytest.mark.parametrize("plant", SILENT)
def test_a_missing_wait_is_found_in_every_schedule(plant: Plant) -> None:
    outcomes = on_sim(_all_schedules, plant, False, devices=2)
    shown_by, names = SHOWN_BY[plant]
    assert all(races for _, races in outcomes.values()), outcomes
    for _, races in outcomes.values():
        assert any(all(name in race for name in names) for race in races), races
    assert not outcomes[str(shown_by)][0], "the schedule that makes the numbers wrong"
    assert not all(right for name, (right, _) in outcomes.items() if name.startswith("RANDOM")), "one seed in eight shows it"


@pytest.mark.parametrize("plant", SILENT)
def test_the_mended_program_is_not_blamed(plant: Plant) -> None:
    for name, (right, races) in on_sim(_all_schedules, plant, True, devices=2).items():
        assert right, name
        assert not races, name


def _mixed() -> list[str]:
    here, there, host = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1"), torch.ones(3)
    errors: list[str] = []
    for attempt in (lambda: here + host, lambda: here + there, lambda: host.add_(here), lambda: torch.cat([here, host])):
        with pytest.raises(RuntimeError) as error:
            attempt()
        errors.append(str(error.value))
    assert (here * torch.tensor(2.0)).sum().item() == 6, "a number of the host may go along"
    assert (here + there.to("sim:0")).sum().item() == 6
    return errors


def test_mixed_devices_raise() -> None:
    for error in on_sim(_mixed, devices=2):
        assert "Expected all tensors to be on the same device" in error


def _limit() -> tuple[int, str]:
    configure(LATE, limit=1 << 20)
    kept = [torch.empty(1 << 18, dtype=torch.uint8, device="sim") for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(1 << 19, dtype=torch.uint8, device="sim")
    del kept[0]
    kept.append(torch.zeros(1 << 19, dtype=torch.uint8, device="sim"))  # what was given back is there again
    return torch.accelerator.memory_allocated(), str(error.value)


def test_the_limit_is_held() -> None:
    used, error = on_sim(_limit, fresh=True)
    assert used == (1 << 18) * 2 + (1 << 19)
    assert "sim:0 out of memory: 524288 bytes asked for, 786432 of 1048576 in use" in error
