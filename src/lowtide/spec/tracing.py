"""A model's facts from one forward and backward pass that computes nothing: tensors have shapes and no memory.

Works for any ``nn.Module``, real, deferred or on the meta device; the model is called as it is and left as it was
(``tracing_fake.py``). Every operation is counted for the unit that runs it (``tracing_work.py``), every storage from birth to
death (``tracing_memory.py``).

[Note: whose backward is it] Autograd's nodes are made while a unit's forward runs. When a module of a unit returns, the nodes
between its results and its arguments are given that unit, and say so before they run in backward. Nodes that are left over
when backward begins belong to no unit. Recomputation in backward runs modules again, and is counted in the same way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.parameter import is_lazy

from lowtide.config import UnitChoice
from lowtide.errors import ArgumentError, Refused
from lowtide.spec.model import ModelSpec, UnitFacts, Work
from lowtide.spec.tracing_fake import DEVICES, NEEDS_VALUES, NO_RULE, Fakes, OnCuda, standing_in, tensors_in
from lowtide.spec.tracing_memory import MemoryLog, Where
from lowtide.spec.tracing_work import tensors_of, work_of
from lowtide.spec.units import UnitSpec, find_units, needs
from lowtide.torch_internals import TorchDispatchMode

Loss = Callable[[Any], Tensor]

_DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_MARK = "lowtide.call"  # in a node's metadata: the call of a unit's module that made it


def trace(
    model: nn.Module,
    batch: Any,
    *,
    units: UnitChoice = None,
    bucket_bytes: int,
    loss: Loss | None = None,
    name: str = "",
    device: str = "cpu",
) -> ModelSpec:
    """The facts of ``model`` for one forward and backward of ``batch``; nothing is computed and nothing changes.

    ``batch``: a tuple of arguments, a dict of keyword arguments, or one tensor; of its tensors only the shapes matter.
    ``loss`` takes what the model returns; without it, a scalar or a ``.loss`` is the loss, else the sum of all results.
    ``device="cuda"`` counts attention as CUDA's kernels do it; CUDA need not be there.
    """
    if device not in DEVICES:
        raise ArgumentError(f"device is {device!r}; allowed: {', '.join(map(repr, DEVICES))}.")
    if any(is_lazy(p) for p in model.parameters()):
        raise ArgumentError("the model has lazy parameters, whose sizes are not known; run it once on a batch first.")
    specs = find_units(model, units, bucket_bytes=bucket_bytes)
    units_of = _units_of_modules(specs)
    resident = [*model.parameters(), *model.buffers()]
    fakes = Fakes()
    tracer = _Tracer(specs)
    try:
        with ExitStack() as stack:
            stack.enter_context(standing_in(model, fakes))
            tracer.watch([fakes.of(t) for t in resident], units_of)
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(fakes.mode)
            if torch.get_default_device().type != "cpu":  # the caller built the model under another one
                stack.enter_context(torch.device("cpu"))
            stack.enter_context(OnCuda() if device == "cuda" else nullcontext())
            args, kwargs = _arguments(fakes.all_in(batch))
            tracer.memory.given(tensors_in((args, kwargs)))
            tracer.step(model, args, kwargs, loss or _usual_loss)
    except NEEDS_VALUES as error:
        raise Refused(_needs_values(error, tracer.unit_name)) from error
    except NO_RULE as error:
        raise Refused(
            f"{error} (unit {tracer.unit_name!r}) cannot be traced: torch knows no shapes for its results. "
            f"Register a fake for it (torch.library.register_fake), or plan with a count of parameters instead."
        ) from error
    return _spec(specs, tracer, name=name or type(model).__name__, batch=_in_words(batch))


def _needs_values(error: Exception, unit: str) -> str:
    return (
        f"the model's forward depends on values ({error}, unit {unit!r}), which a trace does not have: something like "
        f".item(), `if tensor:` or nonzero(). Plan with a count of parameters instead (a model known by its number only), "
        f"or trace a variant of the model whose units have no data-dependent control flow."
    )


# -- counting ---------------------------------------------------------------------------------------------------------


class _Tracer:
    """Who computes, what it costs and what memory it makes."""

    def __init__(self, specs: list[UnitSpec]) -> None:
        self._specs = specs
        self.memory = MemoryLog()
        self.forward: defaultdict[Where, Work] = defaultdict(Work)
        self.backward: defaultdict[Where, Work] = defaultdict(Work)
        self._now = self.forward
        self.order: dict[int, None] = {}
        self._calls: list[tuple[Where, int, list[Any]]] = []
        self._finished = 0
        self._begun_gradients: set[int] = set()  # identities of parameters, all of which live as long as the trace

    @property
    def unit_name(self) -> str:
        return "(outside)" if self.memory.where is None else self._specs[self.memory.where].name

    def watch(self, resident: list[Tensor], units_of: dict[nn.Module, list[int]]) -> None:
        """Hook the units' modules and the parameters. Nobody takes the hooks off again: the modules get back what they had."""
        self.memory.stays(resident)
        for tensor in resident:
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(lambda p: self.memory.became_gradient(p.grad))
        for module, units in units_of.items():
            self._hook(module, units)

    def _hook(self, module: nn.Module, units: list[int]) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.order.update(dict.fromkeys(units))
            self.enter(units[0], list(tensors_in((args, kwargs))))

        def after(_: nn.Module, args: Any, output: Any) -> None:
            self.leave(units[0], list(tensors_in(output)))

        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after)

    def step(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss_of: Loss) -> None:
        """One forward and backward pass."""
        with _Operations(self):
            with saved_tensors_hooks(self._pack, lambda kept: kept):
                loss = loss_of(model(*args, **kwargs))
            if loss.numel() != 1 or not loss.requires_grad:
                raise ArgumentError("the loss must be one number that depends on a trained parameter; give loss= a function.")
            self._give_nodes(None, [loss.grad_fn], [], since=-1)
            self._now = self.backward
            self.memory.enter(None)
            # Given a tensor, this would be one operation for a function mode, and hide from it all that is recomputed inside.
            torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            self.memory.saved(tensor)
        return tensor.detach()  # a node that saved its own result would keep itself alive

    def count(self, work: Work) -> None:
        self._now[self.memory.where] += work

    # -- who computes -------------------------------------------------------------------------------------------------

    def enter(self, unit: int, inputs: list[Tensor]) -> None:
        """A module of ``unit`` begins."""
        self._calls.append((self.memory.where, self._finished, [t.grad_fn for t in inputs if t.grad_fn is not None]))
        self.memory.enter(unit)
        if self._now is self.forward:
            self.memory.entered_with(inputs)

    def leave(self, unit: int, outputs: list[Tensor]) -> None:
        """That module is done."""
        outer, since, before = self._calls.pop()
        self._give_nodes(unit, [t.grad_fn for t in outputs], before, since=since)
        self.memory.enter(outer)

    def _give_nodes(self, unit: Where, last: list[Any], before: list[Any], *, since: int) -> None:
        """See [Note: whose backward is it]. Nodes of calls that had finished before this one began are left alone."""
        self._finished += 1
        seen = set(before)
        stack = [node for node in last if node is not None]
        while stack:
            node = stack.pop()
            if node in seen or hasattr(node, "variable"):  # that one adds to a parameter's gradient, whoever uses it
                continue
            seen.add(node)
            made_by = node.metadata.get(_MARK)
            if made_by is None:
                node.metadata[_MARK] = self._finished
                node.register_prehook(lambda _: self.memory.enter(unit))
                self._find_gradients(node)
            elif made_by <= since:
                continue
            stack += [following for following, _ in node.next_functions if following is not None]

    def _find_gradients(self, node: Any) -> None:
        """Parts of a tied parameter's gradient arrive one by one: the first is kept until the others have been added."""
        trained = [(i, id(to.variable)) for i, (to, _) in enumerate(node.next_functions) if hasattr(to, "variable")]

        def after(grad_inputs: Any, _: Any) -> None:
            for index, parameter in trained:
                if parameter not in self._begun_gradients:
                    self._begun_gradients.add(parameter)
                    self.memory.became_gradient(grad_inputs[index])

        if trained:
            node.register_hook(after)


