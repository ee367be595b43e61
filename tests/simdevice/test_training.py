"""Plain PyTorch on the simulated device gives the CPU's bits, in every schedule, without a race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit.models import MENAGERIE, Specimen
from tests.kit.models_hf import HUGGING_FACE
from tests.kit.parity import assert_bitwise
from tests.kit.simdevice import RANDOM, SCHEDULES, Schedule, configure, needs_compiler, on_sim, report

pytestmark = needs_compiler

Optimizer = Callable[[Any], torch.optim.Optimizer]
ADAMW: dict[str, Optimizer] = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "single": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
}


def train(specimen: Specimen, optimizer: str, device: str, steps: int = 2) -> list[tuple[str, Tensor]]:
    """Losses, gradients of the last step, parameters and buffers; on a device, batches come by a stream of their own."""
    model = specimen.build(0).to(device)
    update = ADAMW[optimizer](model.parameters())
    torch.manual_seed(5)
    numbers: list[tuple[str, Tensor]] = []
    for step in range(steps):
        batch = specimen.batch(step, 0)
        loss = specimen.loss(model, batch if device == "cpu" else _brought(batch))
        update.zero_grad()
        loss.backward()
        update.step()
        numbers.append((f"loss {step}", loss.detach()))
    numbers += [(f"gradient {name}", p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return numbers + [(name, t.detach()) for name, t in model.state_dict().items()]


def _brought(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    compute, side = torch.accelerator.current_stream(), torch.Stream("sim")
    with side:
        there = tuple(t.pin_memory().to("sim", non_blocking=True) for t in batch)
        copied = side.record_event()
    compute.wait_event(copied)
    for tensor in there:
        tensor.record_stream(compute)
    return there


def _find(name: str) -> Specimen:
    return HUGGING_FACE[name.removeprefix("hf_")] if name.startswith("hf_") else MENAGERIE[name]


def check(name: str, optimizer: str, schedules: tuple[Schedule, ...]) -> int:
    expected = train(_find(name), optimizer, "cpu")
    for schedule in schedules:
        configure(schedule)
        got = train(_find(name), optimizer, "sim")
        assert [key for key, _ in got] == [key for key, _ in expected]
        for (key, a), (_, b) in zip(got, expected, strict=True):
            assert_bitwise(a.cpu(), b, f"{key} under {schedule}")
        assert not report().races, schedule
    return len(schedules)


@pytest.mark.parametrize("name", [*MENAGERIE, *(f"hf_{name}" for name in HUGGING_FACE)])
def test_the_bits_of_the_cpu_in_every_schedule(name: str) -> None:
    assert on_sim(check, name, "fused" if name.startswith("hf_") else "foreach", SCHEDULES) == 5


@pytest.mark.parametrize("optimizer", ADAMW)
@pytest.mark.parametrize("name", ["dropout", "convolutions", "lstm"])
def test_kinds_of_adamw(name: str, optimizer: str) -> None:
    assert on_sim(check, name, optimizer, SCHEDULES[:2]) == 2


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ADAMW)
@pytest.mark.parametrize("name", [*MENAGERIE, *(f"hf_{name}" for name in HUGGING_FACE)])
def test_every_seed_of_random(name: str, optimizer: str) -> None:
    # in a process of its own: the engine looks at every stream that was ever made, and twelve runs make many
    assert on_sim(check, name, optimizer, (*SCHEDULES[:4], *RANDOM), fresh=True) == 12


def _threads() -> set[bool]:
    import threading

    model = nn.Linear(4, 4).to("sim")
    seen: set[bool] = set()
    model.weight.register_hook(lambda grad: seen.add(threading.current_thread() is threading.main_thread()))
    model(torch.ones(2, 4, device="sim")).sum().backward()
    return seen


def test_backward_runs_on_the_thread_of_the_device() -> None:
    assert on_sim(_threads) == {False}
