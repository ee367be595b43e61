"""Updates inside backward: each unit as soon as its gradients are reduced, so that no gradient outlives its unit.

[Note: the graph may still need a unit] A gradient is complete when every use of its parameter has been walked, but autograd may
keep a view of the parameter for something else (``x * w.detach()``). Writing under it would make backward silently wrong.
So a unit of which the graph keeps recipes or views is updated at the end of backward, when the graph is gone. If the graph is
still there then (``retain_graph=True``), nothing can be updated, and that is an error.
"""

from __future__ import annotations

import gc

from torch.optim import Optimizer

from lowtide.errors import Refused
from lowtide.runtime.grads import Grads
from lowtide.runtime.optimizer_copy import alike, all_options
from lowtide.runtime.residency import Residency
from lowtide.runtime.saved import SavedViews
from lowtide.runtime.unit import Unit
from lowtide.runtime.update import Update
from lowtide.torch_internals import mark_changed


class BackwardUpdate:
    """The part of a step that ``Update("backward")`` moves from ``optimizer.step()`` into backward."""

    def __init__(self, grads: Grads, residency: Residency, update: Update, saved: SavedViews) -> None:
        self._grads, self._residency, self._update, self._saved = grads, residency, update, saved
        self.optimizer: Optimizer | None = None
        self.bad_unit: Unit | None = None
        """A unit whose gradients were not finite: this step changes nothing."""
        self._done: set[Unit] = set()

    def refuse_second_pass(self) -> None:
        """A backward pass begins: there must be no finished one waiting for ``optimizer.step()``."""
        if self._done or self.bad_unit is not None:
            raise Refused(
                "update='backward' updates parameters in loss.backward(): one backward per step. "
                "Call optimizer.step() after each, or use update='step' to accumulate gradients."
            )
        self._grads.refuse_used("plain PyTorch would add to it", but_zeroed=True)

    def expect(self, unit: Unit) -> None:
        """Backward has reached ``unit``."""
        if self.optimizer is not None:
            self._update.expect(unit)

    def go_on(self) -> None:
        """Update every unit whose gradients are reduced and which the graph does not need any more."""
        for unit in list(self._grads.reduced):
            if not self._needed_by_graph(unit) and self._residency.may_update(unit, wait=False):
                self._run(unit)
        self._update.read_ahead()

    def finish(self) -> None:
        """The backward pass is over: update what is left."""
        if any(map(self._saved.live_recipes, self._grads.reduced)):
            gc.collect()  # a graph of an earlier pass that failed may only be held by the frames of its error
        for unit in self._grads.reduced:
            if self._saved.live_recipes(unit):
                raise Refused(
                    f"the graph still needs unit {unit.name!r} after its backward (retain_graph=True?): "
                    f"update='backward' cannot change its parameters. Use update='step'."
                )
        left = list(self._grads.reduced)
        # All are released before any is waited for, because every rank waits for the others.
        still_read = [unit for unit in left if not self._residency.may_update(unit, wait=False)]
        for unit in left:
            if unit in still_read:
                self._residency.may_update(unit, wait=True)
            self._run(unit)
        self._update.forget_expected()
        self._update.finish_step()
        if self.optimizer is not None:
            self._grads.show_used({param for group in self.optimizer.param_groups for param in group["params"]})

    @property
    def waits_for_step(self) -> bool:
        """Whether parameters have been updated and ``optimizer.step()`` has not been called yet."""
        return bool(self._done)

    def refuse_another_step(self, optimizer: Optimizer) -> None:
        """``optimizer.step()`` was called: raise if, after what the caller has done since, it had to do anything else than what
        was done in backward."""
        if optimizer is not self.optimizer:
            raise Refused(
                "this optimizer does not update the model any more: with update='backward' only the one does that was given to "
                "lowtide.shard last. Use update='step' for several optimizers of one model."
            )
        if not self._done:
            if self.bad_unit is None:
                self._grads.refuse_used("a step would use it again")
            return
        if not alike(self._update.options, all_options(optimizer)):
            raise Refused(
                "options of the optimizer (lr, betas, ...) or its states have changed since loss.backward() began to update "
                "parameters with update='backward'. Change them before backward or after step(), or use update='step'."
            )
        self._grads.refuse_dropped()

    def end_step(self) -> tuple[bool, Unit | None]:
        """``optimizer.step()`` was called: whether anything was updated, and the unit that stopped it if a gradient was bad."""
        bad, self.bad_unit = self.bad_unit, None
        self._done.clear()
        return bad is None, bad

    def abandon(self) -> None:
        """A backward pass failed."""
        self._grads.reduced.clear()
        self._grads.finite.clear()
        self._update.forget_expected()
        if not self._update.begun:
            self.forget_step()

    def forget_step(self) -> None:
        """The step under way changed nothing, or all values have been loaded anew."""
        self._done.clear()
        self.bad_unit = None
        self._update.forget_step()

    def _needed_by_graph(self, unit: Unit) -> bool:
        return self._saved.live_recipes(unit) > 0 or self._residency.held_by_others(unit)

    def _run(self, unit: Unit) -> None:
        grads = self._grads.reduced.pop(unit)
        if not self._grads.finite.pop(unit, True) and self.bad_unit is None:
            self.bad_unit = unit
            if self._done:
                raise Refused(
                    f"the gradient of unit {unit.name!r} is not finite, and other units have been updated already: with "
                    f"update='backward' a step cannot be taken back. Use update='step', which skips such steps."
                )
        if self.bad_unit is not None or self.optimizer is None or all(g is None for g in grads):
            return
        self._done.add(unit)
        with self._residency.holding(unit):
            # On several ranks only this rank's part is needed, and whether it is whole depends on timing: no rank may gather.
            if self._residency.updates_in_slots and not self._residency.home(unit).in_memory:
                self._residency.whole(unit)
            self._update.run_unit(self.optimizer, unit, grads)
        self._residency.show(unit)
        unit.version += 1
        # Not those that are frozen: the graph may still need them, and they are what they were.
        mark_changed([p for p, grad in zip(unit.params, grads, strict=True) if grad is not None])
        self._residency.accept_writes(unit)  # a unit that came on demand is still pinned here
