"""Packed token ids and the chained keys of pages."""

import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bicl.cache.keys import Namespace, chain_key, pack_ids, root_key
from bicl.errors import InvalidInputError

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64, max_size=20))
def test_packed_ids_are_little_endian_int64(ids: list[int]) -> None:
    expected = struct.pack(f"<{len(ids)}q", *ids)
    assert pack_ids(ids) == expected
    assert pack_ids(tuple(ids)) == expected
    assert pack_ids(np.array(ids, dtype=np.int64)) == expected
    assert pack_ids(pack_ids(ids)) == expected


@pytest.mark.parametrize("dtype", ["int32", "uint16", ">i8", "uint32"])
def test_integer_arrays_of_any_width_pack_alike(dtype: str) -> None:
    assert pack_ids(np.array([1, 65, 321], dtype=dtype)) == pack_ids([1, 65, 321])


def test_strided_array_packs_its_own_elements() -> None:
    assert pack_ids(np.arange(10)[::3]) == pack_ids([0, 3, 6, 9])


@pytest.mark.parametrize(
    "ids",
    [
        [1.5],
        ["1"],
        [None],
        [2**63],
        [[1]],
        np.zeros(3),
        np.zeros((2, 2), dtype=int),
        b"1234567",
    ],
)
def test_what_is_no_list_of_token_ids_is_refused(ids: object) -> None:
    with pytest.raises(InvalidInputError, match="token ids"):
        pack_ids(ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("shift", [256, 65_536, 2**32])
def test_ids_that_agree_in_their_low_bits_have_different_keys(
    shift: int,
) -> None:  # A14
    ids = list(range(64))
    other = [*ids[:10], ids[10] + shift, *ids[11:]]
    root = root_key(Namespace())
    assert chain_key(root, pack_ids(ids)) != chain_key(root, pack_ids(other))


def test_key_is_the_documented_sha256_chain() -> None:  # A15: cryptographic, and spelt out here
    header = b"bicl page chain 1"
    fields = [b"tenant", b"lora", b"r1"]
    root = hashlib.sha256(header + b"".join(struct.pack("<q", len(f)) + f for f in fields)).digest()
    assert root_key(Namespace("tenant", "lora"), "r1") == root
    page = struct.pack("<3q", 7, 8, 9)
    assert chain_key(root, pack_ids([7, 8, 9])) == hashlib.sha256(root + page).digest()


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.data())
def test_no_two_namespaces_share_a_root(salt: str, adapter: str, revision: str, data) -> None:
    """Moving a character from one field to its neighbour, or to other fields, must show."""
    joined = salt + adapter + revision
    cuts = sorted(data.draw(st.tuples(*[st.integers(0, len(joined))] * 2)))
    other = (joined[: cuts[0]], joined[cuts[0] : cuts[1]], joined[cuts[1] :])
    same = other == (salt, adapter, revision)
    keys_equal = root_key(Namespace(salt, adapter), revision) == root_key(
        Namespace(*other[:2]), other[2]
    )
    assert keys_equal == same


def test_salt_that_is_no_valid_unicode_has_a_key() -> None:
    assert root_key(Namespace("\ud800")) != root_key(Namespace("\ud801"))


def test_keys_are_equal_across_processes() -> None:  # A73
    program = (
        "from bicl.cache.keys import *;"
        "print(chain_key(root_key(Namespace('a', 'b'), 'r'), pack_ids(list(range(64)))).hex())"
    )
    here = chain_key(root_key(Namespace("a", "b"), "r"), pack_ids(list(range(64)))).hex()
    for seed in ("1", "2"):
        there = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        )
        assert there.stdout.strip() == here
