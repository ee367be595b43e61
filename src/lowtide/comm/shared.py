"""Memory that the ranks of one host map: made by one of them, opened by the others, and gone with the last.

It is a file without a name (memfd), so nothing is left behind and the limit of ``/dev/shm`` does not hold. The others open it
through the maker's entry in ``/proc``, which the kernel allows to the same user only; what they opened must carry the secret
that the maker told the group, belong to this user, and be sealed against changes of its size, because a file that shrinks
under a mapping ends the process.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import secrets
import struct
import weakref

import torch
from torch import Tensor

from lowtide.comm.futex import Counters
from lowtide.errors import Error

PAGE = mmap.PAGESIZE
_SECRET_BYTES = 32
_TICKET = struct.Struct(f"<qqq{_SECRET_BYTES}s")  # process, descriptor, bytes, secret
TICKET_BYTES = _TICKET.size
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)


class CannotShare(Error):
    """This rank could not map the memory of another one on its host."""


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Segment:
    """One such memory. The first page carries the secret; what follows is the users'."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)
        """Let go of the descriptor; the memory lives as long as anybody uses its tensors."""
        self.memory = mmap.mmap(descriptor, PAGE + nbytes, mmap.MAP_SHARED)
        if hasattr(mmap, "MADV_DONTFORK"):
            self.memory.madvise(mmap.MADV_DONTFORK)
        self.ticket = b""
        """What another rank needs to open it; only the maker has one."""

    @classmethod
    def make(cls, nbytes: int) -> Segment:
        """Memory of ``nbytes``, all zero; none of it is taken before it is touched."""
        nbytes = pages(max(nbytes, 1))
        descriptor = os.memfd_create("lowtide", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, PAGE + nbytes)
        secret = secrets.token_bytes(_SECRET_BYTES)
        os.pwrite(descriptor, secret, 0)
        fcntl.fcntl(descriptor, getattr(fcntl, "F_ADD_SEALS", 1033), _SEALS)
        segment = cls(descriptor, nbytes)
        segment.ticket = _TICKET.pack(os.getpid(), descriptor, nbytes, secret)
        return segment

    @classmethod
    def open(cls, ticket: bytes) -> Segment:
        """The memory that another rank on this host made."""
        process, number, nbytes, secret = _TICKET.unpack(ticket)
        try:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CannotShare(f"the memory of process {process} cannot be opened: {error.strerror}") from error
        try:
            _check(descriptor, process, nbytes, secret)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, nbytes)

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """Bytes ``offset : offset + nbytes`` as a tensor with a storage of its own."""
        with torch.inference_mode(mode=False):
            if nbytes == 0:
                return torch.empty(0, dtype=torch.uint8)
            return torch.frombuffer(self.memory, dtype=torch.uint8, count=nbytes, offset=PAGE + offset)

    def counters(self, offset: int, count: int) -> Counters:
        """``count`` counters at ``offset``, four bytes each."""
        return Counters(self.memory, PAGE + offset, count)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return whole pages inside the range to the operating system; they read as zero afterwards."""
        first, end = pages(offset), (offset + nbytes) // PAGE * PAGE
        if end > first:
            self.memory.madvise(mmap.MADV_REMOVE, PAGE + first, end - first)

    @property
    def taken_bytes(self) -> int:
        """What it takes of the host's memory now."""
        return os.fstat(self._descriptor).st_blocks * 512 if self.close.alive else 0


def _check(descriptor: int, process: int, nbytes: int, secret: bytes) -> None:
    facts = os.fstat(descriptor)
    seals = fcntl.fcntl(descriptor, getattr(fcntl, "F_GET_SEALS", 1034))
    if facts.st_uid != os.geteuid():
        raise CannotShare(f"the memory of process {process} belongs to user {facts.st_uid}, not to {os.geteuid()}")
    if facts.st_size != PAGE + nbytes or seals & _SEALS != _SEALS:
        raise CannotShare(f"the memory of process {process} is not what its maker described")
    if not hmac.compare_digest(os.pread(descriptor, _SECRET_BYTES, 0), secret):
        raise CannotShare(f"the memory of process {process} does not carry the secret of this job")
