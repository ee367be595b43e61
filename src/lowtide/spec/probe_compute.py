"""How fast this machine copies, multiplies and starts kernels: one number per function, each within a fraction of a second.

Every figure is the best of several runs: other programs can make a run slower, nothing makes one faster than the machine is.
Nothing here has been run on an accelerator yet; the code for it goes through ``torch.accelerator`` only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
_SMALLEST_SIDE = 128
"""Of a matrix, for the first product: even where a dtype is a thousand times too slow, it ends soon."""
_LEAST_RUNS = 3
_SMALL_OPERATIONS = 500


def copy_bandwidth(nbytes: int, seconds: float) -> float:
    """Bytes per second of a copy in host memory, counted once."""
    # Ones: zeros that nobody has written are one page of the kernel's, which is read from the cache.
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.ones(nbytes, dtype=torch.uint8)
    return nbytes / _best(lambda: target.copy_(source), seconds)


def elementwise_bandwidth(nbytes: int, seconds: float, device: torch.device) -> float:
    """Bytes per second that an addition of two tensors into a third reads and writes together."""
    left, right, total = (torch.ones(nbytes // 4, device=device) for _ in range(3))
    return 3 * nbytes / _best(lambda: torch.add(left, right, out=total), seconds)


def matmul_flops(dtype: torch.dtype, seconds: float, device: torch.device, *, largest_side: int) -> float | None:
    """Operations per second of square products, as large as the time allows; ``None`` if there is no such product here."""
    side = _SMALLEST_SIDE
    try:
        # A part of the time for each size: one run that another program held up must not pass for a slow machine.
        took = _products_seconds(side, dtype, device, seconds / 8)
        while 2 * side <= largest_side and 8 * took <= seconds / 2:
            side *= 2
            took = _products_seconds(side, dtype, device, seconds / 8)
        took = min(took, _products_seconds(side, dtype, device, seconds - 2 * took))
    except RuntimeError:  # what torch raises where a dtype has no kernel, or the device no memory left
        return None
    return 3 * 2 * side**3 / took


def kernel_seconds(device: torch.device) -> float:
    """To start one kernel that has next to nothing to do."""
    left, right = torch.zeros(16, device=device), torch.ones(16, device=device)

    def many() -> None:
        for _ in range(_SMALL_OPERATIONS):
            torch.add(left, right)

    return _best(many, 0.05) / _SMALL_OPERATIONS


def fault_seconds(nbytes: int, seconds: float) -> float:
    """What a byte of fresh host memory costs on top of writing it. 0 if memory that is given back is not really given back.

    Tensors above 32 MiB are always mapped and unmapped by the C library, so each new one consists of pages not seen before.
    """
    kept = torch.zeros(nbytes, dtype=torch.uint8)
    reused = _best(lambda: kept.fill_(1), seconds / 2)
    fresh = _best(lambda: torch.empty(nbytes, dtype=torch.uint8).fill_(1), seconds / 2)
    return max(0.0, fresh - reused) / nbytes


def transfer_seconds(nbytes: int, seconds: float, source: torch.device, target: torch.device) -> float:
    """To copy ``nbytes`` from one device to another; host memory is page-locked, as transfers that overlap need it."""
    pinned = torch.device("cpu") in (source, target)
    at_source = torch.ones(nbytes, dtype=torch.uint8, device=source, pin_memory=pinned and source.type == "cpu")
    at_target = torch.ones(nbytes, dtype=torch.uint8, device=target, pin_memory=pinned and target.type == "cpu")
    return _best(lambda: at_target.copy_(at_source, non_blocking=True), seconds)


def _products_seconds(side: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Of the three products that training a linear layer makes: forward, and the gradients of its input and its weight.

    They differ in what is transposed. Where a dtype has no instructions of its own, that alone can make a factor of ten.
    """
    left, right = (torch.full((side, side), 0.5, dtype=dtype, device=device) for _ in range(2))
    total = torch.empty((side, side), dtype=dtype, device=device)

    def three() -> None:
        torch.mm(left, right.t(), out=total)
        torch.mm(left, right, out=total)
        torch.mm(left.t(), right, out=total)

    return _best(three, seconds, least=1)


def _best(run: Callable[[], object], seconds: float, *, least: int = _LEAST_RUNS) -> float:
    """Seconds of the fastest run, after one that does not count; as many as fit in ``seconds``, but ``least`` at least."""
    best = float("inf")
    run()
    _wait()
    started = time.perf_counter()
    done = 0
    while done < least or time.perf_counter() - started < seconds:
        before = time.perf_counter()
        run()
        _wait()
        best = min(best, time.perf_counter() - before)
        done += 1
    return best


def _wait() -> None:
    """Kernels of an accelerator run behind the caller's back."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
