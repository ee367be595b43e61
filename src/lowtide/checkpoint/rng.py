"""The random number generators of a process: torch's, Python's and NumPy's."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

_log = logging.getLogger("lowtide")


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


def restore(saved: dict[str, Any]) -> None:
    """The inverse; all of them or, with an error, none."""
    name, keys, position, has_gauss, gauss = saved["numpy"]
    numpy_state = (name, keys.numpy(), position, has_gauss, gauss)
    np.random.RandomState().set_state(numpy_state)  # these three raise if it is no state
    random.Random().setstate(saved["python"])
    torch.Generator().set_state(saved["torch"])
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    np.random.set_state(numpy_state)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if saved["accelerator"] is not None and accelerator is not None:
        torch.get_device_module(accelerator).set_rng_state(saved["accelerator"])
    elif saved["accelerator"] is not None:
        _log.warning("the checkpoint has random numbers of an accelerator, and there is none here")
