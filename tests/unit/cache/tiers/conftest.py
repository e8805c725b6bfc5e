"""Rigs that are closed, and whose accounts are checked, at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.tier_rig import (
    Rig,
)


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield make
    for one in made:
        one.tiers.close()
        assert one.tiers.check_integrity()
