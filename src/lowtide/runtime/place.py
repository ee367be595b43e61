"""Where one unit is: its home, the slot it is whole in, and what is under way between them."""

from __future__ import annotations

import enum

from torch import Tensor

from lowtide.comm.channel import Ticket
from lowtide.errors import InternalError
from lowtide.runtime.slots import Waits
from lowtide.tiers.arena import Block
from lowtide.tiers.shelf import Shelf
from lowtide.tiers.store import IOTicket


class State(enum.Enum):
    """See the module's docstring."""

    HOME = enum.auto()
    ARRIVING = enum.auto()
    WHOLE = enum.auto()
    ATTACHED = enum.auto()


class Place:
    """Where one unit is."""

    __slots__ = (
        *("common", "covers", "exposed", "gather", "held", "home", "permanent", "pins", "placeholders"),
        *("prints", "reads", "ready", "replaced", "slot", "state", "versions", "writes"),
    )

    def __init__(self, home: Shelf, covers: tuple[int, int]) -> None:
        self.home = home
        self.covers = covers  # bytes lo:hi of the unit that the home holds
        self.state = State.HOME
        self.slot: Block | None = None  # may be the home's own block
        self.reads: list[IOTicket] = []  # that fill the slot
        self.gather: Ticket[Block | None] | None = None  # that fills it with other ranks' shards, or gives one that all share
        self.ready: Waits | None = None  # what must have happened before it may be read
        self.common: Block | None = None  # the whole unit in memory of all ranks of this host; true while the home is in memory
        self.writes: list[IOTicket] = []  # from the slot to the home
        self.pins = 0
        self.held = False  # an update works in the slot
        self.permanent = False
        self.versions: list[int] = []  # of the parameters when they were attached
        self.prints: list[int] = []  # of their values, see runtime/writes.py; none if the slot is the home, or after an update
        self.replaced: dict[int, Tensor] = {}  # by index: memory that parameters were given, until its values are the unit's
        self.exposed = False  # whether parameters were attached since ``prints`` were last compared
        self.placeholders: list[Tensor] = []  # what the parameters hold while they are evicted

    def full_slot(self) -> Block:
        if self.slot is None:
            raise InternalError(f"the {self.home.key} is whole without a slot")
        return self.slot
