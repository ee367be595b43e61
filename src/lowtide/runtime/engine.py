"""The mutable root: one verb per moment of a step. It decides nothing that a plan, a stage or a policy can say."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from lowtide import errors
from lowtide.comm.channel import Channel
from lowtide.comm.group import Group
from lowtide.comm.processes import this_host
from lowtide.config import Config
from lowtide.runtime import evicted, norm
from lowtide.runtime.backward_update import BackwardUpdate
from lowtide.runtime.budget import Budget
from lowtide.runtime.buffers import Buffers
from lowtide.runtime.exchange import Exchange
from lowtide.runtime.grad_store import Change, ShelvedGrads, all_finite
from lowtide.runtime.grads import GradRecord, Grads
from lowtide.runtime.initial import InitialValues
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.outputs import map_tensors, tensors_in
from lowtide.runtime.placer import Placer
from lowtide.runtime.prefetch import Successors
from lowtide.runtime.recompute import Recompute, modules_to_wrap
from lowtide.runtime.residency import Residency
from lowtide.runtime.saved import SavedViews
from lowtide.runtime.scale import LossScale
from lowtide.runtime.sharded_grad import ShardedGrad
from lowtide.runtime.spill import Spill
from lowtide.runtime.stream import UnitStream
from lowtide.runtime.trace import Trace
from lowtide.runtime.unit import Unit, named
from lowtide.runtime.update import Update
from lowtide.runtime.usage import Usage
from lowtide.spec.units import UnitSpec
from lowtide.tiers.arena import Arena
from lowtide.tiers.disk import DiskStore, Folder
from lowtide.tiers.store import Store, Traffic
from lowtide.torch_internals import at_end_of_backward, backward_under_way, is_tracing, mark_changed

_log = logging.getLogger("lowtide")

Touch = Callable[[nn.Parameter, Callable[..., Any], Any, Any], Any]
"""What an evicted parameter answers when it is used, while a state_dict is written or read."""


class _Pass:
    """Held by the callback at the end of one backward pass, and by nobody else: gone if the pass failed."""


class Engine:
    """Everything that belongs to one sharded model."""

    def __init__(
        self,
        model: nn.Module,
        specs: Sequence[UnitSpec],
        config: Config,
        group: Group,
        channels: tuple[Channel, Channel],
        *,
        whole_parameters: bool = False,
    ) -> None:
        self.model, self.config, self.group = model, config, group
        device = specs[0].params[0].device if specs else torch.device("cpu")
        if device.type == "meta":
            device = torch.device("cpu")
        shard = (group.shard.rank, group.shard.size)
        self.units = [Unit(i, spec, config, shard, whole_parameters=whole_parameters) for i, spec in enumerate(specs)]
        self.unit_of = {p: u for u in self.units for p in u.params}
        self.name_of = named(self.units)
        self.ledger, self.trace = Ledger(), Trace()
        self.homes, self.arena = Arena(device, forked=True), Arena(device, forked=False)
        self.buffers_arena = Arena(device, forked=False)
        self.store: Store | None = _open_disk(config, group.rank)
        if self.store is not None:
            weakref.finalize(self, self.store.close)
        self.gathers, self.reductions = channels
        weakref.finalize(self, group.close)  # threads would keep a dropped model's group alive
        self.residency = Residency(
            self.units,
            group=group,
            channel=self.gathers,
            homes=self.homes,
            slots=self.arena,
            ledger=self.ledger,
            trace=self.trace,
            ahead=config.comm.prefetch,
        )
        self.grads = Grads(
            self.units,
            stage=config.stage,
            group=group,
            channel=self.reductions,
            owner=self,
            in_backward=config.update.in_backward,
            ledger=self.ledger,
            trace=self.trace,
        )
        self.exchange = Exchange(group, self.reductions)
        self.buffers = Buffers(model, group, self.gathers)
        self.scale = LossScale(config.precision.scale)
        self.update = Update(
            config=config,
            group=group,
            residency=self.residency,
            grads=self.grads,
            buffers=self.buffers_arena,
            ledger=self.ledger,
        )
        self.skipped_steps = 0
        self.budget = Budget(self._budget_of_this_rank())
        self.placer = Placer(
            self.units, config, budget=self.budget, store=self.store, slots=self.arena, buffers=self.buffers_arena
        )
        spill = Spill(self.store, should_spill=lambda _: self.placer.should_spill()) if self.store is not None else None
        self._saved = SavedViews(self.residency, self._needed_in_backward, spill=spill, stays=self._stays_in_memory)
        self._recompute = Recompute(self, self._saved, self._should_recompute)
        self._unit_of_module: dict[nn.Module, Unit] = {}
        self.backward_update: BackwardUpdate | None = None
        if config.update.in_backward:
            self.backward_update = BackwardUpdate(self.grads, self.residency, self.update, self._saved)
        self._forward_order, self._backward_order = Successors(), Successors()
        self._depth = 0  # of forward passes under way: root or unit
        self._backward: weakref.ref[_Pass] | None = None  # the outermost backward under way; dies with it
        self._demanded: set[Unit] = set()  # pinned outside their modules, until the pass ends
        self._poison: str | None = None
        self._norm_cache: dict[float, dict[int, float]] = {}
        self._touch: Touch | None = None
        self._addresses: set[int] = set()  # of storages that stay in memory whatever autograd saves

    def start(self, optimizer: Optimizer | None = None) -> None:
        """Take room for everything, take over the parameters, and make rank 0's values everybody's."""
        stage = self.config.stage
        self.placer.begin(optimizer, (self.group.shard.size, self.group.size))
        if self.updates_by_chunks:
            for unit in self.units:
                self._add_stream(unit)
        if optimizer is not None:
            self.reserve_states(optimizer)
        for unit in self.units:
            store = self.placer.store_for(unit, "parameters") if stage.parameters else None
            self.residency.reserve(unit, resident=not stage.parameters, store=store)
        initial = InitialValues(self.model, self.units, self.config.weights, self.group.rank, self.arena.device)
        evicted.register(self.unit_of, self)
        for unit in self.units:
            values = initial.of(unit)
            self.residency.take_over(unit, values)
            self.update.take_over(unit, values)
            del values
        if self.group.size > 1:
            self.buffers.send()
        if self.watches_units:
            for module, units in modules_to_wrap(self.model, self.units).items():
                self._unit_of_module[module] = units[0]
                self._recompute.install(module, units)
        self.budget.new_step()

    def _budget_of_this_rank(self) -> int | None:
        """The job's number, divided between its ranks on this host."""
        if self.config.memory_bytes is None:
            return None
        here = this_host()
        return self.config.memory_bytes // self.exchange.texts("the host", here).count(here)

    @property
    def watches_units(self) -> bool:
        """Whether units' activations are handled or counted."""
        return self.budget.limit is not None or any(p.activations != "keep" for p in self.placer.placement.units)

    def _should_recompute(self, module: nn.Module) -> bool:
        return self.placer.should_recompute(self._unit_of_module[module])

    def _stays_in_memory(self, address: int) -> bool:
        """Whether the storage at ``address`` is a resident parameter or a buffer, which a saved tensor only borrows."""
        return address in self._addresses

    def _add_stream(self, unit: Unit) -> None:
        """Update ``unit`` by chunks, from and to wherever its bytes are."""
        places: Any = {"memory": self.homes, "buffers": self.buffers_arena}
        shelved = None
        if self.store is not None and self.config.stage.gradients and not self.config.update.in_backward:
            store = self.placer.store_for(unit, "gradients")
            shelved = self.grads.shelves[unit] = ShelvedGrads(unit, **places, store=store)
        store = self.placer.store_for(unit, "optimizer")
        self.update.streams[unit] = UnitStream(unit, self.residency, shelved, **places, store=store)

    def reserve_states(self, optimizer: Optimizer) -> None:
        """Take room for the states that ``optimizer`` will have."""
        for stream in self.update.streams.values():
            stream.reserve(optimizer)

    @property
    def handles_gradients(self) -> bool:
        """Whether gradients pass through us at all: on one rank, whole and in one dtype, they are autograd's own."""
        mixed = any(d.gradient is not d.param for u in self.units for d in u.dtypes)
        return self.group.size > 1 or self.config.stage.gradients or mixed or self.scale.used or self.config.update.in_backward

    @property
    def cuts_parameters(self) -> bool:
        """Whether the optimizer sees any parameter in pieces."""
        between_ranks = self.config.stage.optimizer and any(u.layout.cuts_a_parameter for u in self.units)
        return between_ranks or (self.updates_by_chunks and any(len(u.chunks) > 1 for u in self.units))

    @property
    def updates_by_chunks(self) -> bool:
        return self.store is not None or self.config.update.in_backward

    # -- forward ------------------------------------------------------------------------------------------------------

    def enter_model(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The model's forward begins."""
        self.check()
        if backward_under_way() is None and self._depth == 0:
            self._reset_after_failure()
            self._forward_order.restart()
            self.buffers.before_forward()
            for unit in self.units:
                self.residency.refuse_replaced(unit)
            if self.watches_units:
                self.placer.enter_model(sum(t.numel() for t in tensors_in((args, kwargs))))
                residents = [b for b in self.model.buffers()] + [p for p in self.unit_of if type(p) is nn.Parameter]
                self._addresses = {t.untyped_storage().data_ptr() for t in residents}
        self._depth += 1
        return self._prepare_inputs(args), self._prepare_inputs(kwargs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Floating-point inputs in the dtype the model computes with; gradients that leave through them unscaled."""
        dtype = self.config.precision.compute
        if dtype is None and not self.scale.used:
            return inputs

        def prepare(tensor: Tensor) -> Tensor:
            if self._depth == 1:
                tensor = self.scale.on_input(tensor)
            return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

        return map_tensors(inputs, prepare)

    def leave_model(self, output: Any) -> Any:
        """The model's forward is over, with a result or an exception."""
        self._depth -= 1
        if self._depth == 0 and backward_under_way() is None:
            self.buffers.after_forward(sync=self.grads.sync)
            self._release_demanded()
        if not torch.is_grad_enabled():
            return output
        if self._depth == 0:
            output = self.scale.on_output(output)
        # The first thing a backward pass reaches: it tells the outermost pass from those that checkpoints nest in it.
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._on_output_gradient)
        return output

    def _on_output_gradient(self, _: Tensor) -> None:
        self._in_backward()

    def open_saved(self) -> saved_tensors_hooks | None:
        """Saved-tensor hooks around a forward, where parameters come and go."""
        return self._saved.open() if self.config.stage.parameters or self.watches_units else None

    def close_saved(self, context: saved_tensors_hooks | None) -> None:
        self._saved.close(context)

    def before_forward(self, units: Sequence[Unit]) -> None:
        """A module that needs ``units`` begins."""
        self.check()
        self._depth += 1
        self._saved.enter(units)
        if self.budget.limit is not None:
            self.budget.read()
        pinned: list[Unit] = []
        try:
            for unit in units:
                self.residency.pin(unit)
                pinned.append(unit)
        except BaseException:
            self._depth -= 1
            self._saved.leave()
            for unit in pinned:
                self.residency.unpin(unit)
            raise
        in_backward = backward_under_way() is not None
        order = self._backward_order if in_backward else self._forward_order
        for unit in units:
            if order.observe(unit):
                for following in order.after(unit, self.config.comm.prefetch):
                    self.residency.prefetch(following)

    def after_forward(self, units: Sequence[Unit]) -> None:
        """That module is done."""
        self._depth -= 1
        self._saved.leave()
        self.placer.outside_units()
        if self.budget.limit is not None:
            self.budget.read()
        for unit in units:
            self.residency.unpin(unit)
        if self._depth == 0 and backward_under_way() is None:
            self._release_demanded()

    # -- backward -----------------------------------------------------------------------------------------------------

    def _in_backward(self) -> bool:
        """Whether a backward pass is under way here; its end is awaited from the first time this is asked."""
        if backward_under_way() is None:
            return False
        if self._backward is None or self._backward() is None:
            self._reset_after_failure()
            this = _Pass()
            self._backward = weakref.ref(this)
            self._backward_order.restart()
            if self.backward_update is not None:
                self.backward_update.refuse_second_pass()
            at_end_of_backward(functools.partial(self._end_backward, this))
        return True

    def _needed_in_backward(self, unit: Unit) -> None:
        """Autograd unpacks a view of ``unit``'s parameters."""
        self.check()
        self._in_backward()
        if self._backward_order.observe(unit):
            count = self.config.comm.prefetch
            ahead = self._backward_order.after(unit, count) or self._forward_order.before(unit, count)
            self.residency.whole(unit)
            for following in ahead:
                self.residency.prefetch(following)
            if self.backward_update is not None:
                self.backward_update.expect(unit)

    def grad_arriving(self, key: int, grad: Tensor) -> None:
        """Autograd is about to accumulate the gradient of parameter ``key``."""
        self.check()
        self._in_backward()
        self.grads.arriving(self.grads.by_key[key], grad)

    def grad_arrived(self, key: int) -> None:
        """Autograd has accumulated it."""
        record = self.grads.by_key[key]
        self.trace("gradient", self.name_of[record.param])
        self.grads.scale = self.scale.value
        unit = self.grads.arrived(record)
        self.residency.retry()
        if self.budget.limit is not None:
            self.budget.read()
        if self.backward_update is not None:
            self._update_in_backward(self.backward_update.go_on)
        if unit is None:
            return
        if unit in self._demanded:
            self._demanded.remove(unit)
            self.residency.unpin(unit)
        if all(p.requires_grad for p in unit.params):
            self.residency.forget([unit])

    def _end_backward(self, _: _Pass) -> None:
        self._backward = None
        self.grads.scale = self.scale.value
        self.grads.finish()
        if self.backward_update is not None:
            self._update_in_backward(self.backward_update.finish)
        self._release_demanded()
        self.residency.forget()
        self.trace("end of backward", "")

    def _update_in_backward(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            if self.update.begun:
                self._poison = f"{type(error).__name__}: {error}"
            raise

    def _reset_after_failure(self) -> None:
        """A backward pass that raised never reached its end: autograd has dropped our callback, and what it held with it."""
        if self._backward is not None and self._backward() is None:
            self._backward = None
            self.grads.abandon()
            if self.backward_update is not None:
                self.backward_update.abandon()
            self._release_demanded()

    # -- step ---------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer) -> bool:
        """Update all parameters, or, if a gradient is not finite, none. Returns whether the step was taken."""
        self.check()
        self._reset_after_failure()
        self.grads.refuse_unreduced()
        if (unit := self.residency.pinned()) is not None:
            raise errors.Refused(
                f"optimizer.step() inside gathered() or a forward pass that uses unit {unit.name!r}; leave it first."
            )
        if self.backward_update is not None:
            return self._end_step_in_backward(self.backward_update)
        bad_key = self._first_not_finite()
        self.scale.after_step(skipped=bad_key is not None)
        if bad_key is not None:
            self._skip(self.name_of[self.grads.by_key[bad_key].param])
            return False
        self.residency.forget()
        try:
            updated = self.update.run(optimizer)
            if self.config.stage.optimizer:
                self._publish()
            self._note_written(updated)
        except BaseException as error:
            if self.update.begun:
                self._poison = f"{type(error).__name__}: {error}"
            raise
        self._after_step()
        return True

    def _after_step(self) -> None:
        self.trace("update", "")
        self.placer.after_step(self._saved, self.residency, self.grads, self.update)

    def _end_step_in_backward(self, backward_update: BackwardUpdate) -> bool:
        taken, bad_unit = backward_update.end_step()
        self.scale.after_step(skipped=not taken)
        if bad_unit is not None:
            self._skip(bad_unit.name)
        elif self.config.stage.optimizer:
            self._publish()
        self._after_step()
        return taken

    def _first_not_finite(self) -> int | None:
        """The key of the first parameter whose gradient is not finite on some rank; all ranks get the same answer."""
        mine = next((r.key for r in self.grads.by_param.values() if not self._is_finite(r)), -1)
        bad = [key for key in self.exchange.numbers("finite gradients", mine) if key >= 0]
        return min(bad, default=None)

    def _is_finite(self, record: GradRecord) -> bool:
        """Whether this rank's part of a gradient is finite."""
        if self.grads.is_shelved(record):
            shelf = self.grads.shelves[record.unit]
            return shelf.surely_finite(record.index) or all(
                all_finite(values) for _, values in shelf.parts(lambda index: index == record.index)
            )
        values = self.grads.piece(record, *record.unit.layout.piece(record.index, self.group.shard.rank))
        return values is None or all_finite(values)

    def _skip(self, what: str) -> None:
        self.skipped_steps += 1
        if self.group.rank == 0:
            _log.warning("step skipped: the gradient of %r is not finite (%d skipped so far)", what, self.skipped_steps)

    def _publish(self) -> None:
        """Every rank has new values for its shard: homes that hold whole units get everybody's."""
        for ticket in [self.residency.publish(u) for u in self.units]:
            if ticket is not None:
                ticket.wait()

    def _note_written(self, written: Sequence[nn.Parameter]) -> None:
        """Graphs on the old values of these parameters are stale."""
        for unit in {self.unit_of[p] for p in written}:
            unit.version += 1
        mark_changed(written)

    def parameters_written(self, units: Iterable[Unit]) -> None:
        """Parameter values may have come from outside (gathered(write=True))."""
        for unit in units:
            self.update.refresh_masters(unit.params)
            unit.version += 1

    # -- norms, for clipping ------------------------------------------------------------------------------------------

    def norms(self, order: float) -> dict[int, float]:
        """The norm of every gradient by key, over all ranks."""
        return norm.norms(self.update.grad_pieces(), order, self.exchange.vectors)

    def norm_of(self, grad: ShardedGrad, order: float) -> float:
        if order not in self._norm_cache:  # torch asks for one norm at a time; one exchange answers for all
            self._norm_cache[order] = self.norms(order)
        return self._norm_cache[order].get(grad.key, 0.0)

    def any_rank(self, flag: bool) -> bool:  # noqa: FBT001
        return any(self.exchange.numbers("a flag", int(flag)))

    def grads_changed(self) -> None:
        self._norm_cache.clear()

    def note_change(self, grad: ShardedGrad, change: Change) -> None:
        record = self.grads.by_key[grad.key]
        self.grads.shelves[record.unit].change(record.index, change)

    def is_finite(self, grad: ShardedGrad) -> bool:
        return self._is_finite(self.grads.by_key[grad.key])

    def whole_of(self, grad: ShardedGrad) -> Tensor:
        """A sharded gradient, whole."""
        record = self.grads.by_key[grad.key]
        param = record.unit.layout.params[record.index]
        piece = grad.piece
        if piece is None:
            piece = self.grads.piece(record, *self.grads.kept_range(record.unit, record.index))
        if piece is None:
            raise errors.InternalError("a gradient that is shown has no bytes")
        if not self.config.stage.gradients:
            return piece.as_strided(param.shape, param.stride).clone()
        name = f"the gradient of {self.name_of[record.param]}"
        return self.exchange.whole(name, record.unit.layout, record.index, piece).as_strided(param.shape, param.stride)

    # -- evicted parameters -------------------------------------------------------------------------------------------

    def touch(self, param: nn.Parameter, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An evicted parameter is used. Inside a pass its unit comes on demand; elsewhere that is a mistake."""
        if self._touch is not None:
            return self._touch(param, function, args, kwargs)
        unit = self.unit_of[param]
        if is_tracing():
            raise errors.Refused(errors.NO_WHOLE_COMPILE)
        if self._depth == 0 and not self._in_backward():
            raise errors.Evicted(self.name_of[param], unit.name, getattr(function, "__name__", str(function)))
        self.check()
        if unit not in self._demanded:
            self.trace("demand", unit.name)
            self.residency.pin(unit)
            self._demanded.add(unit)
        return function(*args, **kwargs)

    def stride_of(self, param: nn.Parameter) -> tuple[int, ...]:
        unit = self.unit_of[param]
        return unit.layout.params[unit.index_of[param]].stride

    def describe(self, param: nn.Parameter) -> str:
        return f"{self.name_of[param]!r} of unit {self.unit_of[param].name!r}"

    def answer_touches(self, touch: Touch | None) -> None:
        """Who answers uses of evicted parameters: ``None`` for the usual rule."""
        self._touch = touch

    def _release_demanded(self) -> None:
        for unit in self._demanded:
            self.residency.unpin(unit)
        self._demanded.clear()

    def recover(self) -> None:
        """An interrupt left forward passes without their closing hooks running."""
        self._depth = 0
        self._demanded.clear()
        self._saved.reset()
        self.residency.unpin_all()

    # -- state --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if the model may not be used any more."""
        if self._poison is not None:
            raise errors.Poisoned(self._poison)
        self.group.watch.raise_if_failed("the next call")

    def usage(self) -> Usage:
        """What this rank uses of each tier."""
        traffic = self.store.traffic if self.store is not None else Traffic()
        limits = [f.limit for f in self.config.disk]
        return Usage(
            budget_bytes=self.budget.limit,
            host_bytes=self.budget.read(),
            disk_bytes=self.store.used_bytes if self.store is not None else 0,
            disk_limit_bytes=sum(n for n in limits if n is not None) if limits and None not in limits else None,
            disk_read_bytes=traffic.read_bytes,
            disk_written_bytes=traffic.written_bytes,
            disk_wait_seconds=traffic.wait_seconds,
            activations=self.placer.describe_activations(),
            update=self.config.update.when,
        )

    def after_load(self) -> None:
        """All parameters have been loaded anew: whole copies are old, and a half-finished update is forgiven."""
        self.residency.forget()
        self._publish()
        self._note_written(list(self.unit_of))
        self.update.refresh_masters(self.unit_of)
        self._poison = None


def _open_disk(config: Config, rank: int) -> Store | None:
    if not config.disk:
        return None
    return DiskStore([Folder(f.path, f.limit) for f in config.disk], rank=rank)
