"""What lowtide refuses: the exact type, a message that names the thing and the way out, and nothing changed by it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import lowtide
from lowtide.api import engine_of
from lowtide.config import build_config
from lowtide.errors import ArgumentError, DoesNotFit, Error, Evicted, GradientElsewhere, Poisoned, Refused
from lowtide.runtime import assembly
from tests.kit.dist import run_ranks
from tests.kit.models import Block, Stack
from tests.kit.parity import assert_bitwise

COMM = lowtide.Comm(bucket_bytes=0)


def stack(count: int = 3) -> Stack:
    """The head has 40 rows, so that two ranks cut its weight in the middle."""
    torch.manual_seed(0)
    return Stack([Block() for _ in range(count)], out=40)


def x(number: int = 0) -> Tensor:
    return torch.randn(3, 24, generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> list[float]:
    losses = []
    for number in range(steps):
        loss = model(x(number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def refused(call: Callable[[], Any], kind: type[Error], *words: str) -> None:
    with pytest.raises(Error) as caught:
        call()
    assert type(caught.value) is kind, caught.value
    for word in words:
        assert word in str(caught.value), caught.value


# -- arguments of shard -----------------------------------------------------------------------------------------------

WRONG_ARGUMENTS: list[tuple[dict[str, Any], type[Error], list[str]]] = [
    ({"stage": 4}, ArgumentError, ["stage is 4", "0 (nothing sharded)", "'auto'"]),
    ({"memory": "4 GB!"}, ArgumentError, ["memory is '4 GB!'", "'4GiB'"]),
    ({"memory": 0}, ArgumentError, ["memory is 0", "more than 0 bytes"]),
    ({"memory": "1KB"}, DoesNotFit, ["host memory", "MiB needed", "use stage 3 on more ranks, or raise memory"]),
    ({"disk": "/no/such/folder"}, ArgumentError, ["disk is '/no/such/folder'", "not a folder"]),
    ({"disk": 7}, ArgumentError, ["disk is 7", "(folder, size) pairs"]),
    ({"disk": [("/tmp", "4 GB!")]}, ArgumentError, ["the size of disk is '4 GB!'", "'4GiB'"]),
    ({"units": "nope.*"}, ArgumentError, ["units='nope.*' matches no module of Stack", "blocks"]),
    ({"units": [Block, nn.Conv2d]}, ArgumentError, ["Conv2d", "matches no module of Stack"]),
    ({"partition": "rows"}, ArgumentError, ["partition is 'rows'", "Did you mean 'row'?"]),
    ({"partition": lowtide.Partition("element", (1, 2))}, ArgumentError, ["2 entries for 1 ranks"]),
    ({"precision": "fp8"}, ArgumentError, ["Precision.param is 'fp8'", "'bf16'"]),
    ({"activations": "disk"}, ArgumentError, ["activations='disk' needs a folder"]),
    ({"activations": "recomputed"}, ArgumentError, ["activations is 'recomputed'", "Did you mean 'recompute'?"]),
    ({"update": "backwards"}, ArgumentError, ["update is 'backwards'", "Did you mean 'backward'?"]),
    ({"group": 3}, ArgumentError, ["group is 3", "a ProcessGroup, a DeviceMesh"]),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), WRONG_ARGUMENTS, ids=lambda v: str(v)[:40])
def test_arguments(arguments: dict[str, Any], kind: type[Error], words: list[str]) -> None:
    """And the model and its optimizer are what they were: they train on as if nothing had been asked."""
    model, other = stack(), stack()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    before = {name: (id(p), p.data_ptr(), p._version) for name, p in model.named_parameters()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    refused(lambda: lowtide.shard(model, optimizer, **arguments), kind, *words)
    assert (type(model), type(optimizer)) == (Stack, AdamW)
    assert {name: (id(p), p.data_ptr(), p._version) for name, p in model.named_parameters()} == before
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    assert train(model, optimizer) == train(other, AdamW(other.parameters(), lr=1e-2))


def _with_meta() -> nn.Module:
    model = stack()
    model.head = nn.Linear(24, 40, device="meta")
    return model


def _all_meta() -> nn.Module:
    with torch.device("meta"):
        return stack()


def _with_lazy() -> nn.Module:
    model = stack()
    model.head = nn.LazyLinear(40)
    return model


class _Odd(nn.Parameter):
    pass


def _with_subclass() -> nn.Module:
    model = stack()
    model.head.bias = _Odd(torch.zeros(40))
    return model


def _with_sparse(layout: torch.layout) -> nn.Module:
    model = stack()
    model.head.weight = nn.Parameter(model.head.weight.detach().to_sparse(layout=layout))
    return model


def _with_dtensor() -> nn.Module:
    """A class of that name and that place, as tensor parallelism leaves them."""
    model = stack()
    kind = type("DTensor", (nn.Parameter,), {"__module__": "torch.distributed.tensor"})
    model.head.weight = kind(torch.zeros(40, 24))
    return model


def _wrapped_by(package: str, name: str, *, inside: bool = False) -> nn.Module:
    """A model, or one of its modules, in a wrapper of this name: other libraries are not imported for the question."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    Wrapper.__name__, Wrapper.__module__ = name, package
    return nn.Sequential(stack(), Wrapper(nn.Linear(40, 40))) if inside else type("Mine", (Wrapper,), {})(stack())


