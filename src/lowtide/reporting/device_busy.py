"""How busy an accelerator is, as its driver says. Not run on one yet."""

from __future__ import annotations

import logging

import torch

_log = logging.getLogger("lowtide")


class DeviceBusy:
    """Asks until it turns out that nobody answers: the driver's Python package may be missing."""

    def __init__(self) -> None:
        self._asks = torch.cuda.is_available()

    def percent(self) -> float | None:
        """Now; ``None`` if there is no accelerator, or none that says."""
        if not self._asks:
            return None
        try:
            return float(torch.cuda.utilization())
        except Exception as error:  # whatever a driver raises, it is not worth a recording
            self._asks = False
            _log.debug("the accelerator does not say how busy it is: %s", error)
            return None
