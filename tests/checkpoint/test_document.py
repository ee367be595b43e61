"""The reader in docs/checkpoints.md, which knows nothing but that page, finds every number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.checkpoint import manifest
from tests.checkpoint.exchange import ON_DISK, saved
from tests.kit.checkpoints import Setup

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()


def reader() -> Any:
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def read(" in block]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/checkpoints.md", "exec"), names)
    return names["read"]


@pytest.mark.parametrize("setup", [Setup(), ON_DISK, Setup(ranks=2, stage=3, disk=True, resident="kinds")], ids=str)
@pytest.mark.parametrize("specimen", ["gpt", "convolutions", "frozen_block"])
def test_the_page_is_enough_to_read_a_checkpoint(tmp_path: Path, specimen: str, setup: Setup) -> None:
    checkpoint, expected = saved(tmp_path, specimen, setup)
    found = reader()(checkpoint)
    assert found
    for name, array in found.items():
        assert torch.equal(torch.from_numpy(array.copy()), expected[name]), name
    assert {n for n, t in expected.items() if n not in found} <= {n for n in expected if "running_" in n or "num_batches" in n}
    assert reader()(checkpoint, "optimizer.exp_avg")


def test_the_page_has_all_dtypes_keys_and_limits() -> None:
    (line,) = re.findall(r"^dtypes: (.*)\.$", PAGE, re.MULTILINE)
    assert set(line.strip("`").split()) == set(manifest.DTYPES)
    for model in (manifest.Manifest, manifest.Table, manifest.File):
        assert [key for key in model.model_fields if f"`{key}`" not in PAGE and f'"{key}"' not in PAGE] == []
    limits = {"manifest": manifest.MANIFEST_LIMIT, "table": manifest.TABLE_LIMIT, "block": manifest.BLOCK_LIMIT}
    for what, nbytes in limits.items():
        size = f"{nbytes >> 30} GiB" if nbytes >= 1 << 30 else f"{nbytes >> 20} MiB"
        assert f"| {what} | {size} |" in PAGE
    assert f"Version {manifest.VERSION}." in PAGE
