"""The mutable root: one verb per moment of a step. It decides nothing that a plan, a stage or a policy can say."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide import errors
from lowtide.comm.channel import Channel
from lowtide.comm.group import Group
from lowtide.config import Config
from lowtide.runtime.ambient import GradMode, undisturbed
from lowtide.runtime.announcer import Announcer, Verb
from lowtide.runtime.assembly import Assembly
from lowtide.runtime.backward_update import BackwardUpdate
from lowtide.runtime.boundaries import after_forward, after_step
from lowtide.runtime.crossing import Crossing
from lowtide.runtime.grads import refuse_unreduced
from lowtide.runtime.inputs import prepare_inputs
from lowtide.runtime.outputs import tensors_in
from lowtide.runtime.prefetch import Successors
from lowtide.runtime.turn import Call, Calling, Turn, backward_call
from lowtide.runtime.unit import Unit
from lowtide.spec.units import UnitSpec
from lowtide.torch_internals import (
    at_end_of_backward,
    backward_under_way,
    is_tracing,
    mark_changed,
    under_transform,
    without_transforms,
)

_log = logging.getLogger("lowtide")

Touch = Callable[[nn.Parameter, Callable[..., Any], Any, Any], Any]
"""What an evicted parameter answers when it is used, while a state_dict is written or read."""


def _aside(verb: Callable[..., Any]) -> Callable[..., Any]:
    """``verb``, unseen by the caller's torch.func transforms: memory and parameters are ours, not the function's to be mapped
    or differentiated."""

    @functools.wraps(verb)
    def aside(*args: Any, **kwargs: Any) -> Any:
        if not under_transform():
            return verb(*args, **kwargs)
        with without_transforms():
            return verb(*args, **kwargs)

    return aside


class _Pass:
    """Held by the callback at the end of one backward pass, and by nobody else: gone if the pass failed."""


class Lent:
    """Units that a caller has in a ``with`` block of his, which may have other calls inside and outlives those."""

    def __init__(self) -> None:
        self.units: Sequence[Unit] = ()
        self.is_open = False  # between the end of its beginning and the beginning of its end


class Engine(Assembly):
    """What happens to one sharded model, moment by moment."""

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
        super().__init__(model, specs, config, group, channels, whole_parameters=whole_parameters)
        self.skipped_steps = self.steps_taken = 0
        self.announcer = Announcer()
        self.crossing = Crossing(config, group, self.exchange)
        self.optimizers: list[weakref.ref[Optimizer]] = []  # in the order in which they were sharded
        self._forward_order, self._backward_order = Successors(), Successors()
        self.turn = Turn(self.recover, alone=group.size == 1, patience=lambda: group.deadlines.seconds)
        self._backward: Call | None = None  # the outermost backward under way
        self._watched = WeakTensorKeyDictionary()  # outputs that have our hook: a leaf is one again and again
        self._demanded: set[Unit] = set()  # pinned outside their modules, until the pass ends
        self.lent: list[Lent] = []
        self.loading = False
        """Whether a checkpoint is being loaded, and what is there is a mixture."""
        self._changing = False  # an update has begun, and it is not known yet that all of it is done
        self.poisoned_by: str | None = None  # why nobody may use the model before it is loaded anew
        self._touch: Touch | None = None
        self.grad_facts.before_change = self._settle
        self.residency.before_replaced = self.activations.saved.before_replaced
        self.residency.written = self._written

    def start(self, optimizer: Optimizer | None = None) -> None:
        """Take over the model: from here on its parameters are ours."""
        self.take_over(optimizer, self)

    # -- forward ------------------------------------------------------------------------------------------------------

    @property
    def needs_no_turn(self) -> bool:
        """Whether a forward pass would change nothing here, and wait for nobody: then any number of threads may run one."""
        resident = self.store is None and not self.config.stage.parameters and not self.activations.handled
        return (
            resident and self.group.size == 1 and self.config.run is None and self.poisoned_by is None
        ) and not torch.is_grad_enabled()

    def inputs(self, args: Any, kwargs: Any, *, outermost: bool) -> tuple[Any, ...]:
        """The arguments of the model as its parameters need them."""
        return tuple(prepare_inputs(x, self.config.precision, self.scale, outermost=outermost) for x in (args, kwargs))

    def enter_model(self, call: Call, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """The model's forward begins."""
        self.check()
        if backward_under_way() is None and self.turn.depth == 0:
            self._begin_forward()
            self.activations.enter_model(self.model, tensors_in((args, kwargs)))
        call.is_forward = True
        return self.inputs(args, kwargs, outermost=self.turn.depth == 1)

    @_aside
    def _begin_forward(self) -> None:
        self.group.watch.phase = "in forward"
        self._forward_order.restart()
        if self.buffers.will_send or self.residency.gathers:
            self.announcer.say(Verb.FORWARD, int(self.buffers.will_send))
        self.buffers.before_forward()
        self.residency.adopt()
        self.residency.look_at_views()
        self.residency.tell_lost()
        if not self.announcer.is_open:  # ranks that follow others may need what this one has dropped
            self.grads.give_back()
        if torch.is_grad_enabled() and self.residency.pinned() is None:
            self.placer.before_forward(self.shelves)

    def leave_model(self, call: Call, output: Any) -> Any:
        """The model's forward is over, with a result or an exception."""
        self.activations.saved.close(call.saved)
        call.saved, call.is_forward = None, False
        if self.turn.depth == 0 and backward_under_way() is None:
            self._end_forward()
        if torch.is_grad_enabled():
            if self.turn.depth == 0:
                output = self.scale.on_output(output)
            # The first thing a backward pass reaches: it tells the outermost pass from those that checkpoints nest in it.
            for tensor in tensors_in(output):
                if tensor.requires_grad and tensor not in self._watched:
                    tensor.register_hook(self._on_output_gradient)
                    self._watched[tensor] = None
        self.turn.end(call)
        return output

    @_aside
    def _end_forward(self) -> None:
        self.buffers.after_forward(sync=self.grads.sync)
        self._release_demanded()
        after_forward(self)

    def _on_output_gradient(self, _: Tensor) -> None:
        self._in_backward()

    def open_saved(self) -> saved_tensors_hooks | None:
        """Saved-tensor hooks around a forward, where parameters come and go."""
        saved = self.activations.saved
        wanted = self.config.stage.parameters or self.activations.handled or saved.kept is not None
        return saved.open() if wanted else None

    def close_saved(self, context: saved_tensors_hooks | None) -> None:
        self.activations.saved.close(context)

    @_aside
    def enter_units(self, call: Call, units: Sequence[Unit]) -> None:
        """A module that needs ``units`` begins. What goes wrong here is put right by the next call: see ``recover``."""
        self.check()
        if self.turn.depth == 0 and backward_under_way() is None:
            self.announcer.say(Verb.LOOK)  # a part of the model is called by itself
        call.units, call.is_forward = units, True
        self.activations.enter(units)
        for unit in units:
            self._settle(unit)
            self.residency.pin(unit)
        self._look_ahead(units)
        self.placer.clock.enter(units if torch.is_grad_enabled() else ())

    def before_forward(self, units: Sequence[Unit]) -> None:
        """A module that needs ``units`` is computed again."""
        call = self.turn.begin(Call("a forward pass", None, trains=True))
        self.enter_units(call, units)
        call.ready = True

    def _look_ahead(self, units: Sequence[Unit]) -> None:
        """Start bringing the units that are expected after ``units``."""
        order = self._forward_order if backward_under_way() is None else self._backward_order
        for unit in units:
            if order.observe(unit):
                for following in order.after(unit, self.config.comm.prefetch):
                    self.residency.prefetch(following)
                    self.due.expect(following)

    @_aside
    def leave_units(self, call: Call) -> None:
        """That module is done."""
        self.activations.saved.close(call.saved)
        call.saved = None
        self.placer.clock.leave()
        call.is_forward = False
        units = call.units or ()
        self.activations.leave(units)
        for unit in units:
            self.residency.unpin(unit)
        if self.turn.depth == 0 and backward_under_way() is None:
            self._release_demanded()
        self.turn.end(call)

    def after_forward(self, units: Sequence[Unit]) -> None:
        """It has been computed again."""
        call = self.turn.innermost(None)
        if call is not None and call.ready:
            self.leave_units(call)

    def as_if_computed_again(self, units: Sequence[Unit]) -> None:
        """Other ranks may compute ``units`` again here, and gather them for it."""
        if self.residency.gathers:
            self.before_forward(units)
            self.after_forward(units)

    def poison(self, reason: str) -> None:
        """Nobody may use the model before it is loaded anew."""
        self.poisoned_by = self.poisoned_by or reason

    # -- backward -----------------------------------------------------------------------------------------------------

    @_aside
    def _in_backward(self) -> bool:
        """Whether a backward pass is under way here; its end is awaited from the first time this is asked."""
        task = backward_under_way()
        if task is None:
            return False
        if self._backward is not None and self._backward.task == task:
            return True
        if self._backward is not None and self.turn.is_mine() and self._goes_on():
            return True  # this pass is inside it
        this = _Pass()
        call = Call("a backward pass", backward_call(), trains=True, witness=weakref.ref(this))
        at_end_of_backward(functools.partial(self._end_backward, this))
        del this  # or what is raised here would keep it
        self.turn.begin(call)
        self.check()
        if self.backward_update is not None:
            self.backward_update.refuse_second_pass()
            if self.turn.depth == 0 and (unit := self.residency.pinned()) is not None:
                raise errors.Refused(
                    f"loss.backward() with update='backward' inside gathered() of unit {unit.name!r}; leave it first: "
                    f"graphs made inside can be walked outside."
                )
        self._backward = call
        if (alive := call.witness and call.witness()) is not None:
            call.witness = weakref.ref(alive, functools.partial(_pass_has_failed, weakref.ref(self)))
            del alive
        self.update.forget_expected()  # of units that the forward pass did not reach
        self.announcer.say(Verb.BACKWARD)
        self.group.watch.phase = "in backward"
        self._backward_order.restart()
        self.placer.clock.backward_begins()
        self.budget.look("backward begins")
        return True

    def _goes_on(self) -> bool:
        """Whether the outermost backward pass was not broken off."""
        self.turn.look()
        return self._backward is not None

    @_aside
    def needed_in_backward(self, unit: Unit) -> None:
        """Autograd unpacks a view of ``unit``'s parameters."""
        self._in_backward()
        self.check()
        if self._backward_order.observe(unit):
            count = self.config.comm.prefetch
            ahead = self._backward_order.after(unit, count) or self._forward_order.before(unit, count)
            self.residency.whole(unit)
            for following in ahead:
                self.residency.prefetch(following)
            if self.backward_update is not None:
                self.backward_update.expect(unit)
            self.budget.look(("backward", unit.index))

    @_aside
    def grad_arriving(self, key: int, grad: Tensor, *, watched: bool) -> None:
        """Autograd is about to accumulate the gradient of parameter ``key``; ``watched``: hooks of the caller's will see it."""
        self._in_backward()
        self.check()
        self._settle(self.grads.by_key[key].unit)
        self.grads.arriving(self.grads.by_key[key], grad, watched=watched)

    @_aside
    def grad_arrived(self, key: int, *, take: bool) -> None:
        """Autograd has accumulated it, and hooks of the caller's have seen it (unless ``take`` is false)."""
        record = self.grads.by_key[key]
        self.trace("gradient", self.name_of[record.param])
        self.grads.divide_by(self.scale.value)
        with self.placer.clock.reducing():
            unit = self.grads.arrived(record, take=take)
        self.residency.retry()
        if self.backward_update is not None:
            self.budget.look(None)  # what an update takes, it takes once
            with undisturbed():
                self._or_poison(self.backward_update.go_on)
        self.budget.look(("gradient", key))
        if unit is None:
            return
        if unit in self._demanded:
            self._demanded.remove(unit)
            self.residency.unpin(unit)
        if all(p.requires_grad for p in unit.params):
            self.residency.forget([unit])

    @_aside
    def _end_backward(self, _: _Pass) -> None:
        call = self._backward
        if call is None:  # it was refused when it began
            return
        self.finish_backward()
        self._backward = None
        self.turn.end(call)

    def finish_backward(self) -> None:
        """Reduce what is left, and let go of what was needed. If it fails, the next call looks after that: see ``recover``."""
        self.grads.divide_by(self.scale.value)
        with self.announcer.doing(Verb.FINISH if self.grads.active and self.grads.sync else Verb.LOOK):
            with self.placer.clock.reducing():
                self.grads.finish()
            if self.backward_update is not None:
                with undisturbed():
                    self._or_poison(self.backward_update.finish)
        self._release_demanded()
        self.residency.forget()
        self.activations.backward_ended()
        self.placer.clock.backward_ends()
        self.trace("end of backward", "")

    def _or_poison(self, run: Callable[[], None]) -> None:
        """Run a part of an update. If it fails after the first change, nobody may use the model any more."""
        self._changing = True
        try:
            run()
        except BaseException as error:
            self._poison(f"{type(error).__name__}: {error}")
            raise
        self._changing = False

    def _poison(self, why: str) -> None:
        """A part of an update came to nothing, for a reason that is not known if not told before."""
        if self._changing and (self.update.begun or self.due.under_way) and self.poisoned_by is None:
            self.poisoned_by = why
        self._changing = False

    # -- step ---------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer) -> bool:
        """Update all parameters, or, if a gradient is not finite, none. Returns whether the step was taken."""
        self.trace("step", "")
        self.group.watch.phase = "in the update"
        self.settle()
        refuse_unreduced(self.grads.by_param.values())
        if (unit := self.residency.pinned()) is not None:
            raise errors.Refused(f"optimizer.step() inside gathered() or a forward pass of unit {unit.name!r}; leave it first.")
        if self.backward_update is not None:
            self.grads.refuse_given(param for group in optimizer.param_groups for param in group["params"])
            return _end_step_in_backward(self, self.backward_update, optimizer)
        bad_key = self.grad_facts.first_not_finite()
        self.scale.after_step(skipped=bad_key is not None)
        if bad_key is not None:
            _skip(self, self.name_of[self.grads.by_key[bad_key].param])
            return False
        self.grads.forget_known()
        self.residency.forget()
        self._or_poison(lambda: self._update(optimizer))
        after_step(self)
        return True

    def refused_by_a_hook(self, error: BaseException) -> None:
        """A hook before ``optimizer.step()`` raised: with an update in backward it comes too late to prevent the step."""
        if self.backward_update is not None and self.backward_update.waits_for_step and self.poisoned_by is None:
            self.poisoned_by = f"a hook before optimizer.step() raised after update='backward' had done it: {error!r}"

    def _update(self, optimizer: Optimizer) -> None:
        self.update.forget_last()
        updated = self.due.begin(optimizer) if self.placer.steady else None
        if updated is None:
            self.placer.before_update()
            updated = self.update.run(optimizer)
        if self.config.stage.optimizer:
            _publish(self)
        _note_written(self, updated)

    def set_memory(self, limit: int) -> None:
        """From the next step on the ranks of this host may use ``limit`` bytes of its memory together."""
        self.check()
        self.placer.set_memory(limit // self.local_ranks)
        if self.turn.depth == 0 and backward_under_way() is None and self.residency.pinned() is None:
            self.placer.apply_now(self.shelves)

    def parameters_written(self, units: Iterable[Unit]) -> None:
        """Parameter values have come from outside (gathered(write=True)). On several ranks graphs on the old ones are stale; on
        one they are what they would be in plain PyTorch."""
        for unit in units:
            self.update.refresh_masters(unit.params)
            before, unit.version = unit.version, unit.version + 1
            if self.group.size == 1:
                self.activations.saved.carry_over(unit, before)

    def _written(self, unit: Unit, indices: Sequence[int]) -> None:
        """A caller has changed parameters of a unit, by index. Graphs are what they would be in plain PyTorch."""
        self.update.refresh_masters(unit.params)
        self.activations.saved.written(unit, indices)

    # -- evicted parameters -------------------------------------------------------------------------------------------

    def touch(self, param: nn.Parameter, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An evicted parameter is used. Inside a pass its unit comes on demand; elsewhere that is a mistake."""
        if is_tracing():
            raise errors.Refused(errors.NO_WHOLE_COMPILE)
        is_mine = self.turn.is_mine()
        if self._touch is not None and is_mine:
            return self._touch(param, function, args, kwargs)
        unit = self.unit_of[param]
        if not (is_mine and self.turn.depth) and not self._in_backward():
            raise errors.Evicted(self.name_of[param], unit.name, getattr(function, "__name__", str(function)))
        self.check()
        if unit not in self._demanded:
            self._demand(unit)
        return function(*args, **kwargs)

    @_aside
    def _demand(self, unit: Unit) -> None:
        self.trace("demand", unit.name)
        with GradMode():
            self._settle(unit)
            self._demanded.add(unit)
            self.residency.pin(unit)

    def stride_of(self, param: nn.Parameter) -> tuple[int, ...]:
        unit = self.unit_of[param]
        return unit.layout.params[unit.index_of[param]].stride

    def describe(self, param: nn.Parameter) -> str:
        return f"{self.name_of[param]!r} of unit {self.unit_of[param].name!r}"

    def names_of(self, param: nn.Parameter) -> tuple[str, str]:
        return self.name_of[param], self.unit_of[param].name

    def answer_touches(self, touch: Touch | None) -> None:
        """Who answers uses of evicted parameters: ``None`` for the usual rule."""
        self._touch = touch

    def _release_demanded(self) -> None:
        for unit in self._demanded:
            self.residency.unpin(unit)
        self._demanded.clear()

    # -- after a call that was broken off -----------------------------------------------------------------------------

    def calling(self, what: str) -> Calling:
        """``with`` this around a call of the caller's that is no pass."""
        return Calling(self.turn, what)

    def give_back(self, lent: Lent, *, keep: bool) -> None:
        """A caller's ``with`` block is over."""
        with self.calling("gathered()"):
            if lent not in self.lent:
                return  # it never began, or the call that ended it was broken off
            lent.is_open = False
            for unit in lent.units:
                self.residency.unpin(unit, keep=keep)
            self.residency.forget(lent.units)
            self.lent.remove(lent)

    def recover(self, kept: Sequence[Call], broken: Sequence[Call]) -> None:
        """Calls were broken off, at any line of ours. Put back what they have left; ``kept`` are those around them.

        This may be broken off as well: every part says how things are to be, not what has to change, so that it can be done
        again from the beginning.
        """
        if not kept:
            self._recover_passes()
        self.activations.recover(kept, broken)
        pins = Counter(unit for call in kept for unit in call.units or ())
        pins.update(unit for lent in self.lent if lent.is_open for unit in lent.units)
        pins.update(self._demanded)
        self.residency.recover(pins, everything=not kept)

    def _recover_passes(self) -> None:
        self._touch = None
        self.update.put_back()
        self._poison("an update was broken off")
        if self.loading:
            self.poisoned_by, self.loading = "loading a checkpoint was broken off", False
        self.grads.abandon()
        if self.backward_update is not None and self._backward is not None:  # a pass that is over waits for its step
            self.backward_update.abandon()
            if self.update.begun and self.poisoned_by is None:
                self.poisoned_by = "a backward pass failed after it had updated some units"
        self._backward = None
        self._demanded.clear()
        self.placer.clock.forget_passes()
        self.budget.skip()
        if self.store is not None:
            with suppress(errors.Error):  # told by whoever needs the bytes
                self.store.drain()
        self.update.give_back_buffers()

    # -- state --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if the model may not be used any more."""
        self.residency.tell_lost()
        if (reason := self.poisoned_by or self.residency.damaged_by) is not None:
            raise errors.Poisoned(reason)
        self.group.watch.raise_if_failed("the next call")

    def settle(self) -> None:
        self.check()
        for unit in self.units:
            self._settle(unit)
        self.residency.adopt()
        self.residency.look_for_writes()

    def _settle(self, unit: Unit) -> None:
        if self.due.under_way:
            with undisturbed():
                self._or_poison(lambda: self.due.settle(unit))

    @property
    def is_usable(self) -> bool:
        """Whether no failure has left values that nobody may use."""
        return self.poisoned_by is None and self.residency.damaged_by is None

    def before_load(self) -> None:
        """Values are about to be replaced: finish a step that was put off, or, after a failure, forget it."""
        if self.is_usable:
            self.settle()
        else:
            self.due.forget()
        self.residency.meet()

    def after_load(self) -> None:
        """All parameters have been loaded anew: whole copies are old, and a half-finished update is forgiven."""
        self.residency.values_replaced()
        self.residency.forget()
        _publish(self)
        _note_written(self, list(self.unit_of))
        self.update.refresh_masters(self.unit_of)
        if self.backward_update is not None:
            self.backward_update.forget_step()
        self.poisoned_by = self.residency.damaged_by = None


def _pass_has_failed(reference: weakref.ref[Engine], _: weakref.ref[_Pass]) -> None:
    """Autograd lets go of a pass that has not reached its end, before its caller sees the exception."""
    if (engine := reference()) is not None:
        engine.grads.put_back()


def _publish(engine: Engine) -> None:
    """Every rank has new values for its shard: homes that hold whole units get everybody's."""
    for ticket in [engine.residency.publish(u) for u in engine.units]:
        if ticket is not None:
            ticket.wait()


def _end_step_in_backward(engine: Engine, backward_update: BackwardUpdate, optimizer: Optimizer) -> bool:
    try:
        backward_update.refuse_another_step(optimizer)
    except errors.Refused as error:
        if backward_update.waits_for_step:  # what was done in backward is not what the caller has asked for since
            engine.poisoned_by = str(error)
        raise
    taken, bad_unit = backward_update.end_step()
    engine.scale.after_step(skipped=not taken)
    if bad_unit is not None:
        _skip(engine, bad_unit.name)
    elif engine.config.stage.optimizer:
        _publish(engine)
    after_step(engine)
    return taken


def _skip(engine: Engine, what: str) -> None:
    engine.trace("skip", what)
    engine.skipped_steps += 1
    if engine.group.rank == 0:
        _log.warning("step skipped: the gradient of %r is not finite (%d skipped so far)", what, engine.skipped_steps)


def _note_written(engine: Engine, written: Sequence[nn.Parameter]) -> None:
    """Graphs on the old values of these parameters are stale."""
    for unit in {engine.unit_of[p] for p in written}:
        unit.version += 1
    mark_changed(written)


def follow_backward(engine: Engine) -> None:
    """Other ranks have run a backward pass: reduce with them, with nothing of this rank's own."""
    engine.grads.active = True
    engine.finish_backward()


def forget_order(engine: Engine) -> None:
    """Ranks may have seen different passes: all of them guess anew which unit follows which, and begin with none whole."""
    engine.residency.forget()
    engine._forward_order, engine._backward_order = Successors(), Successors()  # pyright: ignore[reportPrivateUsage]
