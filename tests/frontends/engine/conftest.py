"""Engines shared by the tests of HySparse in the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.driving import SIZES, running

from bicl.frontends.http.engine import Engine
from bicl.frontends.http.loader import LoadedModel


@pytest.fixture(scope="module")
def dense(tiny: LoadedModel) -> Iterator[Engine]:
    """What sparse answers are compared with, of the same sizes."""
    with running(tiny, **SIZES) as engine:
        yield engine
