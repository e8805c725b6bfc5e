"""How many calls a measurement takes, and what is told about them."""

from hypothesis import given
from hypothesis import strategies as st

from bench.timing import COLD_BYTES, graph_calls, num_rotations, summarise


def test_median_and_percentiles_of_the_rounds():
    sample = summarise([5.0, 1.0, 3.0, 2.0, 4.0, 100.0])
    assert sample.rounds == 6
    assert (sample.p20, sample.median, sample.p80) == (2.0, 3.5, 5.0)


def test_enough_bytes_pass_before_anything_is_read_again():
    size = 16_777_216
    assert num_rotations(size, 1 << 34) * size >= COLD_BYTES


def test_one_set_is_enough_for_what_no_cache_can_hold():
    assert num_rotations(2 * COLD_BYTES, 1 << 34) == 1


@given(size=st.integers(1, 1 << 34), arena=st.integers(1, 1 << 34))
def test_rotations_fit_into_the_arena(size, arena):
    rotations = num_rotations(size, arena)
    assert rotations >= 1
    assert rotations == 1 or rotations * size <= arena


@given(
    rotations=st.integers(1, 600),
    call_us=st.floats(0.0, 1e5),
    graph_us=st.floats(1.0, 1e5),
)
def test_every_set_is_used_equally_often(rotations, call_us, graph_us):
    calls = graph_calls(rotations, call_us, graph_us)
    assert calls >= 1
    assert calls % rotations == 0
