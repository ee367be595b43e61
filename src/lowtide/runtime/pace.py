"""A rank that runs ahead in backward waits a little for the others, so that its whole gradients do not pile up.

Gradients wait for their reduction as this rank computed them, whole, and that needs the other ranks: one that is three units
ahead holds three units more. It loses nothing by waiting, since all meet at the end of backward. But it must not wait for
long: ranks whose graphs differ send some units only when their backward ends, and may need this rank to get there (a gather, a
collective of the caller's own). So patience has an end: where it was in vain it is not tried again in this backward, and after
three such in a row never again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from lowtide.comm.channel import Ticket

_log = logging.getLogger("lowtide")

UNDER_WAY = 1
"""Units that may wait for their reduction while the next is computed."""
_PATIENCE = 2.0
_IN_A_ROW = 3


class Pace:
    """Asked after every unit that was sent."""

    def __init__(self) -> None:
        self._in_vain = False  # in this backward
        self._passes_in_vain = 0  # in a row

    def end_pass(self) -> None:
        """A backward is over, in whatever way."""
        if self._passes_in_vain < _IN_A_ROW:
            self._passes_in_vain = self._passes_in_vain + 1 if self._in_vain else 0
        self._in_vain = self._passes_in_vain >= _IN_A_ROW

    def hold(self, sent: Iterable[Ticket[Any]]) -> None:
        """Wait until no more than :data:`UNDER_WAY` of ``sent``, in their order, are still to be reduced."""
        waiting = [ticket for ticket in sent if not ticket.done]
        until = time.monotonic() + _PATIENCE
        for ticket in [] if self._in_vain else waiting[:-UNDER_WAY]:
            if not ticket.done_within(max(0.0, until - time.monotonic())):
                self._in_vain = True
                _log.debug("%s did not come in %g s: this backward waits for no more", ticket.label, _PATIENCE)
                return
