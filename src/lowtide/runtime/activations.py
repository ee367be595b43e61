"""What becomes of the tensors that autograd saves: kept, computed again, or moved to the disk, unit by unit.

The placer says which; this file asks it when a unit begins, and has it done by saved-tensor hooks and recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from lowtide.runtime.budget import Budget
from lowtide.runtime.placer import Placer
from lowtide.runtime.recompute import Pinning, Recompute, modules_to_wrap
from lowtide.runtime.residency import Residency
from lowtide.runtime.saved import SavedViews
from lowtide.runtime.spill import Spill
from lowtide.runtime.turn import Call
from lowtide.runtime.unit import Unit
from lowtide.tiers.store import Store
from lowtide.torch_internals import backward_under_way, is_recorded, under_transform

_IN_FLIGHT = 256 << 20  # bytes of activations on their way to the disk, and again on their way back, at most


class Activations:
    """See the module's docstring."""

    def __init__(
        self, residency: Residency, placer: Placer, budget: Budget, store: Store | None, *, needed: Callable[[Unit], None]
    ) -> None:
        self._placer, self._budget = placer, budget
        spill = None
        if store is not None:
            in_flight = _IN_FLIGHT if budget.limit is None else min(_IN_FLIGHT, budget.limit // 32)
            spill = Spill(store, in_flight_bytes=in_flight, should_spill=lambda _: placer.guard.should_spill())
            budget.pools.append(spill.arena)
        self.saved = SavedViews(residency, needed, spill=spill, stays=self._stays_in_memory)
        self._recompute: Recompute | None = None
        self._unit_of: dict[nn.Module, Unit] = {}
        self._residents: set[int] = set()  # addresses of storages that stay in memory whatever autograd saves

    @property
    def handled(self) -> bool:
        """Whether anything but keeping them can happen, or they are counted."""
        return self._budget.limit is not None or any(p.activations != "keep" for p in self._placer.placement.units)

    def install(self, model: nn.Module, units: Sequence[Unit], pinning: Pinning) -> None:
        """Make the units' modules able to recompute."""
        self._recompute = Recompute(pinning, self.saved, self)
        for module, needed in modules_to_wrap(model, units).items():
            self._unit_of[module] = needed[0]
            self._recompute.install(module, needed)

    def should_recompute(self, module: nn.Module) -> bool:
        """Not inside torch.func's transforms: in backward they are over, and the call would be another one. Nor where
        operators are recorded instead of walked backward."""
        return self._placer.guard.should_recompute(self._unit_of[module]) and not (under_transform() or is_recorded())

    def should_keep(self, module: nn.Module, nbytes: int, changes: str | None) -> bool:
        return self._placer.guard.should_keep(self._unit_of[module], nbytes, changes)

    def enter_model(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        """The model's forward begins."""
        if self.handled:
            self._budget.skip()  # what the loop did between two passes
            self._placer.guard.enter_model(sum(t.numel() for t in inputs))
            residents = [*model.buffers(), *(p for p in model.parameters() if type(p) is nn.Parameter)]
            self._residents = {t.untyped_storage().data_ptr() for t in residents}

    def backward_ended(self) -> None:
        """What the forward passes before it had saved is gone."""
        if self.handled:
            self._placer.guard.note(self.saved)

    def enter(self, units: Sequence[Unit]) -> None:
        """A module that needs ``units`` begins."""
        self.saved.enter(units)
        self._budget.look(_moment("begins", units))

    def leave(self, units: Sequence[Unit]) -> None:
        """That module is done."""
        self.saved.leave()
        self._placer.guard.outside_units()
        self._budget.look(_moment("ends", units))

    def recover(self, kept: Sequence[Call], broken: Sequence[Call]) -> None:
        """Calls were broken off, inside those that are kept or all."""
        computing = [call for call in kept if call.is_forward and call.units is not None]
        self.saved.recover(len(computing), [c.saved for c in broken if c.saved is not None] if kept else None)
        if not kept:
            self._placer.guard.outside_units()
            if self._recompute is not None:
                self._recompute.put_back()
            if self.saved.spill is not None:
                self.saved.spill.recover()

    def _stays_in_memory(self, address: int) -> bool:
        return address in self._residents


def _moment(what: str, units: Sequence[Unit]) -> tuple[str, int | None, bool]:
    """A module that only calls others has no unit of its own."""
    return what, units[0].index if units else None, backward_under_way() is not None
