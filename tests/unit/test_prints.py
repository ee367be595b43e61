"""The print of a tensor tells its elements, however they lie in memory, and nothing that lies between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowtide.runtime import prints
from lowtide.runtime.prints import print_of

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.transpose(1, 2),
    "channels last": lambda t: t[None].to(memory_format=torch.channels_last)[0],
    "columns": lambda t: t[:, :, 1:4],
    "every second": lambda t: t[:, ::2],
    "expanded": lambda t: t[:, :1].expand(-1, 7, -1),
    "one element": lambda t: t[1, 2, 3],
    "nothing": lambda t: t[:0],
    "offset": lambda t: t[1:],
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.int16)


def numbers(dtype: torch.dtype) -> Tensor:
    return (torch.arange(4 * 6 * 5).view(4, 6, 5) % 7 - 3).to(dtype)


@pytest.mark.parametrize("piece", [1, 1 << 18])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_print_tells_the_elements(layout: str, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prints, "_PIECE", piece)
    view = LAYOUTS[layout]
    base, same = numbers(dtype), numbers(dtype)
    expected = print_of(view(base))
    assert expected is not None
    assert print_of(view(same)) == expected
    shown = torch.zeros(base.shape, dtype=torch.bool)
    view(shown).fill_(True) if layout not in ("expanded", "channels last") else shown.copy_(_shown(layout, shown))
    for at in range(0, base.numel(), 3):
        changed = base.clone()
        flat = changed.view(-1)
        flat[at] = ~flat[at] if dtype is torch.bool else flat[at] + 1
        assert (print_of(view(changed)) != expected) == bool(shown.view(-1)[at]), at


def _shown(layout: str, like: Tensor) -> Tensor:
    shown = torch.zeros_like(like)
    if layout == "expanded":
        shown[:, :1] = True
    else:
        shown[:] = True
    return shown


def test_shape_dtype_and_conjugation_count() -> None:
    t = numbers(torch.complex64) * 1j
    assert print_of(t) != print_of(t.conj())
    assert print_of(t) != print_of(t.view(4, 30))
    zeros = torch.zeros(4)
    assert print_of(zeros) != print_of(zeros.to(torch.int32))


def test_what_has_no_memory_that_can_be_read_has_no_print() -> None:
    assert print_of(torch.eye(3).to_sparse()) is None
    assert print_of(torch.empty(3, device="meta")) is None
    seen: list[int | None] = []
    torch.vmap(lambda row: (seen.append(print_of(row)), row)[1])(torch.ones(2, 3))
    assert seen == [None]
