"""The exception tree: one root, facts as fields, built-in types as bases, and a way out in every message."""

from __future__ import annotations

import inspect
import pickle

import pytest

import lowtide
from lowtide import errors

EXAMPLES: dict[type[errors.Error], errors.Error] = {
    errors.ArgumentError: errors.ArgumentError("stage is 4; allowed: 0, 1, 2, 3."),
    errors.Refused: errors.Refused("no."),
    errors.InternalError: errors.InternalError("no."),
    errors.Evicted: errors.Evicted("head.weight", "head", "mul"),
    errors.GradientElsewhere: errors.GradientElsewhere("head.weight", "aten.add"),
    errors.StaleGraph: errors.StaleGraph("head"),
    errors.Mismatch: errors.Mismatch("stage: rank 0 has '2', rank 1 has '3'"),
    errors.PeerFailed: errors.PeerFailed(1, "killed", "gather of 'head'"),
    errors.DeadlineExceeded: errors.DeadlineExceeded("gather of 'head'", 300.0),
    errors.DoesNotFit: errors.DoesNotFit("host", 3 << 20, 1 << 20, "Use stage 3."),
    errors.Poisoned: errors.Poisoned("ValueError: x"),
    errors.OverBudget: errors.OverBudget("activations", 3 << 20, 1 << 20, "head"),
    errors.ChangedInPlace: errors.ChangedInPlace("float32 of shape [3]", 2, 1),
    errors.RecomputedDifferently: errors.RecomputedDifferently(
        "blocks.0", "it saved more than the 3 tensors of the first time"
    ),
    errors.DiskError: errors.DiskError("input/output error", "/scratch", 4096, "head", "parameters", 1),
    errors.DiskCorrupted: errors.DiskCorrupted("bytes differ", "/scratch", 4096, "head", "parameters", 1),
    errors.DiskFull: errors.DiskFull("no space", "/scratch", None, "head", "parameters", 1, 3 << 20, 1 << 20),
    errors.SpoolRefused: errors.SpoolRefused("a symlink", "/scratch", None, "", "", 1),
    errors.DiskStalled: errors.DiskStalled("read of 'head'", 300.0),
    errors.CheckpointError: errors.CheckpointError("no room", "run/step-1"),
    errors.CheckpointCorrupted: errors.CheckpointCorrupted("bytes differ", "run/step-1"),
    errors.CheckpointMismatch: errors.CheckpointMismatch("'head' is (3,) here", "run/step-1"),
    errors.CheckpointUnread: errors.CheckpointUnread("rank-00000.json cannot be opened: Too many open files", "run/step-1"),
    errors.CheckpointTooNew: errors.CheckpointTooNew("run/step-1", 2, 1, "9.0"),
    errors.NoCheckpoint: errors.NoCheckpoint("there is none", "run"),
}
TREE = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.Error)} - {errors.Error}


def test_every_error_is_here() -> None:
    assert set(EXAMPLES) == TREE
    assert lowtide.Error is errors.Error


@pytest.mark.parametrize("cls", EXAMPLES, ids=lambda c: c.__name__)
def test_each_is_also_the_built_in_a_caller_expects(cls: type[errors.Error]) -> None:
    builtin = {
        errors.ArgumentError: ValueError,
        errors.InternalError: AssertionError,
        errors.DeadlineExceeded: TimeoutError,
        errors.DoesNotFit: MemoryError,
        errors.OverBudget: MemoryError,
        errors.DiskError: OSError,
        errors.DiskCorrupted: OSError,
        errors.DiskFull: OSError,
        errors.SpoolRefused: OSError,
        errors.DiskStalled: TimeoutError,
    }.get(cls, RuntimeError)
    assert issubclass(cls, (errors.Error,))
    assert issubclass(cls, builtin)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (
            errors.Evicted,
            ["'head.weight'", "unit 'head'", "mul needs its values", "`with lowtide.gathered(module):`", "write=True"],
        ),
        (errors.GradientElsewhere, ["'head.weight'", "aten.add", "`grad.full_tensor()`", "on every rank"]),
        (errors.StaleGraph, ["unit 'head'", "Run the forward pass again"]),
        (errors.Mismatch, ["ranks differ: stage: rank 0 has '2', rank 1 has '3'"]),
        (errors.PeerFailed, ["rank 1 failed: killed (this rank was at gather of 'head')"]),
        (errors.DeadlineExceeded, ["gather of 'head'", "300 s", "Every rank must run the same"]),
        (errors.DoesNotFit, ["host memory: 3.0 MiB needed, 1.0 MiB allowed. Use stage 3."]),
        (errors.Poisoned, ["ValueError: x", "load a checkpoint or a state_dict"]),
    ],
)
def test_messages_name_the_thing_and_the_way_out(cls: type[errors.Error], words: list[str]) -> None:
    for word in words:
        assert word in str(EXAMPLES[cls])


def test_a_failure_without_a_place_says_no_place() -> None:
    assert str(errors.PeerFailed(2, "x", "")) == "rank 2 failed: x"


@pytest.mark.parametrize("cls", EXAMPLES, ids=lambda c: c.__name__)
def test_errors_pass_between_processes(cls: type[errors.Error]) -> None:
    """A launcher's pipe pickles them; what arrives says the same."""
    here = EXAMPLES[cls]
    there = pickle.loads(pickle.dumps(here))
    assert type(there) is cls
    assert str(there) == str(here)
    assert there.__dict__ == here.__dict__
