"""The model menagerie: small, awkward models for parity tests, as one table.

``MENAGERIE[name]`` has ``build(seed)``, ``batch(step, rank)`` and ``loss(model, batch)``; see specimen.py.
``REFUSED`` holds models that lowtide may refuse. Models that need other packages are in models_hf.py.
"""

from __future__ import annotations

from tests.kit import models_layers as models_layers
from tests.kit import models_structure as models_structure
from tests.kit.specimen import MENAGERIE, REFUSED, Batch, Block, Specimen, Stack

__all__ = ["MENAGERIE", "REFUSED", "Batch", "Block", "Specimen", "Stack"]
