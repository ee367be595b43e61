"""What a model is to a planner: bytes and work, unit by unit, for one batch. Made without running the model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a computation costs, whatever machine runs it."""

    flops: float = 0.0
    """Of matrix products and convolutions. A multiply-add counts as two."""
    moved_bytes: float = 0.0
    """Read and written by all other kernels."""
    fresh_bytes: float = 0.0
    """Of tensors that are made on the way: they cost page faults on a CPU."""
    operations: int = 0
    """Kernels started."""

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            fresh_bytes=self.fresh_bytes + other.fresh_bytes,
            operations=self.operations + other.operations,
        )

    def scaled(self, factor: float) -> Work:
        """The same kernels on so many times the data."""
        return Work(
            flops=self.flops * factor,
            moved_bytes=self.moved_bytes * factor,
            fresh_bytes=self.fresh_bytes * factor,
            operations=self.operations,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """One unit, whole, on one rank."""

    name: str
    numel: int
    """All its parameters."""
    trained_numel: int
    parameter_bytes: int
    """As compute reads them."""
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    """Without the forward pass that recomputation would repeat."""
    activation_bytes: int = 0
    """What autograd saves in its forward, parameters aside."""
    input_bytes: int = 0
    """What must be kept to compute it again: its inputs."""
    transient_bytes: int = 0
    """The most that its forward or backward holds for a moment, beside what is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """All units in the order in which a forward pass runs them, and what happens outside of them."""

    name: str
    units: tuple[UnitFacts, ...]
    dtype: str
    """What it computes in: ``fp32``, ``bf16``, ..."""
    batch: str
    """The batch that the work and the activations are for, in words; empty: none, they are not known."""
    outside_forward: Work = field(default_factory=Work)
    outside_backward: Work = field(default_factory=Work)
    outside_bytes: int = 0
    """Saved by autograd outside of units: the loss, what the model computes around its blocks."""
    outside_transient_bytes: int = 0
    """The most that is held there for a moment: logits and their gradients, often the peak of a step."""

    @property
    def numel(self) -> int:
        return sum(u.numel for u in self.units)

    @property
    def trained_numel(self) -> int:
        return sum(u.trained_numel for u in self.units)
