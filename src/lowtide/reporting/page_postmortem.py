"""The section of a page about a run that ran out of memory: it stands on top. No torch here."""

from __future__ import annotations

from lowtide.planning.picture_drawing import safe
from lowtide.planning.text import size_text
from lowtide.reporting.postmortem import PostMortem
from lowtide.reporting.tables import Cell, Table, table_html


def postmortem_html(post: PostMortem) -> str:
    """What happened, what was planned, what was there, what grew, what would help."""
    parts = [f"<h2>Why it ended</h2><p class='cause'>{safe(post.sentence)}</p>"]
    if post.is_about_memory:
        if post.changes:
            first, *others = post.changes
            parts.append(f"<p><b>The smallest change that fits:</b> {safe(first)}.</p>")
            if others:
                parts.append(f"<p>Or:</p><ul>{''.join(f'<li>{safe(change)}</li>' for change in others)}</ul>")
        parts.append(_limits(post))
        if post.there:
            parts.append(table_html(_kinds(post)))
    return f'<section id="post-mortem" class="post-mortem" role="alert">{"".join(parts)}</section>'


def _limits(post: PostMortem) -> str:
    facts = [("rank", str(post.rank)), ("last sample in step", str(post.step))]
    facts += [
        (name, size_text(size))
        for name, size in (
            ("the number it was given", post.budget_bytes),
            ("limit of its control group", post.limit_bytes),
            ("planned peak", post.planned_bytes),
            ("used in the last sample", sum(post.there.values()) or None),
        )
        if size is not None
    ]
    return f'<dl class="tiles">{"".join(f"<div><dt>{safe(n)}</dt><dd>{safe(v)}</dd></div>" for n, v in facts)}</dl>'


def _kinds(post: PostMortem) -> Table:
    grew = {growth.kind: growth for growth in post.grew}
    rows: list[list[Cell]] = []
    for kind, size in sorted(post.there.items(), key=lambda item: -item[1]):
        growth = grew.get(kind)
        before = growth.before_bytes if growth is not None else size
        more = Cell(f"+ {size_text(growth.more_bytes)}", float(growth.more_bytes)) if growth is not None else Cell("–", 0.0)
        rows.append([Cell(kind), _size(post.planned.get(kind)), _size(before), _size(size), more])
    head = ("kind", "planned", f"in step {post.since_step}", f"in step {post.step}", "grew")
    return Table(key="post-mortem-kinds", caption="What was there", head=head, rows=rows, numbers=4)


def _size(nbytes: int | None) -> Cell:
    return Cell("–") if nbytes is None else Cell(size_text(nbytes), float(nbytes))
