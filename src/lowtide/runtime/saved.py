"""Saved-tensor hooks: what autograd keeps of a forward pass, and how.

[Note: autograd keeps views of parameters] ``F.linear`` saves ``weight.t()``, which shares the weight's memory, so releasing
a unit would free nothing. While a unit computes, a saved tensor that lies in the unit's block is packed as (unit, offset,
shape, stride, version), and unpacking gathers the unit on demand and checks the version. Other saved tensors go to whatever
hooks were open before (a caller's checkpointing, for instance), as if ours were not there; where none were, they are kept
as they are or spilled to a store.
"""

from __future__ import annotations

import bisect
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import Refused, StaleGraph
from lowtide.runtime.profiling import Ranges
from lowtide.runtime.residency import Residency
from lowtide.runtime.spill import Spill, Spilled, check_version
from lowtide.runtime.unit import Unit
from lowtide.torch_internals import (
    at_end_of_backward,
    backward_under_way,
    close_innermost_saved_tensor_hooks,
    forget_memory,
    has_no_memory,
    innermost_saved_tensor_hooks,
    is_functorch_wrapped,
    is_of_checkpoint,
    profile_under_way,
    takes_saved_tensor_hooks,
)


class Needed:
    """Something in a graph that needs the values which ``unit`` has now; as long as it lives, so does the need."""

    __slots__ = ("__weakref__", "rewritten", "unit", "version")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.version = unit.version
        self.rewritten: str | None = None  # a parameter that a caller has changed since

    def check(self) -> None:
        """Raise if the unit has other values by now."""
        if self.version != self.unit.version:
            raise StaleGraph(self.unit.name)
        if self.rewritten is not None:
            raise Refused(
                f"parameter {self.rewritten!r} was changed during the forward pass of unit {self.unit.name!r} or after it, so "
                f'that it cannot be computed again. Keep its activations (activations="keep").'
            )


class _Recipe(Needed):
    """A view of a unit's parameters. As in plain PyTorch it shows what is written to them, unless autograd knows of it."""

    __slots__ = ("conjugate", "counted", "dtype", "former", "index", "offset", "shape", "stride")

    def __init__(self, unit: Unit, view: Tensor) -> None:
        super().__init__(unit)
        self.dtype = view.dtype
        self.offset = int(view.storage_offset())
        self.shape = view.shape
        self.stride = view.stride()
        self.conjugate = view.is_conj()
        self.index = max(bisect.bisect_right(unit.layout.offsets, self.offset * view.itemsize) - 1, 0)
        # a view of ``p.data`` has a counter of its own, which goes on without the parameter's
        version = view._version  # pyright: ignore[reportPrivateUsage]
        self.counted = version if version == self._now() else None
        self.former: Tensor | None = None  # the values, if the parameter was given other memory since

    @property
    def place(self) -> tuple[object, ...]:
        """Which values it stands for."""
        return self.unit.index, self.offset, tuple(self.shape), self.stride

    def check(self) -> None:
        super().check()
        if self.counted is not None and self.former is None:
            check_version(self._now(), self.counted, self.shape, self.dtype)

    def _now(self) -> int:
        return self.unit.params[self.index]._version  # pyright: ignore[reportPrivateUsage]

    def view_in(self, whole: Tensor) -> Tensor:
        """The view, in the bytes of the unit."""
        with torch.no_grad():
            storage = whole.untyped_storage()
            view = torch.empty(0, dtype=self.dtype, device=storage.device)
            place: Any = (storage, self.offset, self.shape, self.stride)
            view.set_(*place)
            return view.conj() if self.conjugate else view


class KeptBytes:
    """Memory that graphs keep alive by what autograd saved, now. Storages count once, however many tensors in them were saved.

    ``stays`` are addresses of storages that are in memory anyway: parameters, buffers.
    """

    def __init__(self, stays: frozenset[int] = frozenset()) -> None:
        self._stays = stays
        self._holders: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._owners: dict[int, Unit | None] = {}
        self._gone: deque[int] = deque()
        self._total = 0

    def add(self, tensor: Tensor, address: int, unit: Unit | None = None) -> bool:
        """A tensor is saved, while ``unit`` computes; whether it counts. If so, ``let_go`` of its address must follow."""
        if address in self._stays:
            return False
        self._sweep()  # or memory that is used again would count as what it was before
        if address not in self._holders:
            self._sizes[address] = tensor.untyped_storage().nbytes()
            self._owners[address] = unit
            self._total += self._sizes[address]
        self._holders[address] = self._holders.get(address, 0) + 1
        return True

    def let_go(self, address: int) -> None:
        """From any thread, at any moment: only note it."""
        self._gone.append(address)

    def read(self) -> int:
        """Bytes. Only the thread that runs the step may ask."""
        self._sweep()
        return self._total

    def by_unit(self) -> dict[Unit | None, int]:
        """The same, by the unit that computed when it was first saved."""
        self._sweep()
        found: defaultdict[Unit | None, int] = defaultdict(int)
        for address, unit in self._owners.items():
            found[unit] += self._sizes[address]
        return dict(found)

    def _sweep(self) -> None:
        while self._gone:
            address = self._gone.popleft()
            self._holders[address] -= 1
            if not self._holders[address]:
                del self._holders[address], self._owners[address]
                self._total -= self._sizes.pop(address)


