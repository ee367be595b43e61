"""The chunks of a shard, on layouts small enough to be worked out by hand. The rules for all layouts are in tests/property."""

from __future__ import annotations

from lowtide.config import Partition
from lowtide.spec.chunks import Chunk, Part, cut_into_chunks, pack
from lowtide.spec.layout import ALIGNMENT, ParamShape, UnitLayout, lay_out

PAGE = ALIGNMENT


def floats(*shape: int, itemsize: int = 4) -> ParamShape:
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * shape[dim + 1]
    return ParamShape(shape, tuple(stride), itemsize)


def layout_of(*params: ParamShape, ranks: int = 1) -> UnitLayout:
    return lay_out(params, Partition(), ranks, align=ALIGNMENT)


def chunks_of(layout: UnitLayout, rank: int = 0, *, pages: int = 1, whole: bool = False) -> tuple[Chunk, ...]:
    covers = layout.cuts[rank], layout.cuts[rank + 1]
    return cut_into_chunks(layout, covers, chunk_bytes=pages * PAGE, whole=whole)


def test_a_small_shard_is_one_chunk() -> None:
    layout = layout_of(floats(3, 5))
    assert chunks_of(layout, pages=100) == (Chunk(0, PAGE, (Part(0, 0, 15, 0),)),)


def test_a_large_parameter_is_cut() -> None:
    layout = layout_of(floats(2500))  # two pages and a bit
    assert chunks_of(layout) == (
        Chunk(0, PAGE, (Part(0, 0, 1024, 0),)),
        Chunk(PAGE, 2 * PAGE, (Part(0, 1024, 2048, 0),)),
        Chunk(2 * PAGE, 3 * PAGE, (Part(0, 2048, 2500, 0),)),
    )


def test_several_parameters_share_a_chunk() -> None:
    layout = layout_of(floats(10), floats(1025), floats(7))
    assert chunks_of(layout, pages=2) == (
        Chunk(0, 2 * PAGE, (Part(0, 0, 10, 0), Part(1, 0, 1024, PAGE))),
        Chunk(2 * PAGE, 4 * PAGE, (Part(1, 1024, 1025, 0), Part(2, 0, 7, PAGE))),
    )


def test_offsets_count_from_the_shard_s_own_start() -> None:
    layout = layout_of(floats(3 * 1024), ranks=2)
    assert layout.cuts == (0, 2 * PAGE, 4 * PAGE)
    assert chunks_of(layout, 1, pages=8) == (Chunk(0, 2 * PAGE, (Part(0, 2048, 3072, 0),)),)


def test_whole_parameters_are_not_cut() -> None:
    layout = layout_of(floats(5000), floats(10), floats(3000))
    assert [(c.lo // PAGE, c.hi // PAGE) for c in chunks_of(layout, whole=True)] == [(0, 5), (5, 6), (6, 9)]
    assert [(c.lo // PAGE, c.hi // PAGE) for c in chunks_of(layout, pages=6, whole=True)] == [(0, 6), (6, 9)]


def test_parameters_without_elements_are_in_one_chunk() -> None:
    layout = layout_of(floats(0), floats(2048), floats(0, 7))
    found = [(number, part.index) for number, c in enumerate(chunks_of(layout)) for part in c.parts if not part.numel]
    assert sorted(index for _, index in found) == [0, 2]


def test_a_unit_without_elements_is_one_empty_chunk() -> None:
    layout = layout_of(floats(0))
    assert [(c.lo, c.hi, [p.index for p in c.parts]) for c in chunks_of(layout)] == [(0, 0, [0])]


def test_a_shard_without_bytes_has_one_empty_chunk() -> None:
    layout = lay_out([floats(10)], Partition("element", (0, 1)), 2, align=ALIGNMENT)
    assert chunks_of(layout, 0) == (Chunk(0, 0, ()),)


def test_packing_leaves_out_the_gaps() -> None:
    """Parameters start on pages of their own; their states lie side by side, 64 elements apart."""
    chunks = chunks_of(layout_of(floats(10), floats(65), floats(7)), pages=8)
    assert pack(chunks, [4, 4, 4]).offsets == ((0, 256, 768),)
    assert pack(chunks, [4, 4, 4]).cuts == (0, PAGE)
    assert pack(chunks, [2, 8, 4]).offsets == ((0, 128, 1152),)


def test_packing_has_one_entry_per_chunk() -> None:
    chunks = chunks_of(layout_of(floats(2500)))
    assert pack(chunks, [8]).cuts == (0, 2 * PAGE, 4 * PAGE, 5 * PAGE)
    assert pack(chunks, [8]).offsets == ((0,), (0,), (0,))
