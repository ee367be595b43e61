"""Process groups for tensors of the simulated device, as NCCL is for CUDA: ``simccl``, and ``simccl_late``, which delays.

A collective is queued on a stream of the group and returns at once; ``wait`` makes the caller's stream wait, not the host. What
the ranks really exchange goes through gloo, on a thread that opens a gate in the stream when it is done.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops.sim
Exchange = Callable[[list[Tensor], list[Tensor]], Any]  # host inputs, host outputs → work of gloo
_LONGEST_DELAY = 0.02  # seconds


class _Work(dist._Work):
    def __init__(self, over: torch.Event, results: list[Tensor], group: DeviceGroup) -> None:
        super().__init__()
        self._over, self._group = over, group
        self._future: torch.futures.Future[Any] = torch.futures.Future(devices=[results[0].device])
        self._future.set_result(results)  # on the group's stream, which is the current one: who waits for it waits for that

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._group.check()
        torch.accelerator.current_stream(self._group.device).wait_event(self._over)
        return True

    def is_completed(self) -> bool:
        self._group.check()
        return self._over.query()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class DeviceGroup(dist.ProcessGroup):
    """Collectives of device tensors only. ``late``: each exchange begins some milliseconds after it could."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, *, late: bool = False) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("simccl", store), rank, size, timeout)
        self.device = torch.device("sim", torch.accelerator.current_device_index())
        self._stream = torch.Stream(self.device)
        self._random = random.Random(rank) if late else None
        self._error: BaseException | None = None
        self._todo: queue.SimpleQueue[tuple[torch.Event, Callable[[], Any], int]] = queue.SimpleQueue()
        threading.Thread(target=self._exchange, name="simccl", daemon=True).start()

    def getBackendName(self) -> str:
        return "simccl"

    def check(self) -> None:
        if self._error is not None:
            raise RuntimeError("a collective of the simulated device has failed") from self._error

    def _exchange(self) -> None:
        while True:
            ready, exchange, gate = self._todo.get()
            try:
                ready.synchronize()
                if self._random is not None:
                    time.sleep(self._random.random() * _LONGEST_DELAY)
                exchange()
            except BaseException as error:
                self._error = error
            _ops.open_gate(gate)

    def _run(self, inputs: list[Tensor], outputs: list[Tensor], exchange: Exchange) -> _Work:
        self.check()
        for tensor in (*inputs, *outputs):
            if tensor.device != self.device:
                raise RuntimeError(
                    f"No backend type associated with device type {tensor.device.type} (this group: {self.device})"
                )
        self._stream.wait_event(torch.accelerator.current_stream(self.device).record_event())
        with self._stream:
            host_inputs = [torch.empty_like(t, device="cpu", pin_memory=True) for t in inputs]
            host_outputs = [torch.empty_like(t, device="cpu", pin_memory=True) for t in outputs]
            for host, tensor in zip(host_inputs, inputs, strict=True):
                host.copy_(tensor, non_blocking=True)
            ready, gate = self._stream.record_event(), _ops.new_gate()
            for host, tensor in zip(host_outputs, outputs, strict=True):
                _ops.deliver(host, tensor, gate)
            for tensor in (*inputs, *outputs):
                tensor.record_stream(self._stream)
            work = _Work(self._stream.record_event(), outputs or inputs, self)
        self._todo.put((ready, lambda: exchange(host_inputs, host_outputs), gate))
        return work

    def _in_place(self, tensors: list[Tensor], start: Callable[[list[Tensor]], Any]) -> _Work:
        def exchange(inputs: list[Tensor], outputs: list[Tensor]) -> None:
            start(inputs).wait()
            for source, target in zip(inputs, outputs, strict=True):
                target.copy_(source)

        return self._run(tensors, tensors, exchange)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._in_place(tensors, lambda host: self._gloo.allreduce(host, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._in_place(tensors, lambda host: self._gloo.broadcast(host, opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:
        return self._run(inputs, outputs[0], lambda i, o: self._gloo.allgather([o], i).wait())

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Work:
        return self._run([source], [output], lambda i, o: self._gloo.allgather([list(o[0].chunk(self.size()))], i).wait())

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Work:
        def exchange(inputs: list[Tensor], outputs: list[Tensor]) -> None:
            self._gloo.allreduce(inputs).wait()
            outputs[0].copy_(inputs[0].chunk(self.size())[self.rank()])

        return self._run([source], [output], exchange)

    def all_to_all_single(self, output: Tensor, source: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None) -> _Work:
        return self._run([source], [output], lambda i, o: self._gloo.alltoall_base(o[0], i[0], out_sizes, in_sizes).wait())

    def barrier(self, opts: Any = None) -> _Work:
        work = self.allreduce([torch.zeros(1, device=self.device)], dist.AllreduceOptions())
        work.wait()
        torch.accelerator.synchronize()
        return work


def register() -> None:
    """Make ``dist.init_process_group("simccl")`` and ``dist.new_group(backend="simccl_late")`` known."""

    def late(store: dist.Store, rank: int, size: int, timeout: timedelta) -> DeviceGroup:
        return DeviceGroup(store, rank, size, timeout, late=True)

    dist.Backend.register_backend("simccl", DeviceGroup, devices=["sim"])
    dist.Backend.register_backend("simccl_late", late, devices=["sim"])