class _Kept:
    """A tensor that stays in memory. Torch itself checks versions only where there are no hooks.

    Detached, because an operation's result refers to the operation's node: the node would keep itself alive through it.
    """

    __slots__ = ("_address", "_counted", "tensor", "version")

    def __init__(self, tensor: Tensor, counted: KeptBytes | None = None, address: int = 0, unit: Unit | None = None) -> None:
        self._counted: KeptBytes | None = None
        self.tensor = tensor.detach()
        self.version = tensor._version  # pyright: ignore[reportPrivateUsage]
        self._address = address
        self._counted = counted if counted is not None and address and counted.add(tensor, address, unit) else None

    def __del__(self) -> None:
        counted = getattr(self, "_counted", None)  # an interrupt may have come before there was one
        if counted is not None:
            counted.let_go(self._address)

    def unpack(self) -> Tensor:
        tensor = self.tensor
        check_version(tensor._version, self.version, tensor.shape, tensor.dtype)  # pyright: ignore[reportPrivateUsage]
        return tensor


class Held:
    """A tensor saved inside a checkpoint: held until its module is done, then dropped to be computed again, or kept after all.

    Dropped, it still shares the version counter, so that a change in place is found as in plain PyTorch.
    """

    __slots__ = ("_compute", "_kept", "_packed", "_tensor", "_used", "dtype", "is_held", "shape", "version")

    def __init__(self, tensor: Tensor, packed: Any, compute: Callable[[Any], Tensor], used: Callable[[], None]) -> None:
        self._tensor: Tensor | None = tensor.detach()
        self.version = _version_of(tensor)
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._packed, self._compute = packed, compute
        self._used = used
        self._kept: Spilled | _Kept | None = None
        self.is_held = True
        """Whether its memory is there because of this."""

    @property
    def storage(self) -> tuple[int, int]:
        """Address and size of its memory."""
        address = _address_of(self._tensor) if self.is_held and self._tensor is not None else 0
        return (address, self._tensor.untyped_storage().nbytes()) if address and self._tensor is not None else (0, 0)

    def keep(self, keep: Callable[[Tensor], Spilled | _Kept]) -> None:
        if self.is_held and self._tensor is not None:
            self._kept = keep(self._tensor)
            self._tensor = self._kept.tensor if isinstance(self._kept, _Kept) else self._kept.counter
            self._packed, self.is_held = None, False

    def drop(self) -> None:
        if type(self._tensor) is Tensor and _address_of(self._tensor):
            forget_memory(self._tensor)
        else:
            self._tensor = None
        self.is_held = False

    def unpack(self) -> Tensor:
        if self._tensor is not None:
            check_version(_version_of(self._tensor), self.version, self.shape, self.dtype)
            if self.is_held:  # a backward pass inside the forward of its module
                return self._tensor
        if self._kept is not None:
            self._used()
            return self._kept.unpack()
        return self._compute(self._packed)


class Record(Protocol):
    """What a call that may be computed again is told of the tensors that autograd saves in it."""

    def saw(self, tensor: Tensor, parameter: tuple[object, ...] | None) -> int | None:
        """The next tensor was saved; ``parameter``: it is this view of parameters. None: it may not be counted any more."""

    def hold(self, held: Held) -> Held: ...

    def used(self) -> None:
        """Backward takes a tensor that was kept."""


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class _Outer:
    """A tensor packed by hooks that were open before ours."""

    packed: Any
    unpack: Callable[[Any], Tensor]


def _address_of(tensor: Tensor) -> int:
    """Where the storage of ``tensor`` begins; 0 if it has none that could be told."""
    if tensor.layout is not torch.strided or is_functorch_wrapped(tensor) or has_no_memory(tensor):
        return 0
    return tensor.untyped_storage().data_ptr()


def _nothing(_: int) -> bool:
    return False


