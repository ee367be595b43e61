"""The planner: of all ways to run a step that fit, the fastest. Pure: the same question has the same answer.

Ways differ in what the programme cannot choose by itself: the stage, and whether units stay where compute reads them
(``plain``) or come and go through slots, how many of those there are and how large the chunks of the update. Each is one
programme.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lowtide.errors import ArgumentError, DoesNotFit
from lowtide.planning.estimate import PROCESS_BYTES, Share, Working, needs_of, outside_loads, rates_of, with_part, working_of
from lowtide.planning.formulas import KindBytes, from_precision, unit_from_facts
from lowtide.planning.options import Kind, Option, Phase, Resource, Tier, UnitNeeds, Way
from lowtide.planning.placement import slack_of
from lowtide.planning.plan import PhasePlan, Plan, TierPlan, UnitPlan
from lowtide.planning.programme import Infeasible, Problem, Solution, solve
from lowtide.planning.request import Request
from lowtide.spec.hardware import Disk, Hardware
from lowtide.spec.model import ModelSpec
from lowtide.stages import STAGES, Stage

_CHUNKS = (8 << 20, 2 << 20)
_SLOTS = (3, 2)
_OVERFULL = 1 << 50
_KEPT_BY_ALLOCATOR = 0.39
"""Of what a step takes and frees again, with the allocator of glibc: 0.24–0.5 in runs of gpt-98m on one and two ranks, from
which it was taken: only other models say how good it is."""
_POLICIES = ("keep", "recompute", "host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run a step, and the programme that says what lives where in it."""

    stage: Stage
    slots: int
    """0: nothing comes and goes."""
    chunk_bytes: int
    share: Share
    kinds: KindBytes
    working: Working
    problem: Problem
    capacity: dict[Tier, int]

    @property
    def near(self) -> Tier:
        return Tier.DEVICE if self.share.separate else Tier.HOST


def make_plan(model: ModelSpec, hardware: Hardware, request: Request) -> Plan:
    """The best plan; :class:`~lowtide.errors.DoesNotFit` if there is none."""
    if request.rank_memory_bytes:
        from lowtide.planning.unequal import plan_unequal  # it is made of plans for single ranks

        return plan_unequal(model, hardware, request)
    best: tuple[tuple[float, ...], Candidate, Solution] | None = None
    short: list[tuple[Candidate, Infeasible]] = []
    for candidate in candidates(model, hardware, request):
        try:
            solution = solve(candidate.problem)
        except Infeasible as infeasible:
            short.append((candidate, infeasible))
            continue
        cost = _cost(candidate, solution, request)
        if best is None or cost < best[0]:
            best = cost, candidate, solution
    if best is None:
        raise _does_not_fit(short)
    return _plan(model, hardware, request, best[1], best[2])


def _cost(candidate: Candidate, solution: Solution, request: Request) -> tuple[float, ...]:
    """The fastest; of equals the one that keeps most near, then the simplest."""
    away = sum(o.nbytes for row in solution.chosen for o in row if o.tier is not candidate.near)
    order = (away, solution.seconds) if request.objective == "capacity" else (round(solution.seconds, 6), away)
    return (*order, candidate.stage.number if request.world_size > 1 else 0, candidate.slots, -candidate.chunk_bytes)


def candidates(model: ModelSpec, hardware: Hardware, request: Request) -> Iterator[Candidate]:
    """Every way that may be worth a programme."""
    if not model.units:
        raise ArgumentError(f"model {model.name!r} has no parameters; there is nothing to plan.")
    local = min(request.world_size, request.ranks_per_host or hardware.ranks_per_host or 1)
    share = Share(hardware=hardware, world_size=request.world_size, local_ranks=local)
    disk = _disk(hardware, request)
    kinds = from_precision(request.precision, request.optimizer)
    for stage in _stages(request):
        yield _candidate(model, request, share, stage, kinds, None, slots=0, chunk_bytes=_CHUNKS[0])
        whole = stage.parameters or request.world_size == 1
        if disk is not None or share.separate:
            for slots, chunk_bytes in itertools.product(_SLOTS if whole else (0,), _CHUNKS):
                yield _candidate(model, request, share, stage, kinds, disk, slots=slots, chunk_bytes=chunk_bytes)


