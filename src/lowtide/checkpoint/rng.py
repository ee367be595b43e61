"""The random number generators of a process: torch's, Python's and NumPy's.

Two of the three read outside of their memory if they are given a state that is none: NumPy checks nothing of the position
in it, torch not that its two counters agree. So every number is looked at before any of them gets it.
"""

from __future__ import annotations

import logging
import random
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

_log = logging.getLogger("lowtide")

_WORDS = 624
"""Of a Mersenne twister, which all three are."""
_TORCH_BYTES = 5056
_TORCH_HEAD = struct.Struct("<Qiiq")  # seed, words left, whether it was seeded, the next word
_TORCH_TAIL = (5040, 5052)
"""Of torch's state: bytes that are 0 or 1, whether a normal number is kept for the next call."""


def states() -> dict[str, Any]:
    """Everything that decides the next random numbers here."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # the caller's generator, not one of ours
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys, dtype=np.uint32).copy()),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "accelerator": None if accelerator is None else torch.get_device_module(accelerator).get_rng_state(),
    }


def problem_of(saved: Any) -> str | None:
    """What of ``saved`` is no state of a generator, or None."""
    if not isinstance(saved, dict) or set(saved) != {"torch", "python", "numpy", "accelerator"}:  # pyright: ignore[reportUnknownArgumentType]
        return "it is not what states() gives"
    found: dict[str, Any] = saved
    checks = (("torch", _is_torch), ("python", _is_python), ("numpy", _is_numpy), ("accelerator", _is_accelerator))
    return next((f"that of {name} is none" for name, is_state in checks if not is_state(found[name])), None)


def _is_torch(state: Any) -> bool:
    if not _is_flat(state, torch.uint8):
        return False
    raw = state.numpy().tobytes()
    if len(raw) == _TORCH_BYTES:
        _, left, seeded, following = _TORCH_HEAD.unpack_from(raw)
        # it reads left - 1 more words from the next one on, before it makes new ones
        if seeded != 1 or not 1 <= left <= _WORDS or not 0 <= following <= _WORDS - left + 1:
            return False
        if any(raw[at] > 1 for at in _TORCH_TAIL):
            return False
    try:
        torch.Generator().set_state(state)
    except RuntimeError:
        return False
    return True


def _is_python(state: Any) -> bool:
    if not isinstance(state, tuple) or len(state) != 3:  # pyright: ignore[reportUnknownArgumentType]
        return False
    found: tuple[Any, ...] = state
    version, words, gauss = found
    if version != 3 or not isinstance(words, tuple) or not (gauss is None or type(gauss) is float):
        return False
    numbers: tuple[Any, ...] = words
    if len(numbers) != _WORDS + 1 or not all(type(word) is int and 0 <= word < 2**32 for word in numbers):
        return False
    return numbers[-1] <= _WORDS


def _is_numpy(state: Any) -> bool:
    if not isinstance(state, tuple) or len(state) != 5:  # pyright: ignore[reportUnknownArgumentType]
        return False
    found: tuple[Any, ...] = state
    name, words, position, has_gauss, gauss = found
    if name != "MT19937" or not _is_flat(words, torch.uint32) or words.numel() != _WORDS:
        return False
    return type(position) is int and 0 <= position <= _WORDS and has_gauss in (0, 1) and type(gauss) is float


def _is_accelerator(state: Any) -> bool:
    return state is None or _is_flat(state, torch.uint8)


def _is_flat(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype is dtype and value.dim() == 1


def restore(saved: dict[str, Any]) -> None:
    """The inverse of ``states``; all of them or, with an error, none."""
    if (problem := problem_of(saved)) is not None:
        raise ValueError(f"the random numbers: {problem}")
    name, keys, position, has_gauss, gauss = saved["numpy"]
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    np.random.set_state((name, keys.numpy(), position, has_gauss, gauss))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if saved["accelerator"] is not None and accelerator is not None:
        torch.get_device_module(accelerator).set_rng_state(saved["accelerator"])
    elif saved["accelerator"] is not None:
        _log.warning("the checkpoint has random numbers of an accelerator, and there is none here")
