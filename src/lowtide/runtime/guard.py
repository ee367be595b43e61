"""What becomes of the activations of the unit that begins now: what the placement says, unless that would not fit.

A placement is made for the batches it has seen. A larger one, or memory that something else took, is noticed here, before the
unit computes: its activations are computed again or moved to the disk instead of kept, or a typed error says what grew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from lowtide.errors import OverBudget
from lowtide.planning.placement import Needs
from lowtide.runtime.budget import Budget
from lowtide.runtime.saved import SavedViews
from lowtide.runtime.unit import Unit

_log = logging.getLogger("lowtide")


class ActivationGuard:
    """One answer per unit and pass. ``planned`` is the placement's policy for a unit, ``policies`` what the caller chose."""

    def __init__(
        self,
        units: Sequence[Unit],
        policies: Sequence[str],
        planned: Callable[[Unit], str],
        *,
        budget: Budget,
        may_spill: bool,
    ) -> None:
        self._units, self._policies, self._planned = units, policies, planned
        self._budget, self._may_spill = budget, may_spill
        self.activations = [0] * len(units)
        """The most that autograd saved for each unit between two backward passes."""
        self.alone = True
        self.learning = True
        """Whether no step has shown yet what activations take."""
        self.needs: Needs | None = None
        self._elements = 0  # of this pass's inputs
        self._known_elements = 0  # the most for which activations are known
        self._spilling = False
        self.changes: dict[Unit, str] = {}
        """Units whose forward has changed something once, and what: none is planned to be computed again."""
        self.kept: dict[Unit, str] = {}
        """Units that were to be computed again in this step and were not, and what they were instead."""
        self._largest = 0  # bytes that autograd saved in one module of this step that was to be computed again

    def enter_model(self, elements: int) -> None:
        """A forward pass begins with so many elements of input."""
        self._elements = elements if torch.is_grad_enabled() else 0
        self._budget.larger = self._growth
        self._budget.read()

    def should_recompute(self, unit: Unit) -> bool:
        """Asked when a unit's forward begins: whether its activations are to be computed again in backward."""
        policy = self._policy_now(unit)
        self._spilling = policy in ("disk", "host") or (policy == "recompute" and unit in self.changes and self._is_tight(unit))
        return policy == "recompute"

    def should_keep(self, unit: Unit, nbytes: int, changes: str | None) -> bool:
        """Asked when the forward of a unit that is to be computed again is over, and ``nbytes`` of its activations are held:
        whether they stay. They must, whatever there is room for, if the forward ``changes`` something."""
        self._largest = max(self._largest, nbytes)
        if changes is None:
            if self._policies[unit.index] != "auto" or not self._is_room_for_all():
                self.kept.pop(unit, None)
                return False
        elif unit not in self.changes:
            _log.log(
                logging.DEBUG if self.changes else logging.WARNING,
                "the forward pass of unit %r changes %s, so its activations are not computed again in backward but kept",
                unit.name,
                changes,
            )
            self.changes[unit] = changes
            self._spilling = self._is_tight(unit)
        self._refuse_too_much(unit, nbytes)
        self.kept[unit] = "disk" if self._spilling else "keep"
        return True

    def _refuse_too_much(self, unit: Unit, nbytes: int) -> None:
        """Raise if what has to stay has used up what is left, and there is no disk to go to."""
        left = self._budget.left()
        if left is not None and self.needs is not None and not self._may_spill and left < self.needs.slack // 4:
            limit = self._budget.limit or 0
            raise OverBudget("activations that cannot be computed again", limit - left + nbytes, limit, unit.name)

    def _is_tight(self, unit: Unit) -> bool:
        """Whether activations that have to stay had better go to the disk."""
        if self.needs is None or not self._may_spill or self._policies[unit.index] not in ("auto", "stay"):
            return False
        left = (self._budget.left() or 0) - self.needs.largest - self.needs.slack
        return self._expected(unit) + self._largest * max(1, len(self._units) - len(self.kept)) > left // 2

    def _is_room_for_all(self) -> bool:
        """In the first step: whether the activations of all units that are still to come, if they are like the largest so far,
        and all gradients take less than half of what is left. Then nothing needs to be computed again to find out more."""
        if not self.learning or self.needs is None or self._budget.limit is None:
            return False
        gradients = sum(unit.gradients for unit in self.needs.units)
        left = (self._budget.left() or 0) - self.needs.largest - self.needs.slack - gradients
        return self._largest * max(1, len(self._units) - len(self.kept)) <= left // 2

    def should_spill(self) -> bool:
        """Asked for every tensor that autograd saves in the unit asked for last."""
        return self._spilling

    def outside_units(self) -> None:
        """No unit computes any more."""
        self._spilling = False

    def note(self, saved: SavedViews) -> None:
        """A backward pass is over: remember what the forward passes before it saved for each unit."""
        self._largest = 0
        for unit in self._units:
            self.activations[unit.index] = max(self.activations[unit.index], saved.saved_bytes.get(unit, 0))
        saved.saved_bytes.clear()
        self._known_elements = max(self._known_elements, self._elements)

    def _policy_now(self, unit: Unit) -> str:
        policy = self._planned(unit)
        if self._policies[unit.index] not in ("auto", "stay") or self.needs is None or not self.alone:
            return policy  # on several ranks it must be the same on all
        if self._budget.limit is None:
            return policy
        found = self._within(unit, policy, self.needs)
        if found != policy:  # freed memory that the allocator keeps counts as used: look again without it
            self._budget.make_room(self._budget.limit)
            found = self._within(unit, policy, self.needs)
        if found is None:
            expected = self._expected(unit)
            raise OverBudget("activations of the next unit", self._budget.read() + expected, self._budget.limit, unit.name)
        return found

    def _instead(self, unit: Unit) -> str | None:
        """What becomes of activations that cannot be kept."""
        if self._policies[unit.index] == "auto":
            return "recompute"
        return "disk" if self._may_spill else None

    @property
    def _growth(self) -> float:
        """How much larger this pass's inputs are than the largest for which activations are known."""
        return max(1.0, self._elements / self._known_elements) if self._known_elements else 1.0

    def _expected(self, unit: Unit) -> int:
        return int((self.activations[unit.index] or max(self.activations)) * self._growth)

    def _within(self, unit: Unit, policy: str, needs: Needs) -> str | None:
        """The policy for which there is room now; None if there is none."""
        left = self._budget.left() or 0
        if not self.learning and self._growth == 1.0:
            # The placement was made for this; only what came on top of it can stand in its way.
            tight = policy == "keep" and self.activations[unit.index] > left - needs.slack // 4
            return self._instead(unit) if tight else policy
        expected, reserve = self._expected(unit), needs.largest + needs.slack // 2
        if policy == "keep" and expected <= left - reserve - int(max(self.activations) * self._growth):
            return "keep"
        if expected <= left - reserve and self._policies[unit.index] == "auto":
            return "recompute"
        return "disk" if self._may_spill else None