def _stages(request: Request) -> list[Stage]:
    if request.stage != "auto":
        if request.stage not in STAGES:
            raise ArgumentError(f"stage is {request.stage!r}; allowed: 0, 1, 2, 3 or 'auto'.")
        return [STAGES[int(request.stage)]]
    return list(STAGES.values()) if request.world_size > 1 else [STAGES[0]]


def _disk(hardware: Hardware, request: Request) -> Disk | None:
    return None if request.disk_bytes == 0 else hardware.disk


def _candidate(
    model: ModelSpec,
    request: Request,
    share: Share,
    stage: Stage,
    kinds: KindBytes,
    disk: Disk | None,
    *,
    slots: int,
    chunk_bytes: int,
) -> Candidate:
    streamed = slots > 0 or disk is not None
    if not slots and stage.parameters and share.world_size > 1 and not share.shares_memory:
        slots = _SLOTS[0]  # to gather units into; ranks that share memory read them where they live
    sizes = [unit_from_facts(u, stage, share.world_size, kinds) for u in model.units]
    # Where there is a disk to go to, the room for gradients is taken once and stays, wherever it is.
    stay = streamed or _disk(share.hardware, request) is not None
    working = working_of(
        sizes,
        model,
        share,
        slots=slots,
        chunk_bytes=chunk_bytes,
        kinds=kinds,
        gradients_pass=stay or request.update == "backward",
    )
    capacity = _capacity(share, request, disk if streamed else None)
    fixed = _fixed_bytes(share, working, capacity, streamed=streamed)
    allowed = _POLICIES if request.activations == "auto" else (request.activations,)
    policies = tuple(p for p in allowed if (p != "disk" or disk is not None) and (p != "host" or share.separate))
    units = needs_of(model, share, stage, kinds)
    if request.part is not None:
        units = tuple(with_part(u, stage, request.part * share.world_size) for u in units)
    problem = Problem(
        units=units,
        rates=rates_of(share, disk),
        way=replace(
            _way(request, share, streamed=streamed),
            slots=slots,
            chunk_bytes=chunk_bytes,
            gradients_stay=stay,
        ),
        room={tier: capacity[tier] - fixed.get(tier, 0) for tier in capacity},
        policies=(policies or ("keep",),) * len(model.units),
        fixed=_stuck(stage, share),
        objective=request.objective,
        outside=outside_loads(model, share),
    )
    return Candidate(
        stage=stage,
        slots=slots,
        chunk_bytes=chunk_bytes,
        share=share,
        kinds=kinds,
        working=working,
        problem=problem,
        capacity=capacity,
    )


def _stuck(stage: Stage, share: Share) -> frozenset[Kind]:
    """Kinds of which every rank has all: they stay where compute reads them."""
    if share.world_size == 1:
        return frozenset()
    kinds = {Kind.PARAMETERS: stage.parameters, Kind.GRADIENTS: stage.gradients, Kind.OPTIMIZER: stage.optimizer}
    return frozenset(kind for kind, sharded in kinds.items() if not sharded)


def _way(request: Request, share: Share, *, streamed: bool) -> Way:
    """When units are updated: in backward, put off into the next forward (one rank, streamed), or between the two."""
    alone = share.world_size == 1
    if request.update == "backward":
        return Way(update_in=Phase.BACKWARD, slots_in_update=alone)
    put_off = streamed and alone and not share.separate and request.accumulate == 1
    return Way(update_in=Phase.FORWARD if put_off else Phase.UPDATE, slots_in_update=put_off)


