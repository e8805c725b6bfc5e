"""What a row of stores on a side stream says of its times."""

import pytest

from bench.serving.side_stream import AGAIN, NOT_EARLY, SIDE, WAITS, WAYS, speeds


def times(faster: dict[str, float]) -> dict[str, list[float]]:
    """Three rounds, each slower than the one before; ``faster``: than in line, by contestant."""
    return {name: [us / faster.get(name, 1.0) for us in (5000.0, 6000.0, 7000.0)] for name in WAYS}


def test_ratios_are_taken_within_a_round_and_told_for_each_capture() -> None:
    row = speeds([times({SIDE: 1.01}), times({SIDE: 1.03}), times({SIDE: 1.02})])
    assert row["value"] == pytest.approx(1.02)
    assert row["by_capture"] == pytest.approx([1.01, 1.03, 1.02])
    assert row["interval"] == pytest.approx([1.01, 1.03])
    assert (row["step_us"], row["rounds"]) == (6000.0, 9)


def test_the_streams_own_part_is_told_apart_from_when_attention_starts() -> None:
    row = speeds([times({SIDE: 1.02, WAITS: 1.02, NOT_EARLY: 1.01})])
    assert row["side_stream_against"][WAITS]["value"] == pytest.approx(1.0)
    assert row["side_stream_against"][NOT_EARLY]["value"] == pytest.approx(1.02 / 1.01)
    assert row["others"][AGAIN]["value"] == pytest.approx(1.0)
    assert row["others"][WAITS]["value"] == pytest.approx(1.02)
