"""What is done where a forward pass ends and where a step ends: whoever watches, measures or adapts is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lowtide.runtime.engine import Engine


def after_forward(engine: Engine) -> None:
    """The outermost forward pass is over."""
    engine.group.watch.phase = "after forward"
    if not engine.optimizers:  # there will be no step after which ranks are known to be in good order
        engine.group.deadlines.settled()
    engine.budget.look("end of forward" if torch.is_grad_enabled() else None)


def after_step(engine: Engine) -> None:
    """All ranks have updated: learn from the step, and change what should be otherwise in the next."""
    engine.steps_taken += 1
    engine.group.watch.phase = "between steps"
    engine.group.deadlines.settled()
    engine.trace("update", "")
    stood_still = engine.placer.clock.stood_still
    engine.placer.after_step(engine.activations.saved, engine.shelves, put_off=engine.due.under_way)
    changed = engine.crossing.after_step(engine.placer.step_seconds, stood_still)
    if changed is not None and engine.recorder is not None:
        engine.recorder.mark("replan", changed)
