"""Every exception that lowtide raises on purpose, as one tree.

An error names what is wrong, with the numbers, and the way out. The facts are fields, so that a program can act on them.
Errors a caller caused also derive from the built-in type that plain PyTorch would have raised.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar


class Error(Exception):
    """Root of all errors raised by lowtide."""


class ArgumentError(Error, ValueError):
    """An argument of a public function is wrong; the message says what is allowed."""


class Refused(Error, RuntimeError):
    """lowtide cannot do this and keep its promise; the message says why and what to do instead. Nothing was changed."""


NO_WHOLE_COMPILE = (
    "torch.compile of a whole sharded model is not possible: parameters come and go between its units. "
    "Compile each block instead: `for block in model.blocks: block.compile()`."
)


class InternalError(Error, AssertionError):
    """An invariant of lowtide does not hold. Please report it with the message."""


@dataclass(eq=False)
class Evicted(Error, RuntimeError):
    """A parameter was used while its values were not here."""

    parameter: str
    unit: str
    operation: str

    def __str__(self) -> str:
        return (
            f"parameter {self.parameter!r} (unit {self.unit!r}) is evicted: {self.operation} needs its values. "
            f"Use it inside the model's forward, or open `with lowtide.gathered(module):` (write=True to change it)."
        )


@dataclass(eq=False)
class GradientElsewhere(Error, RuntimeError):
    """A gradient that is stored as shards was used as if it were whole."""

    parameter: str
    operation: str

    def __str__(self) -> str:
        return (
            f"the gradient of {self.parameter!r} is stored as shards: {self.operation} is not available on it. "
            f"Norm, scaling, clamping and zeroing work; `grad.full_tensor()` (call it on every rank) gives it whole."
        )


@dataclass(eq=False)
class StaleGraph(Error, RuntimeError):
    """A backward pass needs parameter values that an update has replaced since the forward pass."""

    unit: str

    def __str__(self) -> str:
        return (
            f"the parameters of unit {self.unit!r} were updated after this graph was built; "
            f"its backward pass would use the wrong values. Run the forward pass again."
        )


@dataclass(eq=False)
class ChangedInPlace(Error, RuntimeError):
    """A tensor that backward needs was changed after forward saved it."""

    tensor: str
    version: int
    expected: int

    def __str__(self) -> str:
        return (
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {self.tensor} "
            f"is at version {self.version}; expected version {self.expected}. Use an operation that is not in place, or clone."
        )


@dataclass(eq=False)
class RecomputedDifferently(Error, RuntimeError):
    """The forward pass of a unit came to other values when it was computed again for backward. They were not used."""

    unit: str
    difference: str

    def __str__(self) -> str:
        return (
            f"unit {self.unit!r} came to other values when it was computed again: {self.difference}. Its forward depends on "
            f"state that has moved on since and cannot be seen from outside (a global, the time, another thread). Load a "
            f'checkpoint, and keep its activations: activations="keep", or Activations(units=((pattern, "keep"),)).'
        )


@dataclass(eq=False)
class Mismatch(Error, RuntimeError):
    """Ranks do not agree on the model, its configuration or the library; raised on every rank."""

    difference: str
    way_out: str = ""

    def __str__(self) -> str:
        return f"ranks differ: {self.difference}" + (f". {self.way_out}" if self.way_out else "")


@dataclass(eq=False)
class PeerFailed(Error, RuntimeError):
    """Another rank failed or left; raised on every rank that is still alive."""

    rank: int
    """Its number; -1 if a connection was lost and nobody could be asked whose."""
    cause: str
    waiting_for: str
    report: str = ""
    """Where every rank stood, if a deadline passed. Printed once already, so it is no part of the message."""

    def __str__(self) -> str:
        where = f" (this rank was at {self.waiting_for})" if self.waiting_for else ""
        who = f"rank {self.rank}" if self.rank >= 0 else "another rank"
        return f"{who} failed: {self.cause}{where}"


@dataclass(eq=False)
class DeadlineExceeded(Error, TimeoutError):
    """A wait took longer than its deadline."""

    waiting_for: str
    seconds: float
    because: str = "another rank did not take part"
    report: str = ""
    """Where every rank stood. Printed once already, so it is no part of the message."""

    def __reduce__(self) -> tuple[type[DeadlineExceeded], tuple[str, float, str, str]]:
        return type(self), (self.waiting_for, self.seconds, self.because, self.report)  # an OSError forgets its arguments

    def __str__(self) -> str:
        return (
            f"no answer for {self.waiting_for} within {self.seconds:.0f} s: {self.because}. "
            f"Every rank must run the same forward, backward, step and state_dict calls; "
            f"if one may be away for longer, give comm=lowtide.Comm(deadline=...)."
        )


@dataclass(eq=False)
class DoesNotFit(Error, MemoryError):
    """The model needs more bytes than the budget allows; raised before anything is allocated."""

    tier: str
    needed_bytes: int
    budget_bytes: int
    fix: str

    def __str__(self) -> str:
        sizes = f"{self.needed_bytes / 2**20:.1f} MiB needed, {self.budget_bytes / 2**20:.1f} MiB allowed"
        where = "disk" if self.tier == "disk" else f"{self.tier} memory"
        return f"{where}: {sizes}. {self.fix}"


@dataclass(eq=False)
class OverBudget(Error, MemoryError):
    """The running job would need more memory than it was given; raised before it takes it."""

    what: str
    needed_bytes: int
    budget_bytes: int
    unit: str

    def __str__(self) -> str:
        sizes = f"{self.needed_bytes / 2**20:.1f} MiB needed, {self.budget_bytes / 2**20:.1f} MiB allowed"
        return f"{self.what} (unit {self.unit!r}): {sizes}. Raise memory=, or use a smaller batch or activations='disk'."


@dataclass(eq=False)
class Poisoned(Error, RuntimeError):
    """An update failed half-way: some parameters are new and some are old, so nothing may use them."""

    cause: str

    def __str__(self) -> str:
        return f"the model is half-updated after a failure ({self.cause}); load a checkpoint or a state_dict to go on"


@dataclass(eq=False)
class DiskError(Error, OSError):
    """The disk tier could not keep or bring back bytes. Subclasses say why; the system's own error is the cause."""

    problem: str
    file: str
    """The folder of the spool file (the file itself has no name)."""
    offset: int | None = None
    unit: str = ""
    kind: str = ""
    rank: int = 0

    way_out: ClassVar[str] = "Look at the system's log and the disk, then start again from the last checkpoint."

    def __reduce__(self) -> tuple[type[DiskError], tuple[object, ...]]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # an OSError forgets its arguments

    def __str__(self) -> str:
        what = f"{self.kind} of unit {self.unit!r}, " if self.unit or self.kind else ""
        where = f", offset {self.offset}" if self.offset is not None else ""
        return f"disk: {self.problem} ({what}rank {self.rank}, spool in {self.file!r}{where}). {self.way_out}"


