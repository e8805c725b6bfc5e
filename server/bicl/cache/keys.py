"""Token ids as bytes, namespaces, and the chained names of cached pages.

A page's key is ``SHA-256(key of the page before it || its token ids)``; the chain starts from the
key of its namespace. Equal keys mean equal tokens, equal history, equal tenant, adapter and
weights, in any process and on any machine. Keys name pages for tags and tiers. Lookup in
:mod:`bicl.cache.radix` compares the ids themselves and never trusts a hash.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NewType, TypeAlias

import numpy as np

from bicl.errors import InvalidInputError

__all__ = [
    "ID_BYTES",
    "HashFunction",
    "Namespace",
    "PackedIds",
    "PageChain",
    "TokenIds",
    "chain_key",
    "pack_ids",
    "root_key",
    "sha256",
]

ID_BYTES = 8

PackedIds = NewType("PackedIds", bytes)
"""Token ids as little-endian int64, back to back."""

TokenIds: TypeAlias = "PackedIds | Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]"
HashFunction: TypeAlias = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Whose prefixes these are. Pages are shared only within one namespace.

    Attributes:
        salt: tenant salt, set by the gateway.
        adapter_id: adapter that computed the keys and values; empty for the base model.
    """

    salt: str = ""
    adapter_id: str = ""


def pack_ids(token_ids: TokenIds) -> PackedIds:
    """Token ids in the form the index compares. What is packed already passes through.

    Worth doing once for a long prompt that is looked up several times.

    Raises:
        InvalidInputError: not a flat sequence of integers that fit 64 bits.
    """
    if isinstance(token_ids, bytes):
        if len(token_ids) % ID_BYTES:
            raise InvalidInputError(
                f"packed token ids are {len(token_ids)} bytes long; "
                f"a multiple of {ID_BYTES} is needed (use pack_ids)"
            )
        return PackedIds(token_ids)
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
            raise InvalidInputError(
                f"token ids are {token_ids.dtype}{list(token_ids.shape)}; "
                "a flat array of integers is needed"
            )
        return PackedIds(token_ids.astype("<i8", copy=False).tobytes())
    try:
        packed = array("q", token_ids)
    except (TypeError, OverflowError) as error:
        raise InvalidInputError(f"token ids must be integers that fit 64 bits: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return PackedIds(packed.tobytes())


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def root_key(
    namespace: Namespace, model_revision: str = "", hash_function: HashFunction = sha256
) -> bytes:
    """Where a namespace's chains start. Fields are length-prefixed, so none can pass for two."""
    fields = (namespace.salt, namespace.adapter_id, model_revision)
    parts = [b"bicl page chain 1"]
    for field in fields:
        encoded = field.encode("utf-8", "surrogatepass")
        parts += [len(encoded).to_bytes(8, "little"), encoded]
    return hash_function(b"".join(parts))


def chain_key(parent: bytes, page_ids: bytes, hash_function: HashFunction = sha256) -> bytes:
    """Key of a page.

    Args:
        parent: key of the page before it, or :func:`root_key`.
        page_ids: the page's packed token ids.
    """
    return hash_function(parent + page_ids)


class PageChain:
    """Ids and keys of a prompt's whole pages; hashed only as far as asked for.

    Args:
        token_ids: the prompt.
        page_size: tokens a page.
        keys: those known already: of page ``start - 1`` (for page 0: :func:`root_key`) and of
            those that follow it.
        start: which page the second of ``keys`` would belong to.
        group: the namespace's adapter; tiers can forget one adapter's pages.
    """

    __slots__ = ("_hash", "_ids", "_keys", "_page_bytes", "_start", "group", "num_pages")

    def __init__(
        self,
        token_ids: TokenIds,
        page_size: int,
        keys: Sequence[bytes],
        *,
        start: int = 0,
        group: str = "",
        hash_function: HashFunction = sha256,
    ) -> None:
        self.group = group
        self._ids = pack_ids(token_ids)
        self._page_bytes = page_size * ID_BYTES
        self._keys = list(keys)  # of pages start - 1, start, ...
        self._start = start
        self._hash = hash_function
        self.num_pages = len(self._ids) // self._page_bytes

    def ids(self, page: int) -> bytes:
        """Packed ids of a page."""
        return self._ids[page * self._page_bytes : (page + 1) * self._page_bytes]

    def key(self, page: int) -> bytes:
        """Key of page ``start - 1 .. num_pages - 1``."""
        while len(self._keys) <= page - self._start + 1:
            following = self._start + len(self._keys) - 1
            self._keys.append(chain_key(self._keys[-1], self.ids(following), self._hash))
        return self._keys[page - self._start + 1]
