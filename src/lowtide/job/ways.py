"""The planner's answer to a run that ran out of memory: the cheapest changes after which the same job fits.

Only for runs of `lowtide train`, whose folder says what was asked for; of others nothing but samples is known.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from lowtide.errors import DoesNotFit
from lowtide.planning.text import size_text
from lowtide.reporting.findings import Findings

_log = logging.getLogger("lowtide")


def ways_out_of(found: Findings) -> list[str]:
    """At most three changes other than a memory number, the cheapest first; none if the job cannot be planned again."""
    post = found.post_mortem
    end = None if post is None else post.budget_bytes if post.cause == "refused" else post.limit_bytes or post.budget_bytes
    if post is None or end is None or "steps" not in found.extras.config:
        return []
    # what was there beyond the plan is there whatever is planned: it is taken off before planning again
    beyond = max(0, sum(post.there.values()) - post.planned_bytes) if post.planned_bytes is not None else 0
    sharing = found.run.first.last.run.local_ranks if end == post.budget_bytes else 1
    try:
        return _plan_again(found.extras.config, memory=max(2**20, (end - max(beyond, post.short_bytes)) * sharing))
    except Exception as error:  # it builds the caller's model, and may meet the folder of another version
        _log.debug("the job cannot be planned again: %r", error)
        return []


def _plan_again(config: dict[str, Any], *, memory: int) -> list[str]:
    import torch

    from lowtide.job.models import build_model
    from lowtide.job.options import Options
    from lowtide.job.planned import spec_of
    from lowtide.planning.planner import make_plan
    from lowtide.planning.question import find_machine, make_request
    from lowtide.planning.request import Request
    from lowtide.planning.ways_out import ways_out

    known = {field.name for field in dataclasses.fields(Options)} - {"data", "resume", "run", "save_every", "restarts"}
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in config.items() if name in known}
    options = Options(**given)
    with torch.device("meta"):
        built = build_model(options)
    model = spec_of(built, options.model_name, options.batch_size)
    machine = find_machine("this", next(iter(options.disk_folders), None))
    asked = Request(stage=options.stage, update=options.update_when, world_size=options.ranks, memory_bytes=memory)
    request = make_request(machine, asked, options.activations)
    try:
        make_plan(model, machine.hardware, request)
    except DoesNotFit:
        ways = ways_out(model, machine.hardware, request)
        # how much memory would be enough is better known from the run than from a plan that was wrong about it
        other = [way for way in ways if not way.change.startswith("memory=")]
        return [f"{way.change} (planned peak {size_text(way.plan.predicted_peak_bytes)})" for way in other]
    return []
