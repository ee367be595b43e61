"""The end of processes on this host, as the kernel tells it.

A closed connection shows that a rank died only if nobody else holds the connection open. A data loader's forked workers
do, for seconds. So ranks on one host also watch each other's process.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

IDENTITY_BYTES = 256


def identity() -> bytes:
    """This process, in a form that only processes that can see it understand; fixed size."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        text = f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()}"
    except OSError:
        text = ""  # not Linux: connections must do
    return text.encode()[:IDENTITY_BYTES].ljust(IDENTITY_BYTES, b"\0")


def this_host() -> str:
    """The same text for all processes that may share this machine's memory: one kernel, one user, and nothing that was set up
    to keep them apart, neither their processes nor their networks."""
    seen = identity().strip(b"\0").decode().rpartition(" ")[0]
    if not seen:
        return socket.gethostname()
    return f"{seen} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"


def _pid_seen_from_here(who: bytes) -> int | None:
    here, there = identity().strip(b"\0").split(), who.strip(b"\0").split()
    return int(there[2]) if len(there) == 3 and there[:2] == here[:2] else None


class ProcessEnds:
    """Calls ``ended(peer)``, in a thread of its own, for each peer on this host whose process ends, until closed."""

    def __init__(self, identities: Mapping[int, bytes], ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._peers: dict[int, int] = {}  # file descriptor of a process -> peer
        for peer, who in identities.items():
            pid = _pid_seen_from_here(who)
            if pid is not None:
                # A process that is gone already has closed its connections, or this system has no such descriptors.
                with contextlib.suppress(OSError, AttributeError):
                    self._peers[os.pidfd_open(pid)] = peer
        self._stop, self._stopper = os.pipe()
        self._thread = threading.Thread(target=self._run, name="lowtide-processes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        os.close(self._stopper)
        self._thread.join()
        for descriptor in (*self._peers, self._stop):
            os.close(descriptor)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (*self._peers, self._stop):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._stop:
                    return
                poll.unregister(descriptor)
                self._ended(self._peers[descriptor])
