"""An update that is put off: each unit is updated when the next forward pass needs it.

[Note: a step that is not done yet] With states on disk, ``optimizer.step()`` would stand still while every byte is read and
written, and the forward pass after it would leave the disk idle. So the step only notes what it will do (which gradients
exist, the optimizer's options as they are now), and every unit is updated in its slot just before it is used, while the states
of the next one are being read. Whoever looks at parameters, gradients or states in between first has it done.

It is not put off on several ranks (a shard is sent to others before its unit begins here), nor for an optimizer that was seen
to change its own options during a step.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from lowtide.runtime.ambient import disturbed
from lowtide.runtime.chunked_step import ChunkedStep
from lowtide.runtime.grads import Grads
from lowtide.runtime.placer import Placer
from lowtide.runtime.residency import Residency
from lowtide.runtime.unit import Unit
from lowtide.runtime.update import Update


class DueUpdate:
    """The units that are still to be updated, if any."""

    def __init__(self, grads: Grads, residency: Residency, update: Update, placer: Placer) -> None:
        self._grads, self._residency, self._update, self._placer = grads, residency, update, placer
        self._step: ChunkedStep | None = None
        self._pending: dict[Unit, frozenset[int]] = {}  # indices of the parameters that have a gradient

    def begin(self, optimizer: Optimizer) -> list[nn.Parameter] | None:
        """``optimizer.step()`` was called. Returns the parameters that will change, or None if it cannot be put off."""
        records = [r for r in self._grads.by_param.values() if r.param.grad is not None]
        if not (self._residency.updates_in_slots and self._update.may_put_off) or not all(map(self._grads.is_shelved, records)):
            return None
        if disturbed():  # the optimizer is to run with what the caller has switched on for it
            return None
        step = ChunkedStep(optimizer, put_off=True)
        changing = [r for r in records if step.owns(r.param)]
        if not changing:
            step.finish()
            return []
        self._step = step
        for record in changing:
            self._pending[record.unit] = self._pending.get(record.unit, frozenset()) | {record.index}
        return [r.param for r in changing]

    def expect(self, unit: Unit) -> None:
        """``unit`` will be needed soon: start reading what its update needs."""
        if unit in self._pending:
            self._update.expect(unit)

    def settle(self, unit: Unit) -> None:
        """Update ``unit`` now, if that is due."""
        present = self._pending.get(unit)
        if present is None or self._step is None:
            return
        self._placer.buffers_within_room()
        with self._residency.holding(unit):
            if not self._residency.home(unit).in_memory:
                self._residency.whole(unit)
            self._update.run_due(self._step, unit, present)
        self._residency.accept_writes(unit)
        del self._pending[unit]
        if not self._pending:
            self._step.finish()
            self._step = None
            self._placer.buffers_as_planned()

    @property
    def under_way(self) -> bool:
        """Whether a step was taken and is not done."""
        return self._step is not None

    def forget(self) -> None:
        """Parameters and states are about to be replaced."""
        self._pending.clear()
        self._step = None
        self._placer.buffers_as_planned()
        self._update.forget_expected()
