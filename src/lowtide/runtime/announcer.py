"""What comes next, said aloud, so that ranks without batches can follow those that have some.

Inside ``model.join()`` a rank that still has batches says what it is about to do before it does anything that needs the
other ranks: a small exchange on a channel of its own. Ranks whose loop has ended listen, and carry out what they hear with
nothing of their own (runtime/join.py).

[Note: said and mentioned] Where a loop may have ended on another rank, a verb is *said*, and the answer awaited: a pass
begins, backward begins or ends, gradients are clipped, the optimizer steps. What lies between (a gather, an operation on a
gradient) is *mentioned*: without waiting, and only if somebody listened at the last saying. So an even loop pays a few small
exchanges a step.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.comm.channel import Channel, Label, Ticket, Wire
from lowtide.comm.transport import Transport
from lowtide.comm.watch import describe
from lowtide.errors import DeadlineExceeded, Error, Mismatch, PeerFailed, Refused

_NOTE = struct.Struct("<BBqB")  # standing, verb, argument, bytes of the text that follows
_TEXT_BYTES = 96
_LABEL = Label("announce", -1, "what comes next in join()")
_SAME_VERBS = "Inside join() all ranks that still have batches must run the same passes and steps, in the same order"

Message = dict[str, Any]
"""What goes with a verb: plain values that JSON can carry."""


class Standing(enum.IntEnum):
    """What a rank is to the others inside ``join()``."""

    SPEAKS = 1  # it has batches
    LISTENS = 2  # it has none any more
    FAILED = 3  # it leaves with an exception


class Verb(enum.IntEnum):
    """What a rank is about to do. In brackets: the argument that must be the same on all ranks."""

    NOTHING = 0
    LOOK = 1  # only to know who listens
    FORWARD = 2  # a pass of the model (whether buffers are sent)
    BACKWARD = 3  # a backward pass
    REDUCE = 4  # the first reduction of a backward pass
    FINISH = 5  # the end of a backward pass that reduces
    GATHER = 6  # of a unit (its number)
    OPERATION = 7  # on sharded gradients
    CLIP = 8  # of all gradients (a digest of how)
    STEP = 9  # of an optimizer (its number)


@dataclass(frozen=True)
class Announcement:
    """What all ranks know after one exchange. Once nobody speaks any more, ``speakers`` are those who spoke last."""

    verb: Verb
    argument: int
    speakers: tuple[int, ...]
    listeners: tuple[int, ...]
    root: int
    """Whose message this is: the first speaker; at the end the last of those who spoke last, as in DDP."""
    message: Message

    @property
    def all_ended(self) -> bool:
        return self.verb is Verb.NOTHING


class Announcer:
    """One rank's voice. Outside ``join()``, and inside a verb that has been said, it is silent."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        """Kept from one block to the next."""
        self._open = False
        self._brings: Callable[[Verb], Message] = lambda _: {}
        self._heard: Callable[[Announcement], None] = lambda _: None
        self._done: Callable[[], None] = lambda: None
        self._silent = 0  # reasons not to speak
        self._mentions: list[Ticket[Announcement]] = []
        self._speakers: tuple[int, ...] = ()  # in the last exchange in which anybody spoke; set by the channel's thread
        self.listeners: tuple[int, ...] = ()
        """Ranks that had no batches at the last saying."""

    def open(
        self,
        channel: Channel,
        *,
        ranks: int,
        brings: Callable[[Verb], Message],
        heard: Callable[[Announcement], None],
        done: Callable[[], None],
    ) -> None:
        """A block begins. ``brings``: what ranks without batches must know beside a verb. ``heard`` runs after every saying,
        ``done`` when what was said has been done."""
        self.channel, self._brings, self._heard, self._done = channel, brings, heard, done
        self._open = True
        self._speakers, self.listeners = tuple(range(ranks)), ()
        self._silent = 0
        self._mentions = []

    def close(self) -> None:
        """The block is over; nothing of it is kept."""
        self._open = False
        self._brings, self._heard, self._done = (lambda _: {}), (lambda _: None), (lambda: None)
        self._mentions = []
        self.listeners = ()

    @property
    def is_open(self) -> bool:
        """Whether a block is under way."""
        return self._open

    @property
    def speaking(self) -> bool:
        return self._open and not self._silent

    # -- a rank that has batches --------------------------------------------------------------------------------------

    def say(self, verb: Verb, argument: int = 0, **details: Any) -> None:
        """Agree with all who have batches that ``verb`` comes next, and learn who has none."""
        if not self.speaking:
            return
        said = self._exchange(Standing.SPEAKS, verb, argument, lambda: {**self._brings(verb), **details}).wait()
        mentions, self._mentions = self._mentions, []
        for ticket in mentions:
            ticket.wait()  # done: it came before; raises if ranks differed
        self.listeners = said.listeners
        self._heard(said)

    def mention(self, verb: Verb, argument: int = 0, details: Callable[[], Message] = dict) -> None:
        """The same without waiting, if anybody listens."""
        if self.speaking and self.listeners:
            message = {**self._brings(verb), **details()}  # now: what it is made of may change
            self._mentions.append(self._exchange(Standing.SPEAKS, verb, argument, lambda: message))

    @contextmanager
    def doing(self, verb: Verb, argument: int = 0, **details: Any) -> Generator[None]:
        """Say ``verb``; what is inside belongs to it."""
        spoken = self.speaking
        self.say(verb, argument, **details)
        with self.silence():
            yield
        if spoken:
            self._done()

    @contextmanager
    def silence(self) -> Generator[None]:
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def refuse_alone(self, what: str) -> None:
        """Raise if some rank listens: ``what`` needs all ranks, and is nothing that they can follow."""
        self.say(Verb.LOOK)
        if self.speaking and self.listeners:
            raise Refused(
                f"{what} inside join() needs all ranks, and ranks {list(self.listeners)} have no batches left. "
                f"Do it after the `with model.join():` block, or while all ranks have batches."
            )

    # -- a rank that has none -----------------------------------------------------------------------------------------

    def listen(self) -> Announcement:
        """Wait for what comes next."""
        return self._exchange(Standing.LISTENS, Verb.NOTHING, 0, lambda: self._brings(Verb.NOTHING)).wait()

    def fail(self, error: BaseException) -> None:
        """This rank leaves with an exception: the others hear of it at their next verb, also if somebody catches it here."""
        if isinstance(error, PeerFailed | DeadlineExceeded):
            return  # nobody can be told anything any more
        with suppress(Error):  # the channel is broken: the others know
            self._exchange(Standing.FAILED, Verb.NOTHING, 0, dict, describe(error))

    # -- the exchange -------------------------------------------------------------------------------------------------

    def _exchange(
        self, standing: Standing, verb: Verb, argument: int, message: Callable[[], Message], text: str = ""
    ) -> Ticket[Announcement]:
        if self.channel is None or not self._open:
            raise Refused("join() is over on this rank.")

        def work(wire: Wire, notes: list[bytes]) -> Announcement:
            words = [_unpack(note) for note in notes]
            _raise_failure(words)
            speakers = tuple(rank for rank, word in enumerate(words) if word.standing is Standing.SPEAKS)
            listeners = tuple(rank for rank, word in enumerate(words) if word.standing is Standing.LISTENS)
            if len(speakers) + len(listeners) < len(words):  # all have failed, each knows why
                return Announcement(Verb.NOTHING, 0, (), (), 0, {})
            first = _one_word(words, speakers)
            self._speakers = speakers or self._speakers
            root = speakers[0] if speakers else max(self._speakers)
            told = _hand_out(wire.world, root, message) if listeners else {}
            return Announcement(first.verb, first.argument, self._speakers, listeners, root, told)

        return self.channel.submit(_LABEL, work, _pack(standing, verb, argument, text))


