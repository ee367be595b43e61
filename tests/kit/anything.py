"""Hypothesis strategies that several tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
"""Any small JSON value."""