def _capacity(share: Share, request: Request, disk: Disk | None) -> dict[Tier, int]:
    """What one rank may use of every tier."""
    host = request.memory_bytes if request.memory_bytes is not None else share.hardware.host_bytes
    capacity = {Tier.HOST: host // share.local_ranks}
    own = share.hardware.compute.memory_bytes
    if own is not None:
        capacity = {Tier.DEVICE: request.device_memory_bytes or own, **capacity}
    if disk is not None:
        room = request.disk_bytes if request.disk_bytes is not None else disk.free_bytes
        capacity[Tier.DISK] = room // share.local_ranks
    return capacity


def _fixed_bytes(share: Share, working: Working, capacity: dict[Tier, int], *, streamed: bool) -> dict[Tier, int]:
    """What is taken of every tier whatever the programme chooses."""
    host = PROCESS_BYTES + slack_of(capacity[Tier.HOST])
    if not share.separate:
        return {Tier.HOST: host + working.total}
    on_device = working.slots + working.in_flight + working.transient + slack_of(capacity[Tier.DEVICE])
    return {Tier.DEVICE: on_device, Tier.HOST: host + (working.buffers if streamed else 0)}


def _does_not_fit(short: list[tuple[Candidate, Infeasible]]) -> DoesNotFit:
    candidate, infeasible = min(short, key=lambda pair: sum(pair[1].short.values()) or _OVERFULL)
    tier = max(infeasible.short, key=lambda t: infeasible.short[t], default=candidate.near)
    capacity = candidate.capacity.get(tier, 0)
    missing = infeasible.short.get(tier, 0)
    return DoesNotFit(tier.value, capacity + missing, capacity, "Ask `lowtide plan` for the cheapest ways out")


# -- from a solution to a plan -----------------------------------------------------------------------------------------


def _plan(model: ModelSpec, hardware: Hardware, request: Request, candidate: Candidate, solution: Solution) -> Plan:
    share, problem = candidate.share, candidate.problem
    streamed = any(o.tier is not candidate.near and o.nbytes for row in solution.chosen for o in row)
    tiers = tuple(_tier_plan(tier, candidate, solution) for tier in candidate.capacity)
    needs = problem.units
    states = model.numel * candidate.kinds.parameters
    states += model.trained_numel * (candidate.kinds.gradients + candidate.kinds.optimizer)
    per_rank = sum(u.parameters + u.gradients + u.optimizer for u in needs)
    host = next(t for t in tiers if t.tier == Tier.HOST.value)
    return Plan(
        model=model.name,
        parameters=model.numel,
        batch=model.batch,
        hardware=hardware.name,
        hardware_source=hardware.source,
        world_size=request.world_size,
        hosts=share.hosts,
        stage=candidate.stage.number,
        precision=request.precision,
        update=request.update,
        update_in=problem.way.update_in.value,
        objective=request.objective,
        placement="streamed" if streamed else "plain",
        slots=candidate.slots,
        prefetch=1,
        chunk_bytes=candidate.chunk_bytes,
        shares=None,
        states_bytes=states,
        states_bytes_per_rank=per_rank,
        units=tuple(_unit_plan(u, row, candidate.near) for u, row in zip(needs, solution.chosen, strict=True)),
        tiers=tiers,
        phases=_phases(solution),
        predicted_seconds=solution.seconds if model.batch else 0.0,
        predicted_peak_bytes=_likely_peak(host, candidate, solution) * share.local_ranks,
        traffic_bytes=_traffic(candidate, solution),
    )


def _unit_plan(unit: UnitNeeds, row: tuple[Option, ...], near: Tier) -> UnitPlan:
    names = {o.kind: o.name for o in row}
    where = [names.get(kind, near.value) for kind in (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER)]
    return UnitPlan(
        name=unit.name,
        parameters=where[0],
        gradients=where[1],
        optimizer=where[2],
        activations=names.get(Kind.ACTIVATIONS, "keep"),
    )


def _likely_peak(host: TierPlan, candidate: Candidate, solution: Solution) -> int:
    """What a rank will be seen to use. A plan must hold, so it counts all of the slack; what is really used on top of what is
    counted is memory that was freed and that the allocator keeps. It is made to give that back as soon as the slack is touched,
    so that a run that fills its number ends a little above where the slack begins."""
    slack = slack_of(host.capacity_bytes)
    units = candidate.problem.units if candidate.near is Tier.HOST else ()
    freed = 0 if candidate.problem.way.gradients_stay else sum(u.gradients for u in units)
    for unit, row in zip(units, solution.chosen, strict=False):
        twice = any(o.kind is Kind.ACTIVATIONS and o.name == "recompute" for o in row)  # in forward, and when computed again
        freed += unit.activations * (2 if twice else 1)
    most = max(host.capacity_bytes, host.peak_bytes) - 3 * slack // 4
    return min(host.peak_bytes - slack + int(_KEPT_BY_ALLOCATOR * freed), most)


def _tier_plan(tier: Tier, candidate: Candidate, solution: Solution) -> TierPlan:
    parts = {
        kind.value: sum(o.nbytes for row in solution.chosen for o in row if o.kind is kind and o.tier is tier) for kind in Kind
    }
    fixed = candidate.capacity[tier] - candidate.problem.room[tier]
    if tier is candidate.near:
        again = max((o.again for row in solution.chosen for o in row), default=0)
        parts["activations"] += again
        working = candidate.working
        parts |= {"slots": working.slots, "buffers": working.buffers, "in flight": working.in_flight}
        parts["computing"] = working.transient
        fixed_rest = fixed - working.total if tier is Tier.HOST else fixed - working.total + working.buffers
    else:
        fixed_rest = fixed
    if fixed_rest:
        parts["process and slack"] = fixed_rest
    return TierPlan(
        tier=tier.value,
        capacity_bytes=candidate.capacity[tier],
        peak_bytes=fixed + solution.peaks[tier],
        parts={name: size for name, size in parts.items() if size},
    )


def _phases(solution: Solution) -> tuple[PhasePlan, ...]:
    out: list[PhasePlan] = []
    for phase in Phase:
        loads = {r.value: solution.loads[phase, r] for r in Resource if solution.loads.get((phase, r))}
        if loads:
            out.append(PhasePlan(phase=phase.value, seconds=max(loads.values()), loads=loads))
    return tuple(out)


def _traffic(candidate: Candidate, solution: Solution) -> dict[str, int]:
    """Bytes that pass every resource in one step."""
    way, out = candidate.problem.way, {"disk read": 0, "disk written": 0, "link": 0, "network": 0}
    stage, ranks = candidate.stage, candidate.share.world_size
    for unit in candidate.problem.units if ranks > 1 else ():
        gathered = unit.whole * (2 if stage.parameters else 1 if stage.optimizer else 0)
        reduced = unit.whole if unit.update_seconds else 0
        out["network"] += (gathered + reduced * (1 if stage.gradients else 2)) * (ranks - 1) // ranks
    apart = way.update_in is Phase.UPDATE or not way.slots_in_update
    for unit, row in zip(candidate.problem.units, solution.chosen, strict=True):
        for option in row:
            out["link"] += _linked(option, candidate.share)
            if option.tier is not Tier.DISK:
                continue
            reads, writes = {
                Kind.PARAMETERS: (3 if apart and unit.update_seconds else 2, 1 if unit.update_seconds else 0),
                Kind.GRADIENTS: (1, 1),
                Kind.OPTIMIZER: (1, 1),
                Kind.ACTIVATIONS: (1, 1),
            }[option.kind]
            out["disk read"] += reads * option.nbytes
            out["disk written"] += writes * option.nbytes
    return {name: size for name, size in out.items() if size}


def _linked(option: Option, share: Share) -> int:
    """Bytes that pass between host and device because of one choice."""
    if not share.separate or option.tier is Tier.DEVICE:
        return 0
    return option.nbytes * (1 if option.kind is Kind.GRADIENTS else 2)