def _part_sharded() -> nn.Module:
    model = stack()
    lowtide.shard(model.head, stage=2)
    return model


MODELS: list[tuple[Callable[[], Any], type[Error], list[str]]] = [
    (lambda: None, ArgumentError, ["model is a NoneType", "torch.nn.Module"]),
    (lambda: list(stack().parameters()), ArgumentError, ["model is a list"]),
    (lambda: nn.ReLU(), ArgumentError, ["ReLU has no parameters"]),
    (_with_meta, Refused, ["cpu, meta", "lowtide.deferred()"]),
    (_all_meta, Refused, ["meta", "lowtide.deferred()"]),
    (_with_lazy, Refused, ["'head.weight' is a UninitializedParameter", "one forward pass first"]),
    (_with_subclass, Refused, ["'head.bias' is a _Odd", "before other libraries convert it"]),
    (lambda: torch.compile(stack(), backend="eager"), Refused, ["torch.compile of a whole", "block.compile()"]),
    (_part_sharded, Refused, ["part of this model is sharded already"]),
    (lambda: _with_sparse(torch.sparse_coo), Refused, ["'head.weight'", "torch.sparse_coo", "to_dense()"]),
    (lambda: _with_sparse(torch.sparse_csr), Refused, ["'head.weight'", "torch.sparse_csr", "to_dense()"]),
    (_with_dtensor, Refused, ["'head.weight' is a DTensor", "another parallelism", "the plain model"]),
    (lambda: nn.DataParallel(stack()), Refused, ["the model is a DataParallel", "model.module"]),
    (lambda: _wrapped_by("torch.nn.parallel", "DistributedDataParallel"), Refused, ["DistributedDataParallel", "model.module"]),
    (lambda: _wrapped_by("torch.nn", "DistributedDataParallel", inside=True), Refused, ["its module '1' is a Distributed"]),
    (lambda: _wrapped_by("torch.distributed.fsdp", "FullyShardedDataParallel"), Refused, ["the plain module"]),
    (lambda: _wrapped_by("torch.distributed.fsdp", "FSDPModule"), Refused, ["leave fully_shard out"]),
    (lambda: _wrapped_by("lightning.fabric.wrappers", "_FabricModule"), Refused, ["model.module", "before fabric.setup"]),
    (lambda: _wrapped_by("lightning_fabric.wrappers", "_FabricModule"), Refused, ["before fabric.setup"]),
    (lambda: _wrapped_by("deepspeed.runtime.engine", "DeepSpeedEngine"), Refused, ["leave deepspeed.initialize out"]),
]


@pytest.mark.parametrize(("make", "kind", "words"), MODELS)
@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:Sparse CSR tensor support is in beta")
def test_models(make: Callable[[], Any], kind: type[Error], words: list[str]) -> None:
    refused(lambda: lowtide.shard(make()), kind, *words)


def test_a_model_compiled_in_place() -> None:
    model = stack()
    model.compile(backend="eager")
    refused(lambda: lowtide.shard(model), Refused, "torch.compile of a whole")