@dataclass(eq=False)
class DiskCorrupted(DiskError):
    """The bytes that came back are not those that were written."""

    way_out: ClassVar[str] = (
        "Nothing was computed with them. The disk, its driver or another program changed the file: "
        "check or replace the disk, then start again from the last checkpoint."
    )


@dataclass(eq=False)
class DiskFull(DiskError):
    """A folder has no room for what is to be kept there; raised when room is reserved, before anything is written."""

    needed_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0
    """All that is to be kept there, where that is known: what is missing now is only the first that found no room."""

    way_out: ClassVar[str] = "Make room there, raise the folder's limit, or add a folder: disk=[(folder, size), ...]."

    def __str__(self) -> str:
        sizes = f"{self.needed_bytes / 2**20:.1f} MiB more needed, {self.free_bytes / 2**20:.1f} MiB free"
        total = f"{self.total_bytes / 2**20:.1f} MiB in all are to be kept there; " if self.total_bytes else ""
        return f"{total}{sizes}: {super().__str__()}"


@dataclass(eq=False)
class SpoolRefused(DiskError):
    """A folder for the disk tier is not one that lowtide can keep private bytes in."""

    way_out: ClassVar[str] = "Give a folder on a local disk in which you may create folders."


@dataclass(eq=False)
class DiskStalled(Error, TimeoutError):
    """A request to the disk was not done within its deadline."""

    waiting_for: str
    seconds: float

    def __reduce__(self) -> tuple[type[DiskStalled], tuple[str, float]]:
        return type(self), (self.waiting_for, self.seconds)  # an OSError forgets its arguments

    def __str__(self) -> str:
        return (
            f"{self.waiting_for} was not done within {self.seconds:.0f} s: the disk does not answer. "
            f"Look at the system's log; a network mount that is gone shows like this."
        )


@dataclass(eq=False)
class CheckpointError(Error, RuntimeError):
    """A checkpoint cannot be written or read."""

    problem: str
    path: str

    way_out: ClassVar[str] = ""

    def __post_init__(self) -> None:
        # it may quote a file, and a terminal may act upon what it says
        self.problem = "".join(c if c.isprintable() else "?" for c in self.problem)

    def fields(self) -> dict[str, str | int]:
        """What makes the same error again."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    def __str__(self) -> str:
        return f"checkpoint {self.path!r}: {self.problem}." + (f" {self.way_out}" if self.way_out else "")


@dataclass(eq=False)
class CheckpointCorrupted(CheckpointError):
    """What is there is not what was written."""

    way_out: ClassVar[str] = "Load an older one: lowtide.load of the folder around it passes over this one."


@dataclass(eq=False)
class CheckpointUnread(CheckpointError):
    """A checkpoint was not looked at, because this process or machine is short of something; it may be whole."""

    way_out: ClassVar[str] = "Raise the limit (`ulimit -n` for open files) or end other programs, and load it again."


@dataclass(eq=False)
class NoCheckpoint(CheckpointError):
    """There is nothing to load."""


@dataclass(eq=False)
class CheckpointMismatch(CheckpointError):
    """The checkpoint is whole, but of another model or optimizer."""

    way_out: ClassVar[str] = "Build the model as it was when it was saved, or load with strict=False what both have."


@dataclass(eq=False)
class CheckpointTooNew(CheckpointError):
    """It was written by a newer version of lowtide, in a format that this one does not know."""

    problem: str = field(init=False)
    path: str
    version: int
    known: int
    lowtide: str

    def __post_init__(self) -> None:
        self.problem = (
            f"it has format {self.version}, written by lowtide {self.lowtide}; this lowtide knows formats up to {self.known}. "
            f"Install that version or a newer one"
        )
        super().__post_init__()
