"""What a run's writes mean for an SSD: they wear it out, reads do not. No torch here."""

from __future__ import annotations

from lowtide.planning.text import percent_text, size_text
from lowtide.reporting.summary import Summary

RATED_BYTES = 600e12
"""An assumption, and named as such: 600 TB written is what usual drives of 1 TB are rated for."""
_DAY = 86400.0


def wear_text(summary: Summary) -> str:
    """For the host whose ranks wrote most; empty if nothing was written."""
    by_host: dict[str, int] = {}
    for rank in summary.ranks:
        by_host[rank.run.host] = by_host.get(rank.run.host, 0) + rank.total_written_bytes
    written = max(by_host.values(), default=0)
    if not written:
        return ""
    where = f" on {max(by_host, key=lambda host: by_host[host])}" if len(by_host) > 1 else ""
    share = percent_text(written, RATED_BYTES)
    pace = ""
    if summary.seconds > 0:
        pace = (
            f" At the pace of this run it would be used up after {_long(RATED_BYTES / written * summary.seconds)} of training."
        )
    read = f"{size_text(summary.total_read_bytes)} were read, which wears out nothing."
    return (
        f"{size_text(written)} were written to disk in all{where}: {share} of what a drive rated for 600 TB written "
        f"(an assumption: usual for 1 TB; look up yours) is made for.{pace} {read}"
    )


def _long(seconds: float) -> str:
    days = seconds / _DAY
    if days >= 730:
        return f"{days / 365:.0f} years"
    if days >= 60:
        return f"{days / 30.4:.0f} months"
    return f"{days:.0f} days" if days >= 2 else f"{seconds / 3600:.0f} hours"
