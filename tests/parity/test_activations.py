"""Activations that are recomputed or spilled: the same bits as when they are kept, and really gone in between.

Every model of the menagerie, and the ways in which autograd walks a graph (test_autograd.py), with each policy. Released
memory is filled with NaN.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.api import engine_of
from lowtide.errors import ChangedInPlace, Refused, StaleGraph
from lowtide.runtime.recompute import Recompute, modules_to_wrap
from lowtide.runtime.saved import SavedViews
from lowtide.runtime.spill import Spill
from lowtide.tiers.host import HostStore
from tests.kit.dist import run_ranks
from tests.kit.models import MENAGERIE, Block, Stack
from tests.kit.optimizers import OPTIMIZERS
from tests.kit.parity import Plain, Recipe, Sharded, assert_same, find_specimen, known_oracle, train, whole_grad
from tests.kit.stores import SlowStore
from tests.parity import test_autograd as walks

POLICIES = ("recompute", "spill", "recompute and spill", "every other")


class Policy:
    """One activation policy on a sharded model."""

    def __init__(self, model: nn.Module, name: str, *, slow: float = 0.0) -> None:
        engine = engine_of(model)
        engine.arena.poison = True
        self.spill: Spill | None = None
        if "spill" in name:
            store = HostStore()
            self.spill = Spill(SlowStore(store, slow) if slow else store, least_bytes=1, in_flight_bytes=4096)
            self.spill.arena.poison = True
        resident = {p.untyped_storage().data_ptr() for p in model.parameters() if type(p) is nn.Parameter}

        def stays(address: int) -> bool:
            return address in resident or any(address == b.untyped_storage().data_ptr() for b in model.buffers())

        usual = engine.activations.saved
        self.saved = SavedViews(engine.residency, usual._on_demand, spill=self.spill, stays=stays)
        engine.activations.saved = self.saved
        engine.open_saved = self.saved.open  # at every stage
        self.calls = 0
        self.name = name
        self.recompute = Recompute(engine, self.saved, self)
        for module, units in modules_to_wrap(model, engine.units).items():
            self.recompute.install(module, units)

    def should_recompute(self, module: nn.Module) -> bool:
        self.calls += 1
        return "recompute" in self.name or (self.name == "every other" and self.calls % 2 == 0)

    def should_keep(self, module: nn.Module, nbytes: int, changes: str | None) -> bool:
        return changes is not None


def under(policy: str, model: nn.Module, optimizer: Any, **options: Any) -> Sharded:
    system = Sharded(model, optimizer, **{"comm": lowtide.Comm(bucket_bytes=0), **options})
    system.policy = Policy(system.model, policy)  # pyright: ignore
    return system


def left_behind(system: Any) -> list[str]:
    """Nothing is spilled, needed or whole once all graphs are gone."""
    policy: Policy = system.policy
    spilled = policy.spill.spilled_bytes_live if policy.spill is not None else 0
    needed = [unit.name for unit in engine_of(system.model).units if policy.saved.live_recipes(unit)]
    return ([f"{spilled} bytes spilled"] if spilled else []) + ([f"needed: {needed}"] if needed else [])


# -- the menagerie ----------------------------------------------------------------------------------------------------


def difference(rank: int, world: int, name: str, stage: int, policy: str) -> str | None:
    recipe = Recipe(steps=3, accumulate=2)
    expected = known_oracle(name, recipe, world, rank)
    specimen = find_specimen(name)
    model = specimen.build(seed=rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        system = under(policy, model, OPTIMIZERS[recipe.optimizer](model.parameters()), stage=stage)
        got = train(system, specimen, recipe, rank=rank)
    try:
        assert_same(got, expected)
    except AssertionError as error:
        return str(error)
    return "\n".join(left_behind(system)) or None


def check(ranks: int, *case: Any) -> None:
    found = run_ranks(ranks, difference, *case)
    assert not any(found), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("policy", ["recompute", "recompute and spill"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("model", MENAGERIE)
def test_one_rank_equals_plain_torch(model: str, stage: int, policy: str) -> None:
    check(1, model, stage, policy)


@pytest.mark.parametrize("model", MENAGERIE)
def test_two_ranks_equal_ddp(model: str) -> None:
    check(2, model, 3, "recompute and spill")


AWKWARD = ("buffers", "dropout", "gpt", "dict_output", "lstm", "frozen_block", "called_twice", "tied_across_blocks", "moe")


@pytest.mark.thinned(5)
@pytest.mark.parametrize("policy", ["recompute", "spill", "every other"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("model", AWKWARD)
def test_every_policy(model: str, stage: int, policy: str) -> None:
    check(2, model, stage, policy)


# -- how a graph is walked --------------------------------------------------------------------------------------------


def all_ways(rank: int, world: int, name: str) -> list[str]:
    problems: list[str] = []
    layer = walks.SCENARIOS[name][1]
    expected = walks.play(walks.oracle(walks.net(layer), world), name, rank, True)
    for policy in POLICIES:
        for stage in (3, 0):
            model = walks.net(layer)
            system = under(policy, model, walks.sgd(model), stage=stage)
            found = walks.differences(walks.play(system, name, rank, True), expected)
            found = found[:3] + walks.left_behind(system) + left_behind(system)
            problems += [f"{policy}, stage {stage}: {text}" for text in found]
    return problems


@pytest.mark.thinned(5)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", walks.SCENARIOS)
def test_gradients_are_the_same(name: str, ranks: int) -> None:
    found = run_ranks(ranks, all_ways, name, timeout=60)
    assert not any(found), "\n".join(text for texts in found for text in texts)


def outside(rank: int, world: int) -> list[str]:
    """Blocks that are called one by one, without the model's own forward."""
    model = walks.net(walks.Layer)
    expected = walks.play(walks.oracle(walks.net(walks.Layer), world), "called_again", rank, False)
    return walks.differences(
        walks.play(under("recompute", model, walks.sgd(model), stage=3), "called_again", rank, False), expected
    )


