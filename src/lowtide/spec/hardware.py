"""What a machine can do, in the few numbers that a plan needs: bytes that fit, and bytes or operations per second.

The numbers come from the probe of this machine (``spec/probe.py``), or from a data file that describes another one
(``hardware/*.json``, each with its sources). Nothing here measures or plans.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Where kernels run: the processor of a host, or one accelerator."""

    name: str
    flops: dict[str, float]
    """Of a large matrix product, per second, by dtype (``fp32``, ``bf16``, ...). A multiply-add counts as two."""
    bandwidth: float
    """Bytes per second that a large elementwise kernel reads and writes together."""
    op_seconds: float
    """To start one kernel."""
    fault_seconds: float
    """Per byte of fresh memory, on top of the work in it: what page faults cost a CPU. 0 where memory is kept."""
    memory_bytes: int | None = None
    """Memory of its own; ``None``: it computes in the host's."""
    reached: float = 1.0
    """What a training step reaches of the speed that its kernels reach one by one, each at its best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A folder for what does not fit in memory."""

    read: float
    """Bytes per second, large requests, past the page cache."""
    write: float
    mixed: float
    """Bytes per second in all, while as much is read as written."""
    free_bytes: int
    direct: bool = True
    """Whether it can be used past the page cache."""
    busy: float = 0.15
    """Of the seconds in which it works, so many are lost to compute on the host: checksums, system calls, threads that wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How fast bytes pass between two places, each way."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """How long two ranks of one host take for one collective."""

    transport: str
    """``torch``: torch.distributed over gloo; ``shared``: memory that both map."""
    verb: str
    """``gather`` or ``reduce``."""
    nbytes: int
    """Of the whole: what is gathered, or what every rank gives to the sum."""
    seconds: float
    """Until the slower rank has it: half of all were faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One host with its accelerators, disk and wires. A cluster is several of the same."""

    name: str
    source: str
    """Where the numbers come from: ``measured`` and the day, ``assumed``, or the documents."""
    compute: Compute
    host_bytes: int
    """What a job may use of the host's memory."""
    host_bandwidth: float
    """Bytes per second of a copy in host memory, counted once."""
    inside: Wire
    """Between two ranks on one host, as collectives get it."""
    between: Wire | None = None
    """Between two hosts; ``None``: there is only one."""
    link: Wire | None = None
    """Between host memory and an accelerator's; ``None``: they are the same memory."""
    disk: Disk | None = None
    ranks_per_host: int = 1
    """Accelerators, or on a CPU host the ranks that share its cores."""
    collectives: tuple[Collective, ...] = ()
    """As they were measured, for people; a plan is made with ``inside``."""
