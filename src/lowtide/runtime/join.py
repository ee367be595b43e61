"""``model.join()``: ranks with different numbers of batches.

A rank whose loop has ended stays at the end of the block and follows the ranks that go on: it takes part in their gathers,
reductions, norms and updates with nothing of its own, so that its shard of parameters and optimizer states stays right. All
ranks leave together. Parameters, gradients, buffers and the optimizer's options are then those of the ranks that went on.

Gradients are divided by the number of all ranks, as DDP does by default, or by the number of those that still had a batch.
What a follower had added up inside ``no_sync()`` is reduced with the next backward pass of the others: no batch is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from lowtide.comm.channel import Channel
from lowtide.errors import ArgumentError, Mismatch, Refused
from lowtide.runtime import clipping
from lowtide.runtime.announcer import Announcement, Verb
from lowtide.runtime.engine import Engine, follow_backward, forget_order
from lowtide.runtime.handover import Handover
from lowtide.runtime.unit import Unit

_DIVIDE_BY = ("all", "active")
_inside: ContextVar[bool] = ContextVar("lowtide_join", default=False)


@contextmanager
def joined(engine: Engine, *, divide_by: str, after_step: Callable[[], Any] | None) -> Generator[None]:
    """The block of ``model.join()``."""
    if divide_by not in _DIVIDE_BY:
        raise ArgumentError(f"divide_by is {divide_by!r}; allowed: 'all' (as DDP), 'active' (ranks that still have batches).")
    if engine.group.size == 1:
        yield
        return
    if _inside.get():
        raise Refused(
            "join() inside another join(): a rank can follow one model only. Make the models parts of one nn.Module, shard "
            "that, and join it once."
        )
    block = _Block(engine, by_active=divide_by == "active", after_step=after_step)
    inside = _inside.set(True)
    try:
        block.open(divide_by)
        try:
            yield
            block.follow()
        except BaseException as error:
            engine.announcer.fail(error)
            raise
        finally:
            block.close()
    finally:
        _inside.reset(inside)


class _Block:
    """One rank inside ``join()``."""

    def __init__(self, engine: Engine, *, by_active: bool, after_step: Callable[[], Any] | None) -> None:
        self._engine, self._by_active, self._after_step = engine, by_active, after_step
        self._announcer, self._handover = engine.announcer, Handover(engine)
        self._channel: Channel

    def open(self, divide_by: str) -> None:
        engine, announcer = self._engine, self._announcer
        engine.settle()
        if (unit := engine.residency.pinned()) is not None:
            raise Refused(f"join() inside gathered() or a forward pass that uses unit {unit.name!r}; leave it first.")
        # On the channel of reductions: a rank that is not in a join() with the others is found out here.
        words = engine.exchange.notes("join()", divide_by.ljust(8).encode())
        for rank, word in enumerate(words):
            if word != words[0]:
                first, other = words[0].decode().strip(), word.decode().strip()
                raise Mismatch(f"join(divide_by=...): rank 0 has {first!r}, rank {rank} has {other!r}")
        self._channel = announcer.channel or engine.group.channel("join")
        announcer.open(
            self._channel,
            ranks=engine.group.size,
            brings=self._handover.brings,
            heard=self._heard,
            done=self._handover.same_gradients,
        )
        engine.residency.before_gather = self._before_gather
        engine.grads.before_reduction = lambda: announcer.mention(Verb.REDUCE)
        engine.grad_facts.before_operation = self._before_operation

    def close(self) -> None:
        engine = self._engine
        engine.residency.before_gather = lambda _: None
        engine.grads.before_reduction = lambda: None
        engine.grad_facts.before_operation = lambda *_: None
        engine.grads.divide_among(engine.group.size)
        engine.buffers.root = 0
        self._announcer.close()

    def _before_gather(self, unit: Unit) -> None:
        self._announcer.mention(Verb.GATHER, unit.index)

    def _before_operation(self, name: str, args: Any, kwargs: Any) -> None:
        self._announcer.mention(Verb.OPERATION, details=lambda: self._handover.operation(name, args, kwargs))

    def _heard(self, said: Announcement) -> None:
        """On every rank, whatever it is itself, after a verb has been said."""
        engine = self._engine
        if said.verb is Verb.FORWARD:
            engine.buffers.root = max(said.speakers)  # as in DDP: rank 0 may have stopped long ago
        if said.verb is Verb.BACKWARD and self._by_active:
            engine.grads.divide_among(len(said.speakers))
        if "gradients" in said.message:
            behind = engine.group.rank not in said.speakers
            if behind:
                self._handover.take(said.message)
            self._handover.exchange_values(self._channel, said.message, said.root, receive=behind)
            self._handover.same_gradients()

    # -- a rank that has no batches left ------------------------------------------------------------------------------

    def follow(self) -> None:
        """Carry out what the others say until nobody has batches left; then leave with what they have."""
        # Nothing may come from the others for as long as their passes take.
        with self._announcer.silence(), self._engine.group.deadlines.relaxed():
            self._engine.residency.forget()  # what the others hold whole is no business of this rank any more
            while not (said := self._announcer.listen()).all_ended:
                self._heard(said)
                self._carry_out(said)
            self._heard(said)
            self._engine.buffers.root = said.root
            self._engine.buffers.send()
            forget_order(self._engine)

    def _carry_out(self, said: Announcement) -> None:
        engine, argument = self._engine, said.argument
        if said.verb is Verb.FORWARD and argument:
            engine.buffers.send()
        elif said.verb is Verb.GATHER:
            unit = engine.units[argument]
            engine.residency.whole(unit)
            engine.residency.forget([unit])
        elif said.verb is Verb.REDUCE:
            engine.grads.submit_rest()
        elif said.verb is Verb.FINISH:
            follow_backward(engine)
        elif said.verb is Verb.OPERATION:
            self._handover.repeat(said.message)
        elif said.verb is Verb.CLIP:
            self._clip(said.message)
        elif said.verb is Verb.STEP:
            self._step(argument)

    def _clip(self, message: dict[str, Any]) -> None:
        with suppress(Refused):  # a norm that is not finite: the others have raised, and nothing was clipped
            if "value" in message:
                clipping.clip_value(self._engine, **message["value"])
            else:
                clipping.clip_norm(self._engine, **message["norm"])

    def _step(self, number: int) -> None:
        optimizer: Any = self._engine.optimizers[number]()
        if optimizer is None:
            raise Refused(f"optimizer {number} of this model is gone on a rank that has to follow its step; keep it alive.")
        # Not optimizer.step(): hooks on it are the loop's, and what they did has been handed over.
        optimizer.step_was_skipped = not self._engine.step(optimizer)
        optimizer._opt_called = True  # what a scheduler looks at
        if self._after_step is not None:
            self._after_step()