def test_blocks_called_one_by_one() -> None:
    assert run_ranks(2, outside) == [[], []]


# -- awkward modules, one rank, in this process -----------------------------------------------------------------------

WIDTH = 16


class Awkward(nn.Module):
    """A block whose forward is given by the test."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("state", torch.ones(WIDTH))
        self.register_buffer("cache", None)
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def build(run: Callable[..., Any], *, count: int = 2) -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict({"blocks": nn.ModuleList(Awkward(run) for _ in range(count)), "head": nn.Linear(WIDTH, 2)})


Loop = Callable[[Any], Tensor]


def pair(run: Callable[..., Any], stage: int, policy: str = "recompute") -> tuple[Any, Any]:
    """The same model twice: plain, and under the policy."""
    plain, ours = build(run), build(run)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return Plain(plain, sgd(plain.parameters())), under(policy, ours, sgd(ours.parameters()), stage=stage)


def outcome(system: Any, loop: Loop) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    losses = {f"loss {n}": loop(system.model).detach() for n in range(2)}
    gradients = {n: whole_grad(p) for n, p in system.model.named_parameters()}
    return {**losses, **gradients, **{n: b.clone() for n, b in system.model.named_buffers()}}


def compare(run: Callable[..., Any], loop: Loop, policy: str = "recompute") -> None:
    for stage in (0, 3):
        plain, ours = pair(run, stage, policy)
        expected, got = outcome(plain, loop), outcome(ours, loop)
        assert got.keys() == expected.keys()
        assert walks.differences(got, expected) == [], f"stage {stage}"


def data(rows: int = 4) -> Tensor:
    return torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH).sin()


def through(model: Any, x: Tensor) -> Tensor:
    for block in model["blocks"]:
        x = block(x)
    return x


def once(model: Any) -> Tensor:
    loss = model["head"](through(model, data())).square().sum()
    loss.backward()
    return loss


def change_input(block: Any, x: Tensor) -> Tensor:
    return torch.tanh(block.linear(x.mul_(2))) + 1


def change_input_seen_by_caller(model: Any) -> Tensor:
    x = data().requires_grad_() * 1.0
    for block in model["blocks"]:
        x = block(x) + x
    loss = model["head"](x).sum()
    loss.backward()
    return loss


def test_inputs_that_are_changed_in_place() -> None:
    compare(change_input, once)
    compare(change_input, change_input_seen_by_caller)


def late_in_all(change: Callable[[Any, Tensor], Tensor]) -> None:
    """Bits and no error if a forward begins to ``change`` something in its second call."""

    def run(block: Any, x: Tensor) -> Tensor:
        block.calls = getattr(block, "calls", 0)
        return change(block, x) if SECOND.get(block) else torch.tanh(block.linear(x)) + 1

    def loop(model: Any) -> Tensor:
        loss = once(model)
        SECOND.update({block: True for block in model["blocks"]})
        return loss + once(model)

    compare(run, loop)


SECOND: dict[nn.Module, bool] = {}
"""Out of sight: a global."""


def test_inputs_that_are_changed_in_place_only_later() -> None:
    late_in_all(lambda block, x: torch.tanh(block.linear(x.mul_(2))) + 1)


def statistics(block: Any, x: Tensor) -> Tensor:
    block.state.data.mul_(0.5)  # as many vector quantizers do: no version moves
    block.cache = x.detach().mean(0) if block.cache is None else block.cache + 1
    return torch.tanh(block.norm(block.linear(x)) * block.state * block.cache)


def test_buffers_move_once() -> None:
    compare(statistics, once)

    def twice_then_backward(model: Any) -> Tensor:
        loss = (through(model, data()) + through(model, 2 * data())).square().sum()
        loss.backward()
        return loss

    def retained(model: Any) -> Tensor:
        loss = through(model, data()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    compare(statistics, retained)
    compare(lambda block, x: torch.tanh(block.norm(block.linear(x))), twice_then_backward)


def test_the_real_buffers_are_left_alone() -> None:
    """Identity, versions, and a graph outside that saved one."""
    _, ours = pair(lambda block, x: torch.tanh(block.norm(block.linear(x))), 3)
    model = ours.model
    before = [(name, id(buffer)) for name, buffer in model.named_buffers()]
    weight = torch.ones(WIDTH, requires_grad=True)
    y = through(model, data())
    aside = (weight * model["blocks"][0].norm.running_mean).sum()
    versions = [buffer._version for buffer in model.buffers()]
    (y.square().sum()).backward()
    assert [(name, id(buffer)) for name, buffer in model.named_buffers()] == before
    assert [buffer._version for buffer in model.buffers()] == versions
    aside.backward()
    assert torch.equal(weight.grad, model["blocks"][0].norm.running_mean)  # pyright: ignore


ALIAS: dict[nn.Module, Tensor] = {}


def test_a_buffer_under_another_name_is_refused() -> None:
    def run(block: Any, x: Tensor) -> Tensor:
        ALIAS.setdefault(block, block.state[:8]).mul_(0.5)
        return torch.tanh(block.linear(x) * block.state.clone())

    _, ours = pair(run, 3)
    with pytest.raises(Refused, match="'state' through another name"):
        once(ours.model)


def test_a_large_buffer_is_copied_only_until_it_is_known() -> None:
    def change(block: Any, x: Tensor) -> Tensor:
        block.norm.running_mean = torch.zeros(WIDTH)  # replaced: moves once, as its copy does
        big(block).add_(1)
        return torch.tanh(block.linear(x) * big(block)[:WIDTH])

    def big(block: Any) -> Tensor:
        if "big" not in dict(block.named_buffers()):
            block.register_buffer("big", torch.ones(300_000))
        return block.big

    late_in_all(change)


def test_the_mode_is_that_of_the_forward() -> None:
    def loop(model: Any) -> Tensor:
        loss = through(model, data()).square().sum()
        model.eval()
        loss.backward()
        assert not any(m.training for m in model.modules())
        model.train()
        return loss

    compare(lambda block, x: F.dropout(block.norm(block.linear(x)), 0.5, block.training).tanh(), loop)


def test_keywords_dicts_and_their_names() -> None:
    """``debug`` and ``context_fn`` are also names of torch.utils.checkpoint's own arguments."""

    def run(block: Any, x: Tensor, *, debug: Tensor, context_fn: float, more: dict[str, Tensor]) -> dict[str, Any]:
        return {"y": torch.tanh(block.linear(x) * debug * more["scale"]) + context_fn, "flag": 3}

    def loop(model: Any) -> Tensor:
        x = data()
        for block in model["blocks"]:
            out = block(x=x, debug=x.exp(), context_fn=0.5, more={"scale": x + 2})
            assert out["flag"] == 3
            x = out["y"]
        x.square().sum().backward()
        return x.sum()

    compare(run, loop)
    compare(run, loop, "recompute and spill")


