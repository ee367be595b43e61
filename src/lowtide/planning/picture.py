"""Pictures of a plan: bars of every tier against its capacity, and one step as rows of what works when."""

from __future__ import annotations

from lowtide.planning.picture_drawing import COLOURS, MARGIN, OTHER_COLOUR, WIDTH, Drawing, text_width, ticks
from lowtide.planning.picture_frontier import frontier_svg
from lowtide.planning.plan import PhasePlan, Plan, TierPlan
from lowtide.planning.text import head_facts, in_order, percent_text, placement_text, seconds_text, shortened, size_text

_BAR_HEIGHT = 24
_ROW_HEIGHT = 26
_LABELS = 84
"""Room for the names of rows at the left of the timeline."""
_ZOOM_BELOW = 0.1
"""A tier that is less full than this is drawn larger than true, and that is said."""


def plan_svg(plan: Plan) -> str:
    """One picture, complete in itself."""
    drawing = Drawing(f"Plan for {plan.model}")
    drawing.y += 12
    drawing.text(MARGIN, drawing.y, shortened(plan.model, 70), size=19)
    drawing.wrapped(" · ".join(head_facts(plan)))
    drawing.wrapped(f"on {shortened(plan.hardware, 100)}")
    drawing.wrapped(placement_text(plan))
    drawing.y += 14
    for tier in plan.tiers:
        _draw_tier(drawing, tier)
    if any(sum(t.parts.values()) > t.peak_bytes for t in plan.tiers):
        drawing.wrapped("Each kind is drawn at its own fullest; they are not all there at once. The mark is the peak.", size=12)
    drawing.y += 16
    _draw_step(drawing, plan)
    return drawing.svg()


def plan_html(plan: Plan) -> str:
    """A page, complete in itself: the picture, and the same numbers as tables."""
    from lowtide.planning.picture_page import plan_page

    return plan_page(plan, plan_svg(plan))


# -- tiers -------------------------------------------------------------------------------------------------------------


def _draw_tier(drawing: Drawing, tier: TierPlan) -> None:
    used = max(tier.peak_bytes, sum(tier.parts.values()))
    zoomed = used < _ZOOM_BELOW * tier.capacity_bytes
    end = max(2 * used, 1) if zoomed else max(tier.capacity_bytes, used, 1)
    scale = (WIDTH - 2 * MARGIN) / end
    drawing.y += 22
    title = f"{tier.tier}: {size_text(tier.peak_bytes)} of {size_text(tier.capacity_bytes)}"
    drawing.text(MARGIN, drawing.y, title, size=14)
    share = percent_text(tier.peak_bytes, tier.capacity_bytes)
    right = f"{share}, drawn larger than it is" if zoomed else share
    drawing.text(WIDTH - MARGIN, drawing.y, right, look="lt-dim", anchor="end")
    top = drawing.y + 8
    drawing.rect(MARGIN, top, (end if zoomed else tier.capacity_bytes) * scale, _BAR_HEIGHT, look="lt-track")
    x: float = MARGIN
    for name, size in in_order(tier.parts).items():
        tip = f"{name} {size_text(size)}"
        drawing.rect(x, top, size * scale, _BAR_HEIGHT, colour=COLOURS.get(name, OTHER_COLOUR), tip=tip)
        x += size * scale
    peak = MARGIN + tier.peak_bytes * scale
    drawing.line(peak, top - 4, peak, top + _BAR_HEIGHT + 4, "lt-mark")
    drawing.y = top + _BAR_HEIGHT + 4
    drawing.legend(
        [(COLOURS.get(n, OTHER_COLOUR), f"{n} {size_text(s)}") for n, s in in_order(tier.parts).items()], left=MARGIN
    )
    drawing.y += 10


# -- one step ----------------------------------------------------------------------------------------------------------


def _draw_step(drawing: Drawing, plan: Plan) -> None:
    drawing.y += 16
    total = sum(phase.seconds for phase in plan.phases)
    if not plan.batch or total <= 0:
        drawing.text(MARGIN, drawing.y, "one step: not known", size=14)
        drawing.wrapped("Without a batch only bytes are planned.")
        return
    drawing.text(MARGIN, drawing.y, f"one step: {seconds_text(total)}, most of it waiting for {plan.limited_by}", size=14)
    names = [name for name in ("compute", "disk", "link", "network") if any(p.loads.get(name) for p in plan.phases)]
    left, scale = MARGIN + _LABELS, (WIDTH - 2 * MARGIN - _LABELS) / total
    top = drawing.y + 28
    bottom = top + _ROW_HEIGHT * len(names)
    for row, name in enumerate(names):
        drawing.text(MARGIN, top + row * _ROW_HEIGHT + 17, name, look="lt-dim")
    start = 0.0
    for phase in plan.phases:
        _draw_phase(drawing, phase, names, x=left + start * scale, top=top, scale=scale)
        drawing.line(left + start * scale, top - 18, left + start * scale, bottom)
        start += phase.seconds
    drawing.line(left + total * scale, top - 18, left + total * scale, bottom)
    drawing.line(left, bottom, left + total * scale, bottom)
    for tick in ticks(total):
        drawing.text(left + tick * scale, bottom + 16, f"{tick:.4g}", size=11, look="lt-dim", anchor="middle")
    drawing.text(MARGIN, bottom + 16, "seconds", size=11, look="lt-dim")
    drawing.y = bottom + 22
    drawing.legend([(COLOURS.get(p.limited_by, OTHER_COLOUR), _phase_words(p)) for p in plan.phases], left=MARGIN)


def _draw_phase(drawing: Drawing, phase: PhasePlan, names: list[str], *, x: float, top: float, scale: float) -> None:
    if text_width(phase.phase, 12) + 8 < phase.seconds * scale:
        drawing.text(x + 5, top - 6, phase.phase, size=12)
    for row, name in enumerate(names):
        seconds = phase.loads.get(name, 0.0)
        if seconds > 0:
            words = seconds_text(seconds)
            y = top + row * _ROW_HEIGHT
            tip = f"{phase.phase}: {name} {words}"
            drawing.rect(x, y + 3, seconds * scale, _ROW_HEIGHT - 6, colour=COLOURS.get(name, OTHER_COLOUR), tip=tip)
            inside = text_width(words, 11) + 8 < seconds * scale
            beside = text_width(words, 11) + 8 < (phase.seconds - seconds) * scale
            if inside:
                drawing.text(x + 5, y + 17, words, size=11, look="lt-on-colour")
            elif beside:
                drawing.text(x + seconds * scale + 5, y + 17, words, size=11, look="lt-dim")


def _phase_words(phase: PhasePlan) -> str:
    return f"{phase.phase} {seconds_text(phase.seconds)}, waits for {phase.limited_by}"


__all__ = ["frontier_svg", "plan_html", "plan_svg"]
