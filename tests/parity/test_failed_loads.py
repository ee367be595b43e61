"""``load_state_dict`` that raises and is caught: afterwards every value is what plain PyTorch leaves, and training goes on from
it. Torch loads all that fits before it says what did not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import Error
from tests.kit import out_of_core as out_of_core  # without a number: everything on disk
from tests.kit.dist import run_ranks
from tests.kit.parity import first_difference

WIDTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


def build(seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block() for _ in range(3)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


State = dict[str, Any]
FAULTS: dict[str, Callable[[State], Any]] = {
    "a name is missing": lambda state: state.pop("1.linear.weight"),
    "the first is missing": lambda state: state.pop("0.linear.weight"),
    "the last is missing": lambda state: state.pop("2.norm.bias"),
    "a name too many": lambda state: state.update(more=torch.ones(2)),
    "another size": lambda state: state.update({"1.linear.weight": torch.ones(2, 2)}),
    "another size at the end": lambda state: state.update({"2.linear.bias": torch.ones(2)}),
    "a buffer of another size": lambda state: state.update({"1.norm.running_mean": torch.ones(2)}),
    "a whole block of other sizes": lambda state: state.update({k: torch.ones(3) for k in state if k.startswith("1.")}),
    "no tensor": lambda state: state.update({"1.linear.bias": "a string"}),
    "another kind of tensor": lambda state: state.update({"1.linear.bias": torch.ones(WIDTH, device="meta")}),
    "nothing": lambda state: state.clear(),
    "a part, not strict": lambda state: [state.pop(name) for name in list(state) if name.startswith("1.")],
}
PLACEMENTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"stage": 0}),
    (1, {"stage": 3}),
    (1, {"stage": 0, "disk": True}),
    (1, {"stage": 0, "disk": True, "update": "backward"}),
    (2, {"stage": 2}),
    (2, {"stage": 3}),
    (2, {"stage": 3, "disk": True}),
]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    loss = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def play(model: Any, optimizer: torch.optim.Optimizer, fault: str) -> list[Any]:
    log: list[Any] = [step(model, optimizer, 0)]
    state = {name: value.clone() for name, value in build(1)[0].state_dict().items()}
    FAULTS[fault](state)
    try:
        model.load_state_dict(state, strict="not strict" not in fault)
        log.append("loaded")
    except Error:
        raise
    except Exception as error:
        log.append(type(error).__name__)
    with lowtide.gathered(model):
        log += [value.detach().clone() for value in (*model.parameters(), *model.buffers())]
    log += [step(model, optimizer, number) for number in (1, 2)]
    with lowtide.gathered(model):
        return log + [p.detach().clone() for p in model.parameters()]


def differences(rank: int, world: int, options: dict[str, Any], folder: str) -> list[str]:
    """Ranks have the same batches, so that the numbers of several are those of one."""
    out: list[str] = []
    for fault in FAULTS:
        expected = play(*build(), fault)
        model, optimizer = build()
        where = {**options, "disk": folder if options.get("disk") else None}
        lowtide.shard(model, optimizer, comm=lowtide.Comm(bucket_bytes=0, deadline=20), **where)
        got = play(model, optimizer, fault)
        for a, b in zip(got, expected, strict=True):
            same = a == b if isinstance(b, str) else first_difference(a, b) is None
            if not same:
                out.append(f"{fault}: {a if isinstance(b, str) else first_difference(a, b)} instead of {b}"[:200])
                break
    return out


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("ranks", "options"), PLACEMENTS, ids=str)
def test_values_after_a_load_that_raised(ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    found = run_ranks(ranks, differences, options, str(tmp_path))
    assert not any(found), "\n".join(text for texts in found for text in texts)