@dataclass(frozen=True)
class _Word:
    standing: Standing
    verb: Verb
    argument: int
    text: str

    def at(self, rank: int) -> str:
        argument = f" {self.argument}" if self.verb in (Verb.GATHER, Verb.STEP) else ""
        return f"rank {rank} is at {self.verb.name.lower()}{argument}"


def _pack(standing: Standing, verb: Verb, argument: int, text: str) -> bytes:
    raw = text.encode()[:_TEXT_BYTES]
    return _NOTE.pack(standing, verb, argument, len(raw)) + raw.ljust(_TEXT_BYTES, b"\0")


def _unpack(note: bytes) -> _Word:
    standing, verb, argument, length = _NOTE.unpack_from(note)
    text = note[_NOTE.size : _NOTE.size + length].decode(errors="replace")
    return _Word(Standing(standing), Verb(verb), argument, text)


def _raise_failure(words: list[_Word]) -> None:
    """Raise, on every rank, if some have left with an exception. If all have, nobody waits for anybody."""
    failed = [rank for rank, word in enumerate(words) if word.standing is Standing.FAILED]
    if failed and len(failed) < len(words):
        raise PeerFailed(failed[0], words[failed[0]].text, "join()")


def _one_word(words: list[_Word], speakers: tuple[int, ...]) -> _Word:
    """What all speakers are at."""
    if not speakers:
        return words[0]
    first = words[speakers[0]]
    for rank in speakers:
        if words[rank].verb is not first.verb:
            raise Mismatch(f"{first.at(speakers[0])}, {words[rank].at(rank)}", _SAME_VERBS)
        if words[rank].argument != first.argument:
            same = first.at(speakers[0]) == words[rank].at(rank).replace(f"rank {rank} ", f"rank {speakers[0]} ")
            how = ", with other arguments" if same else ""
            raise Mismatch(f"{first.at(speakers[0])}, {words[rank].at(rank)}{how}", _SAME_VERBS)
    return first


def _hand_out(world: Transport, root: int, message: Callable[[], Message]) -> Message:
    """Everybody gets rank ``root``'s message."""
    raw = json.dumps(message()).encode() if world.rank == root else b""
    length = torch.tensor([len(raw)], dtype=torch.int64)
    world.broadcast(length, root)
    body = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(int(length), dtype=torch.uint8)
    world.broadcast(body, root)
    return json.loads(body.numpy().tobytes())