def test_a_weight_of_another_unit_as_argument() -> None:
    def loop(model: Any) -> Tensor:
        first, second = model["blocks"]
        loss = second(first(data()), weight=first.linear.weight).square().sum()
        loss.backward()
        return loss

    def run(block: Any, x: Tensor, weight: Tensor | None = None) -> Tensor:
        y = torch.tanh(block.linear(x))
        return y if weight is None else torch.tanh(F.linear(y, weight))

    plain, ours = pair(run, 0)
    assert walks.differences(outcome(ours, loop), outcome(plain, loop)) == []


def test_autocast() -> None:
    def loop(model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = through(model, data())
        y.float().square().sum().backward()
        return y

    compare(lambda block, x: torch.tanh(block.linear(F.dropout(x, 0.3))), loop)


CALLS: list[bool] = []


def test_nothing_is_recomputed_without_gradients() -> None:
    calls = CALLS
    calls.clear()

    def run(block: Any, x: Tensor) -> Tensor:
        CALLS.append(torch.is_grad_enabled())
        return torch.tanh(block.linear(x))

    _, ours = pair(run, 3)
    with torch.no_grad():
        through(ours.model, data())
    with torch.inference_mode():
        through(ours.model, data())
    assert calls == [False] * 4
    once(ours.model)
    assert calls[4:] == [True] * 4
    once(ours.model)
    ours.policy.recompute.remove()
    assert "forward" not in vars(ours.model["blocks"][0])
    once(ours.model)
    assert calls[12:] == [True] * 2


def test_a_module_that_changes_its_parameters_is_kept() -> None:
    def run(block: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            block.linear.weight.clamp_(-0.1, 0.1)
        return torch.tanh(block.linear(x))

    compare(run, once)


@pytest.mark.parametrize("stage", [0, 3])
def test_replaced_parameters_are_noticed(stage: int) -> None:
    """A bias is in no saved tensor, so plain torch would not mind; recomputing with the new one would be wrong."""
    _, ours = pair(lambda block, x: torch.tanh(x + block.linear.bias), stage)
    old = through(ours.model, data()).sum()
    once(ours.model)
    ours.optimizer.step()
    with pytest.raises(StaleGraph):
        old.backward()
    once(ours.model)
    old = through(ours.model, data()).sum()
    with lowtide.gathered(ours.model, write=True):
        ours.model["blocks"][1].linear.bias.data.add_(1)  # no version moves
    with pytest.raises(StaleGraph):
        old.backward()


def test_changes_in_place_of_what_is_kept_raise() -> None:
    """With hooks of ours open, torch itself does not look."""
    for policy in ("keep", "spill"):
        _, ours = pair(lambda block, x: torch.sigmoid(block.linear(x)), 3, policy)
        y = ours.model["blocks"][0](data())
        y.mul_(2)
        with pytest.raises(ChangedInPlace, match="modified by an inplace operation"):
            y.sum().backward()


def test_an_error_in_the_recomputation_leaves_all_as_it_was() -> None:
    fail: list[bool] = []

    def run(block: Any, x: Tensor) -> Tensor:
        y = block.norm(block.linear(x))
        if fail:
            raise KeyError("again")
        return torch.tanh(y).exp()

    plain, ours = pair(run, 3)
    model = ours.model
    expected = outcome(plain, once)
    loss = through(model, data()).sum()
    buffers = {n: (id(b), b.clone()) for n, b in model.named_buffers()}
    fail.append(True)
    with pytest.raises(KeyError):
        loss.backward()
    assert all(id(b) == buffers[n][0] and torch.equal(b, buffers[n][1]) for n, b in model.named_buffers())
    fail.clear()
    del loss
    assert engine_of(model).residency.pinned() is None
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
    assert walks.differences(outcome(ours, once), expected) == []
    assert left_behind(ours) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_compiled_blocks_stay_compiled() -> None:
    results: list[dict[str, Tensor | None]] = []
    for sharded in (False, True):
        torch.compiler.reset()
        model = build(lambda block, x: torch.tanh(block.linear(x)))
        for block in model["blocks"]:
            block.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        system = under("recompute and spill", model, optimizer, stage=3) if sharded else Plain(model, optimizer)
        torch._dynamo.utils.counters.clear()
        results.append(outcome(system, once))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert walks.differences(*results) == []


# -- what is saved ----------------------------------------------------------------------------------------------------


def saved_bytes(policy: str) -> tuple[dict[str, int], Any]:
    torch.manual_seed(0)
    model = Stack([Block() for _ in range(3)])
    system: Any = under(policy, model, torch.optim.SGD(model.parameters()), stage=3)
    x = torch.randn(64, 24)
    model(x).square().sum().backward()  # the first call of a module also finds out what it changes
    system.policy.saved.saved_bytes.clear()
    loss = model(x).square().sum()
    return {unit.name if unit else "": n for unit, n in system.policy.saved.saved_bytes.items()}, (system, loss)


def test_recomputing_saves_the_input_only() -> None:
    row = 64 * 4
    kept, _ = saved_bytes("keep")
    # the norm's input, mean and rstd, its output, the product, the result of gelu
    assert kept["blocks.1"] == row * (24 + 1 + 1 + 24 + 48 + 48)
    recomputed, (system, loss) = saved_bytes("recompute")
    assert recomputed["blocks.1"] == row * 24
    assert sum(recomputed.values()) < sum(kept.values()) / 3
    loss.backward(retain_graph=True)
    again = {unit.name: n for unit, n in system.policy.saved.saved_bytes.items() if unit}
    assert again["blocks.1"] == recomputed["blocks.1"] + kept["blocks.1"], "in memory for a moment"
    engine = engine_of(system.model)
    assert all(system.policy.saved.live_recipes(unit) > 0 for unit in engine.units)
    del loss
    assert not any(system.policy.saved.live_recipes(unit) for unit in engine.units)


@pytest.mark.parametrize("policy", ["keep", *POLICIES])
def test_a_graph_that_is_never_walked_leaves_nothing(policy: str) -> None:
    model = Stack([nn.Sequential(Block(), nn.Tanh()) for _ in range(4)])  # tanh saves its own result
    system: Any = under(policy, model, torch.optim.SGD(model.parameters()), stage=3)
    loss = model(torch.randn(3, 24)).sum()
    assert left_behind(system)
    del loss
    assert left_behind(system) == []


def test_spilled_bytes_are_counted_alike() -> None:
    assert saved_bytes("spill")[0] == saved_bytes("keep")[0]
    counted, (system, _) = saved_bytes("recompute and spill")
    assert counted == saved_bytes("recompute")[0]
    assert system.policy.spill.spilled_bytes_live == sum(counted.values())


def test_parameters_are_never_spilled() -> None:
    for stage in (0, 3):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        system: Any = under("spill", model, torch.optim.SGD(model.parameters()), stage=stage)
        loss = model(torch.randn(2, 64)).sum()
        with contextlib.suppress(AttributeError):
            assert system.policy.spill.spilled_bytes_live == 3 * 2 * 64 * 4
        loss.backward()


def test_a_slow_store() -> None:
    torch.manual_seed(0)
    results: list[dict[str, Tensor | None]] = []
    for slow in (0.0, 0.004):
        model = Stack([Block() for _ in range(3)])
        for p in model.parameters():
            nn.init.constant_(p, 0.01)
        system = Sharded(model, torch.optim.SGD(model.parameters()), stage=3, comm=lowtide.Comm(bucket_bytes=0))
        policy = Policy(model, "spill", slow=slow)
        for number in range(2):
            model(torch.full((3, 24), float(number))).square().sum().backward()
        results.append({n: whole_grad(p) for n, p in system.model.named_parameters()})
        assert policy.spill is not None
        assert policy.spill.spilled_bytes_live == 0
    assert walks.differences(*results) == []