class SavedViews:
    """Opens and closes the hooks around forward passes, and counts what they see.

    ``stays`` says whether the storage that begins at an address is in memory anyway (a resident parameter, a buffer): a tensor
    in it is neither spilled nor counted.
    """

    def __init__(
        self,
        residency: Residency,
        on_demand: Callable[[Unit], None],
        *,
        spill: Spill | None = None,
        stays: Callable[[int], bool] = _nothing,
    ) -> None:
        self._residency = residency
        self._on_demand = on_demand
        self.spill = spill
        self._stays = stays
        self._pack_functions: set[Callable[..., Any]] = set()
        self._around: set[Callable[..., Any]] = set()  # those of checkpoints in which ours are open
        self._needed: defaultdict[Unit, weakref.WeakSet[Needed]] = defaultdict(weakref.WeakSet)
        self._computing: list[Unit | None] = []  # of the modules whose forward runs, innermost last
        self.saved_bytes: defaultdict[Unit | None, int] = defaultdict(int)
        """Bytes of activations that autograd kept or spilled while a unit computed (None: outside of all units). Storages
        count whole, once per forward pass of the model; ``clear`` it when a step begins."""
        self.kept: KeptBytes | None = None
        """Counts what is in memory because autograd saved it; None: nobody asks."""
        self._ranges = Ranges()
        self._in_range: tuple[int, Unit] | None = None

    # -- who computes, who is needed ----------------------------------------------------------------------------------

    def enter(self, units: Sequence[Unit]) -> None:
        """A module that needs ``units`` begins: what is saved from now on is counted for the first of them."""
        self._computing.append(units[0] if units else None)

    def leave(self) -> None:
        """That module is done."""
        if self._computing:
            self._computing.pop()

    def recover(self, computing: int, broken: Sequence[saved_tensors_hooks] | None) -> None:
        """Calls were broken off: so many modules compute, and hooks that were opened for them, innermost first, are closed.
        ``None``: all that are open on this thread, and those of checkpoints, which took ours for their own when they ended."""
        del self._computing[computing:]
        known = {context.pack_hook for context in broken} if broken is not None else self._pack_functions | self._around
        while (top := innermost_saved_tensor_hooks()) is not None and top[0] in known:
            close_innermost_saved_tensor_hooks()
        self._pack_functions -= known
        self._around -= known

    def need(self, unit: Unit) -> Needed:
        """Note that whoever holds the result needs the present values of ``unit``."""
        return self._note(Needed(unit))

    def _note(self, needed: Needed) -> Needed:
        self._needed[needed.unit].add(needed)
        return needed

    def live_recipes(self, unit: Unit) -> int:
        """How many places in graphs still need the values of ``unit``."""
        return len(self._needed[unit]) if unit in self._needed else 0

    def before_replaced(self, unit: Unit, indices: Sequence[int]) -> None:
        """Parameters are about to get the values of other memory that a caller gave them: in plain PyTorch the graphs that
        exist keep the former memory."""
        for needed in list(self._needed.get(unit, ())):
            if isinstance(needed, _Recipe) and needed.index in indices and needed.former is None:
                needed.former = needed.view_in(self._residency.whole(unit)).clone()

    def written(self, unit: Unit, indices: Sequence[int]) -> None:
        """A caller has changed parameters: who needs them to compute something again would come to other results."""
        for needed in list(self._needed.get(unit, ())):
            if not isinstance(needed, _Recipe):
                needed.rewritten = unit.names[indices[0]]

    def carry_over(self, unit: Unit, version: int) -> None:
        """Views of a unit that had ``version`` show what was written since; each tells by itself if autograd knows of it."""
        for needed in list(self._needed.get(unit, ())):
            if isinstance(needed, _Recipe) and needed.version == version:
                needed.version = unit.version

    # -- hooks --------------------------------------------------------------------------------------------------------

    def open(self) -> saved_tensors_hooks | None:
        """Open the hooks, unless ours are the innermost already, or torch takes none: what is saved then keeps the memory
        that it lies in, and a parameter itself cannot be read once it is evicted."""
        if not takes_saved_tensor_hooks():
            return None
        outer = innermost_saved_tensor_hooks()
        if outer is not None and outer[0] in self._pack_functions:
            return None
        seen: set[int] = set()

        def pack(tensor: Tensor) -> Any:
            address = _address_of(tensor)
            recipe = self._recipe(tensor, address)
            if recipe is not None:
                if numbered is not None:
                    numbered(tensor)
                return recipe
            return _Outer(outer[0](tensor), outer[1]) if outer is not None else self._keep(tensor, address, seen)

        # A checkpoint may be outside of our hooks in its recomputation and inside of them in forward, where it sees all.
        numbered = outer[0] if outer is not None and is_of_checkpoint(outer[0]) else None
        return self._opened(pack)

    def open_in_checkpoint(self, record: Record, *, again: bool) -> saved_tensors_hooks:
        """Open the hooks inside those of a checkpoint, which must be the innermost.

        A checkpoint tells saved tensors by their number, so it is shown views of parameters as well; it gets no hold on them.
        ``again``: this is the recomputation, whose tensors are all in memory until backward has used them, and are counted.
        """
        outer = innermost_saved_tensor_hooks()
        seen: set[int] = set()

        def pack(tensor: Tensor) -> Any:
            address = _address_of(tensor)
            recipe = self._recipe(tensor, address)
            number = record.saw(tensor, None if recipe is None else recipe.place)
            if again and recipe is None and address and address not in seen and not self._stays(address):
                seen.add(address)
                self._count(tensor.untyped_storage().nbytes())
            packed = outer[0](tensor) if outer is not None and number is not None else None
            if recipe is not None:
                return recipe
            if again or outer is None or number is None:
                return _Outer(packed, outer[1]) if packed is not None and outer is not None else _Kept(tensor)
            return record.hold(Held(tensor, packed, outer[1], record.used))

        if outer is not None:
            self._around.add(outer[0])
        return self._opened(pack)

    def close_in_checkpoint(self, context: saved_tensors_hooks | None) -> None:
        self.close(context)
        outer = innermost_saved_tensor_hooks()
        if outer is not None:
            self._around.discard(outer[0])

    def bytes_of(self, held: Sequence[Held]) -> int:
        """What keeping would take: storages count once, those that stay in memory anyway not at all."""
        storages = dict(each.storage for each in held)
        return sum(nbytes for address, nbytes in storages.items() if not self._stays(address))

    def keep(self, held: Sequence[Held]) -> None:
        """What is held is not to be dropped: it is kept or spilled, as if it had never been shown to a checkpoint."""
        seen: set[int] = set()
        for each in held:
            each.keep(lambda tensor: self._keep(tensor, _address_of(tensor), seen))

    def close(self, context: saved_tensors_hooks | None) -> None:
        if context is not None and context.pack_hook in self._pack_functions:  # or it was closed after an interrupt
            context.__exit__()
            self._pack_functions.discard(context.pack_hook)

    def _opened(self, pack: Callable[[Tensor], Any]) -> saved_tensors_hooks:
        self._pack_functions.add(pack)
        context = saved_tensors_hooks(pack, self._unpack)
        context.__enter__()
        return context

    def _recipe(self, tensor: Tensor, address: int) -> _Recipe | None:
        unit = self._residency.unit_at(address) if address else None
        if unit is None or tensor.is_neg():
            return None
        recipe = _Recipe(unit, tensor)
        self._note(recipe)
        return recipe

    def _keep(self, tensor: Tensor, address: int, seen: set[int]) -> Spilled | _Kept:
        if address and not self._stays(address):
            handle = self.spill.pack(tensor) if self.spill is not None else None
            # a spilled tensor's memory may go to another one while this pass is still open: only its first save counts
            if handle is not None:
                self._count(handle.stored.nbytes if handle.is_first else 0)
                return handle
            if address not in seen:
                seen.add(address)
                self._count(tensor.untyped_storage().nbytes())
            return _Kept(tensor, self.kept, address, self._computing[-1] if self._computing else None)
        return _Kept(tensor)

    def _count(self, nbytes: int) -> None:
        self.saved_bytes[self._computing[-1] if self._computing else None] += nbytes

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Kept | Spilled | Held):
            return packed.unpack()
        if isinstance(packed, _Outer):
            return packed.unpack(packed.packed)
        packed.check()
        if profile_under_way():
            self._range_of(packed.unit)
        if packed.former is not None:
            return packed.former
        self._on_demand(packed.unit)
        return packed.view_in(self._residency.whole(packed.unit))

    def _range_of(self, unit: Unit) -> None:
        """Backward has come to ``unit``: what follows is its, in a profile, until backward comes to another one."""
        task = backward_under_way()
        if task is None or self._in_range == (task, unit):
            return
        if self._in_range is None or self._in_range[0] != task:
            at_end_of_backward(self._end_range)
        self._ranges.clear()
        self._ranges.enter("backward", unit.name)
        self._in_range = (task, unit)

    def _end_range(self) -> None:
        self._ranges.clear()
        self._in_range = None