class _Operations(TorchDispatchMode):
    """Sees every operation, forward and backward."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        fresh = self._tracer.memory.born(tensors_of(result))
        work = work_of(func, args, kwargs or {}, result, fresh_bytes=fresh)
        if work is not None:
            self._tracer.count(work)
        return result


# -- what goes in, what comes out -------------------------------------------------------------------------------------


def _units_of_modules(specs: list[UnitSpec]) -> dict[nn.Module, list[int]]:
    """The units that each module's forward needs. As in the engine, what it does counts for the first of them."""
    unit_of = {p: index for index, spec in enumerate(specs) for p in spec.params}
    hosts = {module for spec in specs for module in spec.modules}
    needed = {module: sorted({unit_of[p] for p in needs(module, hosts)}) for spec in specs for module in spec.modules}
    return {module: units for module, units in needed.items() if units}


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def _usual_loss(output: Any) -> Tensor:
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    if isinstance(output, Tensor) and output.dim() == 0:
        return output
    trained = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    if not trained:
        raise ArgumentError(
            "nothing that the model returns depends on a trained parameter; give loss= a function of its result."
        )
    return torch.stack([t.sum() for t in trained]).sum() if len(trained) > 1 else trained[0].sum()


def _in_words(batch: Any) -> str:
    """Shapes and dtypes: ``input_ids 8×256 int64``."""
    named = batch.items() if isinstance(batch, Mapping) else (("", value) for value in _arguments(batch)[0])
    words = [
        f"{key} {'×'.join(map(str, t.shape)) or 'scalar'} {str(t.dtype).removeprefix('torch.')}".strip()
        for key, value in named
        for t in tensors_in(value)
    ]
    return ", ".join(words) or "no tensors"


def _spec(specs: list[UnitSpec], tracer: _Tracer, *, name: str, batch: str) -> ModelSpec:
    memory, transient = tracer.memory, tracer.memory.transient_bytes()
    order = [*tracer.order, *(index for index in range(len(specs)) if index not in tracer.order)]  # unused ones last
    facts = tuple(
        UnitFacts(
            name=specs[index].name,
            numel=sum(p.numel() for p in specs[index].params),
            trained_numel=sum(p.numel() for p in specs[index].params if p.requires_grad),
            parameter_bytes=specs[index].nbytes,
            forward=tracer.forward[index],
            backward=tracer.backward[index],
            activation_bytes=memory.saved_bytes[index],
            input_bytes=memory.input_bytes[index],
            transient_bytes=transient.get(index, 0),
        )
        for index in order
    )
    return ModelSpec(
        name=name,
        units=facts,
        dtype=_dtype_of(specs),
        batch=batch,
        outside_forward=tracer.forward[None],
        outside_backward=tracer.backward[None],
        outside_bytes=memory.saved_bytes[None],
        outside_transient_bytes=transient.get(None, 0),
    )


def _dtype_of(specs: list[UnitSpec]) -> str:
    """The dtype that most parameters have."""
    numbers = Counter[torch.dtype]()
    for spec in specs:
        for p in spec.params:
            numbers[p.dtype] += p.numel()
    dtype = numbers.most_common(1)[0][0] if numbers else torch.float32
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