def test_compiling_the_whole_model_afterwards() -> None:
    model, _ = lowtide.shard(stack(), stage=3, comm=COMM)
    compiled: Any = torch.compile(model, backend="eager")
    with pytest.raises(Exception, match=r"torch\.compile of a whole sharded model is not possible"):
        compiled(x())
    torch.compiler.reset()
    assert model(x()).shape == (3, 40)


# -- accelerators -----------------------------------------------------------------------------------------------------

OFF_THE_DEVICE: dict[str, tuple[dict[str, Any], str]] = {
    "disk": ({"disk": "/tmp"}, "disk= with a model on cuda:1"),
    "device_memory": ({"device_memory": "1GiB"}, "device_memory= with"),
    "both": ({"disk": "/tmp", "device_memory": "1GiB", "update": "backward"}, "disk= and device_memory= with"),
    "host": ({"activations": "host"}, "activations='host' with"),
    "one_unit": ({"activations": lowtide.Activations("keep", (("blocks.0", "host"),))}, "activations='host' with"),
    "activations": ({"disk": "/tmp", "activations": "disk"}, "disk= and activations='disk' with"),
}


@pytest.mark.parametrize("case", OFF_THE_DEVICE)
def test_what_leaves_an_accelerator(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the model and its optimizer are what they were."""
    arguments, words = OFF_THE_DEVICE[case]
    model, other = stack(), stack()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with monkeypatch.context() as patch:
        patch.setattr(assembly, "_compute_device", lambda specs: torch.device("cuda:1"))
        refused(lambda: lowtide.shard(model, optimizer, **arguments), Refused, words, "wrong without an error", "recompute")
    assert (type(model), type(optimizer)) == (Stack, AdamW)
    assert train(model, optimizer) == train(other, AdamW(other.parameters(), lr=1e-2))


def test_what_stays_on_an_accelerator() -> None:
    """And an emulated device of a CPU may be left: it has no streams."""
    off: dict[str, Any] = {"disk": "/tmp", "device_memory": "1GiB", "activations": "host"}
    for device, options in (("cuda", {}), ("cuda", {"memory": "1GiB", "activations": "recompute"}), ("cpu", off)):
        assembly.refuse_unproven(torch.device(device), configured(**options))


def configured(**options: Any) -> Any:
    usual: dict[str, Any] = {
        **{"stage": "auto", "partition": "element", "precision": None, "activations": "auto", "update": "step", "comm": None},
        **{"memory": None, "device_memory": None, "disk": None, "weights": None, "adapt": "placement", "run": None},
    }
    return build_config(world_size=1, **{**usual, **options})


# -- optimizers -------------------------------------------------------------------------------------------------------


class _Wrapper:
    """Like Lightning's: no optimizer, but looks like one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer


class _WrapperByClass(Optimizer):
    """Like Accelerate's: an optimizer by its class alone."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]


class _NeverSetUp(_WrapperByClass):
    def __init__(self, optimizer: Optimizer) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (_Wrapper, ["a _Wrapper, a wrapper around SGD", "optimizer._optimizer"]),
        (_WrapperByClass, ["a _WrapperByClass, a wrapper around SGD", "optimizer.optimizer"]),
        (_NeverSetUp, ["a _NeverSetUp", "super().__init__(params, defaults)"]),
    ],
)
def test_wrapped_optimizers(kind: Any, words: list[str]) -> None:
    model, other = stack(), stack()
    inside = SGD(model.parameters(), lr=0.1)
    refused(lambda: lowtide.shard(model, kind(inside)), ArgumentError, *words)
    lowtide.shard(model)
    refused(lambda: lowtide.shard(model, kind(inside)), ArgumentError, *words)
    lowtide.shard(model, inside)
    assert train(model, inside) == train(other, SGD(other.parameters(), lr=0.1))


class _Normalised(Optimizer):
    """Looks at whole tensors, or at whole rows."""

    def __init__(self, params: Any, dim: int | None) -> None:
        super().__init__(params, {"lr": 0.1, "dim": dim})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    size = p.grad.norm() if group["dim"] is None else p.grad.norm(dim=group["dim"], keepdim=True)
                    p.sub_(p.grad / size, alpha=group["lr"])


def optimizers(rank: int, world: int) -> None:
    model = stack()
    strange = nn.Parameter(torch.zeros(3))
    call = lambda optimizer, **how: lowtide.shard(model, optimizer, **{"stage": 1, "comm": COMM, **how})  # noqa: E731
    refused(lambda: call("adam"), ArgumentError, "optimizer is a str", "torch.optim.Optimizer")
    refused(lambda: call(SGD([*model.parameters(), strange], lr=0.1)), ArgumentError, "1 parameters that are not in the model")
    refused(
        lambda: call(torch.optim.LBFGS(model.parameters())), Refused, "LBFGS evaluates the model inside its step", "closure"
    )
    whole = _Normalised(model.parameters(), None)
    for stage in (1, 2, 3):
        refused(
            lambda stage=stage: call(whole, stage=stage),
            Refused,
            "_Normalised cannot update parameters that are cut between ranks",
            "depends on the other elements",
            "partition='tensor'",
        )
    assert type(model) is Stack
    other = stack()
    expected = train(other, _Normalised(other.parameters(), None))
    model, optimizer = call(whole, partition="tensor")
    assert train(model, optimizer) == expected, "every rank has the same batch"


def test_optimizers() -> None:
    run_ranks(2, optimizers)


def row_wise(rank: int, world: int, stage: int) -> None:
    """An optimizer that looks at rows, under a partition that keeps rows whole: right, or refused. Never silently wrong."""
    torch.manual_seed(0)
    plain, ours = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    ours.load_state_dict(plain.state_dict())
    first, second = _Normalised(plain.parameters(), -1), _Normalised(ours.parameters(), -1)
    try:
        ours, second = lowtide.shard(ours, second, stage=stage, partition="row", comm=COMM)
    except Refused:
        return
    for number in range(2):
        for model, optimizer in ((plain, first), (ours, second)):
            model(torch.full((1, 64), 0.1 * (number + 1))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with lowtide.gathered(ours):
        assert_bitwise(ours.weight, plain.weight, "weight")


@pytest.mark.parametrize("stage", [1, 3])
def test_optimizers_that_look_at_rows(stage: int) -> None:
    run_ranks(2, row_wise, stage)


def test_a_second_call() -> None:
    model = stack()
    model, optimizer = lowtide.shard(model, SGD(model.parameters(), lr=0.1), stage=2)
    refused(lambda: lowtide.shard(model), ArgumentError, "sharded already", "new optimizer")
    refused(lambda: lowtide.shard(model, optimizer), ArgumentError, "sharded already")
    refused(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}), ArgumentError, "not in the model")
    refused(lambda: lowtide.shard(model, SGD([nn.Parameter(torch.zeros(2))], lr=0.1)), ArgumentError, "not in the model")
    again = stack()
    assert train(model, lowtide.shard(model, SGD(model.parameters(), lr=0.1))[1]) == train(
        again, SGD(again.parameters(), lr=0.1)
    )


def test_sparse_embeddings() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    model, _ = lowtide.shard(model, SGD(model.parameters(), lr=0.1), stage=2, comm=COMM)
    out = model(torch.tensor([1, 2]))
    refused(lambda: out.sum().backward(), Refused, "'0.weight' is sparse", "sparse=False")


# -- a sharded model --------------------------------------------------------------------------------------------------


def whole_model_operations(model: Any, optimizer: Any) -> dict[str, tuple[Callable[[], Any], type[Error], str]]:
    sharded = "Convert it before lowtide.shard"
    return {
        "deepcopy": (lambda: copy.deepcopy(model), Refused, "Copy it before lowtide.shard"),
        "deepcopy of the optimizer": (lambda: copy.deepcopy(optimizer), Refused, "copy it before lowtide.shard"),
        "pickle": (lambda: pickle.dumps(model), Refused, "save model.state_dict() instead"),
        "half": (lambda: model.half(), Refused, sharded),
        "bfloat16": (lambda: model.bfloat16(), Refused, "precision=lowtide.Precision(param='bf16')"),
        "double": (lambda: model.double(), Refused, sharded),
        "to meta": (lambda: model.to("meta"), Refused, sharded),
        "to_empty": (lambda: model.to_empty(device="meta"), Refused, sharded),
        "assign": (lambda: model.load_state_dict({}, assign=True), Refused, "leave assign out"),
    }


def evicted_operations(model: Any) -> dict[str, tuple[Callable[[], Any], type[Error], str]]:
    p, w, rows = model.head.bias, model.head.weight, torch.randn(2, 24)
    ones = torch.ones(40, 24)
    way = "lowtide.gathered(module)"
    return {
        "linear": (lambda: F.linear(rows, w), Evicted, way),
        "matmul": (lambda: rows @ w.t(), Evicted, way),
        "mul": (lambda: w * 2, Evicted, way),
        "reversed": (lambda: 2 * w, Evicted, way),
        "fill_": (lambda: w.fill_(1), Evicted, way),
        "zero_": (lambda: p.zero_(), Evicted, way),
        "data": (lambda: w.data, Evicted, way),
        "data.zero_": (lambda: w.data.zero_(), Evicted, way),
        "detach": (lambda: w.detach(), Evicted, way),
        "clone": (lambda: w.clone(), Evicted, way),
        "init.zeros_": (lambda: nn.init.zeros_(w), Evicted, way),
        "init.kaiming": (lambda: nn.init.kaiming_uniform_(w), Evicted, way),
        "numpy": (lambda: w.numpy(), Evicted, way),
        "item": (lambda: w[0, 0].item(), Evicted, way),
        "set an element": (lambda: w.__setitem__((0, 0), 1.0), Evicted, way),
        "tolist": (lambda: w.tolist(), Evicted, way),
        "copy_": (lambda: w.copy_(ones), Evicted, way),
        "copy from": (lambda: torch.empty(40, 24).copy_(w), Evicted, way),
        "foreach_zero": (lambda: torch._foreach_zero_([w]), Evicted, way),
        "foreach_mul": (lambda: torch._foreach_mul([ones, w], 2.0), Evicted, way),
        "fused sgd": (
            lambda: torch._fused_sgd_(
                [w],
                [ones],
                [],
                weight_decay=0.0,
                momentum=0.0,
                lr=0.1,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=True,
            ),
            Evicted,
            way,
        ),
        "embedding": (lambda: F.embedding(torch.tensor([0]), w), Evicted, way),
        "cat": (lambda: torch.cat([ones, w]), Evicted, way),
        "compare": (lambda: torch.equal(w, ones), Evicted, way),
        "norm": (lambda: w.norm(), Evicted, way),
        "sum": (lambda: p.sum(), Evicted, way),
        "add_ without grad": (lambda: torch.no_grad()(lambda: p.add_(1))(), Evicted, way),
        "data pointer": (lambda: w.data_ptr(), Evicted, way),
        "to": (lambda: w.to(torch.float64), Evicted, way),
        "half": (lambda: w.half(), Evicted, way),
        "parameters_to_vector": (lambda: nn.utils.parameters_to_vector([p]), Evicted, way),
        "deepcopy": (lambda: copy.deepcopy(w), Refused, "copy the model before lowtide.shard"),
        "deepcopy of a part": (lambda: copy.deepcopy(model.head), Refused, "copy the model before lowtide.shard"),
        "pickle": (lambda: pickle.dumps(w), Refused, "save model.state_dict() instead"),
        "state_dict of a part": (lambda: model.head.state_dict(), Evicted, way),
        "half of a part": (lambda: model.blocks[0].half(), Evicted, way),
        "a plain optimizer": (lambda: _plain_step(w), Error, ""),
    }


def _plain_step(w: nn.Parameter) -> None:
    """A parameter that slipped past lowtide into an optimizer of its own."""
    optimizer = SGD([w], lr=0.1, fused=True)
    w.grad = torch.ones(40, 24)
    try:
        optimizer.step()
    finally:
        w.grad = None


def operations(rank: int, world: int) -> None:
    model = stack()
    model, optimizer = lowtide.shard(model, AdamW(model.parameters(), lr=1e-2), stage=3, comm=COMM)
    plain = stack()
    for name, (call, kind, words) in {**whole_model_operations(model, optimizer), **evicted_operations(model)}.items():
        with pytest.raises(Error) as caught:
            call()
        assert isinstance(caught.value, kind), (name, caught.value)
        assert words in str(caught.value), (name, caught.value)
        if kind is Evicted:
            assert "unit 'head'" in str(caught.value) or "unit 'blocks.0'" in str(caught.value), (name, caught.value)
    w = model.head.weight
    assert isinstance(w, nn.Parameter)
    assert (w.shape, w.dtype, w.device, w.requires_grad, w.is_leaf) == (
        (40, 24),
        torch.float32,
        torch.device("cpu"),
        True,
        True,
    )
    assert (w.numel(), w.size(1), w.dim(), w.stride(), len(w), w.nbytes) == (960, 24, 2, (24, 1), 40, 3840)
    assert "head.weight" in repr(w)
    assert "EvictedParameter" in repr(w)
    assert list(model.parameters())[-2] is w
    assert model.to("cpu") is model
    assert model.float() is model
    assert model.train().eval().train() is model
    assert model.requires_grad_(True) is model
    # every rank has the same batch, so the numbers are those of one rank
    other = AdamW(plain.parameters(), lr=1e-2)
    assert train(model, optimizer) == train(plain, other), "and nothing was changed by all that"


@pytest.mark.parametrize("ranks", [1, 2])
def test_operations_on_what_is_not_here(ranks: int) -> None:
    run_ranks(ranks, operations)


def torch_checkpoints(rank: int, world: int, stage: int) -> None:
    from torch.distributed.checkpoint import state_dict as dcp

    model = stack()
    model, optimizer = lowtide.shard(model, AdamW(model.parameters(), lr=1e-2), stage=stage, comm=COMM)
    plain = stack()
    first = AdamW(plain.parameters(), lr=1e-2)
    train(model, optimizer)
    train(plain, first)
    whole = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    on_rank_0 = dcp.get_model_state_dict(model, options=whole)
    expected = dcp.get_model_state_dict(plain) if rank == 0 else {}
    assert list(on_rank_0) == list(expected)
    for name, value in expected.items():
        assert_bitwise(on_rank_0[name], value, name)
    way = ("sharded by lowtide", "lowtide.save(folder, model, optimizer)")
    asked: list[Callable[[], Any]] = [lambda: dcp.get_state_dict(model, optimizer)]
    asked += [lambda: dcp.get_optimizer_state_dict(model, optimizer)]
    asked += [lambda: dcp.get_model_state_dict(model)] if stage == 3 else []
    for call in asked:
        if world > 1:
            refused(call, Refused, *way)
        else:
            call()
    if world > 1:
        assert bool(model.state_dict()) is (stage < 3 or rank == 0), "by itself it is what it was"
    assert train(model, optimizer) == train(plain, first)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_torch_checkpoints_of_what_is_sharded(stage: int, ranks: int) -> None:
    run_ranks(ranks, torch_checkpoints, stage)


def gradients(rank: int, world: int, stage: int) -> None:
    model = stack()
    model, _ = lowtide.shard(model, AdamW(model.parameters()), stage=stage, comm=COMM)
    model(x()).square().mean().backward()
    grad: Any = model.head.weight.grad
    assert "head.weight" in repr(grad)
    for name, call in {
        "add": lambda: grad + 1,
        "sum": lambda: grad.sum(),
        "numpy": lambda: grad.numpy(),
        "clone": lambda: grad.clone(),
        "element": lambda: grad[0, 0],
        "add_ a tensor": lambda: grad.add_(torch.ones(40, 24)),
        "mul_ a tensor": lambda: grad.mul_(torch.ones(40, 24)),
        "copy_": lambda: grad.copy_(torch.ones(40, 24)),
        "fused": lambda: torch._foreach_add([grad], 1.0),
    }.items():
        with pytest.raises((GradientElsewhere, TypeError, RuntimeError)) as caught:
            call()
        if name != "numpy":
            assert isinstance(caught.value, GradientElsewhere), (name, caught.value)
            assert "'head.weight'" in str(caught.value)
            assert "full_tensor()" in str(caught.value)
    assert grad.full_tensor().shape == (40, 24)


@pytest.mark.parametrize("stage", [2, 3])
def test_operations_on_a_gradient_in_pieces(stage: int) -> None:
    run_ranks(2, gradients, stage)


def resident(rank: int, world: int, stage: int) -> None:
    """Where parameters stay whole, replacing their memory is found at the next forward pass."""
    model = stack()
    model, _ = lowtide.shard(model, AdamW(model.parameters()), stage=stage, comm=COMM)
    for operation in (lambda: model.half(), lambda: copy.deepcopy(model), lambda: model.to("meta")):
        refused(operation, Refused, "before lowtide.shard")
    model.blocks[0].half()
    refused(lambda: model(x()), Refused, "'blocks.0.norm.weight' was replaced", "gathered(module, write=True)")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_part_that_was_converted(stage: int) -> None:
    run_ranks(2, resident, stage)


def test_converting_a_16_bit_model_back_is_refused() -> None:
    """``.float()`` must not quietly leave bf16 parameters as they are."""
    model, _ = lowtide.shard(stack(), stage=3, precision="bf16", comm=COMM)
    refused(lambda: model.float(), Refused, "Convert it before lowtide.shard")
    assert model.bfloat16() is model


# -- gathered ---------------------------------------------------------------------------------------------------------


def gathering(rank: int, world: int, stage: int) -> None:
    plain = stack()
    model, _ = lowtide.shard(stack(), stage=stage, comm=COMM)
    other, _ = lowtide.shard(stack(1), stage=stage, comm=COMM)
    with lowtide.gathered(model.head):
        assert_bitwise(model.head.weight, plain.head.weight, "read")

    def both() -> None:
        with lowtide.gathered([*model.parameters(), *other.parameters()]):
            pass

    refused(both, ArgumentError, "more than one sharded model")

    def write_without_saying_so() -> None:
        with lowtide.gathered(model.head), torch.no_grad():
            model.head.weight.add_(1)

    refused(write_without_saying_so, Refused, "'head.weight' was changed", "write=True")
    with lowtide.gathered(model.head):
        before = model.head.weight.detach().clone()
    if stage == 3 and world > 1:  # elsewhere the parameter itself is here, and a write to it is a write
        assert_bitwise(before, plain.head.weight, "refused means not changed")
    with lowtide.gathered(model.head, write=True), torch.no_grad():
        model.head.weight.add_(rank + 1)
    with lowtide.gathered(model.head):
        assert_bitwise(model.head.weight, before + 1, "rank 0's values win")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_gathered(stage: int, ranks: int) -> None:
    run_ranks(ranks, gathering, stage)


# -- a step that fails half-way ---------------------------------------------------------------------------------------


class _FailsAt(SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        super().step()
        if self.fails:
            raise OSError("in the middle")


def half_updated(rank: int, world: int, stage: int) -> None:
    model = stack()
    optimizer = _FailsAt(model.parameters(), lr=0.1)
    model, optimizer = lowtide.shard(model, optimizer, stage=stage, comm=COMM)
    saved = stack().state_dict()
    optimizer.fails = True
    model(x()).square().mean().backward()
    with pytest.raises(OSError, match="in the middle"):
        optimizer.step()
    for call in (lambda: model(x()), lambda: optimizer.step(), lambda: model.state_dict()):
        refused(call, Poisoned, "half-updated", "OSError: in the middle", "load a checkpoint or a state_dict")
    optimizer.fails = False
    model.load_state_dict(saved)
    optimizer.zero_grad()
    plain = stack()
    assert train(model, optimizer) == train(plain, SGD(plain.parameters(), lr=0.1))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_fails_half_way_poisons_until_values_are_loaded(stage: int, ranks: int) -> None:
    run_ranks(ranks, half_updated, stage)


def test_engine_of_a_plain_model() -> None:
    refused(lambda: engine_of(stack()), ArgumentError, "this Stack is not sharded", "lowtide.shard")


def test_clipping_a_part() -> None:
    model, _ = lowtide.shard(stack(), stage=2, comm=COMM)
    model(x()).sum().backward()
    refused(lambda: lowtide.clip_grad_norm_([model.head.weight], 1.0), ArgumentError, "all parameters of one sharded model")
