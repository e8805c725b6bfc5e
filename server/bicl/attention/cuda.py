"""The CUDA backend: compiled kernels over pages, safe to capture in a CUDA graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.attention.rotary import Rotary
from bicl.attention.validate import check_no_grad, check_page_lists, check_tensor
from bicl.attention.widening import PageWidener
from bicl.errors import BackendError, BiclError, InvalidInputError
from bicl.ops.cuda import library
from bicl.ops.cuda.copy_pages import copy_pages
from bicl.ops.cuda.decode_attention import DecodePlanner, PlanKind
from bicl.ops.cuda.gather import gather
from bicl.ops.cuda.prefill_attention import PrefillPlanner, prefill_attention
from bicl.ops.cuda.rotary import rotate_and_store
from bicl.ops.cuda.sparse import store_and_index
from bicl.ops.cuda.store_kv import store_kv
from bicl.ops.cuda.workspace import Workspace

__all__ = ["CudaBackend"]

MIN_PAIRS = 1 << 16
CHUNK = 8  # elements of a 16-bit query that the kernels read at a time


class CudaBackend:
    """``AttentionBackend`` on NVIDIA cards of compute capability 8.0 or newer.

    Everything that changes from step to step is read on the device; nothing waits for it. One
    workspace a device is shared by all calls, so they must run on one stream, or on streams that
    wait for one another. It is allocated by the first call that needs it: run a step before
    capturing one.

    Args:
        deterministic: results depend on a sequence's own tokens only, never on its batch mates
            or on where prefixes were cut; a few percent slower.
        pdl: programmatic dependent launch (Hopper and later): kernels start while the one ahead
            still runs, and wait for it before they read. The ``run`` of a decode step that follows
            the ``store`` of that step's ``slot_mapping`` in the same layer waits for less: old
            pages stream while the newest tokens are written.

    Raises:
        BackendError: no CUDA device, no compiled kernels, or none for this card.
    """

    name = "cuda"

    def __init__(self, *, deterministic: bool = False, pdl: bool = True) -> None:
        library.require_device()
        self.deterministic = deterministic
        self.pdl = pdl
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None  # pages and slots, last call
        self._bound: dict[tuple[object, ...], _Bound] = {}
        self._decode = DecodePlanner(deterministic=deterministic, pdl=pdl)
        self._prefill = PrefillPlanner(deterministic=deterministic)
        self._widener = PageWidener(deterministic=deterministic, pdl=pdl)
        self._workspaces: dict[torch.device, Workspace] = {}
        # Captured graphs keep using the workspace they were captured with.
        self._outgrown: list[Workspace] = []
        self._copy_lists: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def unwidened_prefills(self) -> int:
        """Layers of prefill steps, one count each however many rows a step has, whose fp8 pages
        would be faster widened, for which there is not enough room."""
        return self._widener.num_too_large

    def plan(self, meta: AttentionMetadata) -> None:
        """Forget the last step. What the layers of a step have in common is worked out on the
        device, by the first layer that needs it. A decode step that was not planned has each layer
        do so itself."""
        self._decode.begin_step(meta)
        self._prefill.begin_step(meta)

    def store(
        self,
        layer: LayerCache,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        *,
        rotary: Rotary | None = None,
        records: torch.Tensor | None = None,
        choice_follows: bool = False,
    ) -> None:
        """See ``AttentionBackend.store``. Slots are trusted to lie in the pool.

        Args:
            records: for a step of one token a sequence: uint8 ``[num_pages, n]``, the index of
                HySparse (``bicl/sparse/index.py``); rewritten for the pages that this step
                completes, in the same launch.
            choice_follows: with ``records``: pages are chosen next, see ``store_and_index``.
        """
        check_no_grad("key", key)
        check_no_grad("value", value)
        if key.stride(-1) != 1:
            key = key.contiguous()
        if value.stride(-1) != 1:
            value = value.contiguous()
        try:
            if rotary is not None:
                rotate_and_store(
                    layer,
                    *rotary,
                    key,
                    value,
                    slots,
                    records=records,
                    choice_follows=choice_follows,
                    pdl=self.pdl,
                )
            elif records is None:
                store_kv(layer, key, value, slots, pdl=self.pdl)
            else:
                early = {"choice_follows": choice_follows, "pdl": self.pdl}
                store_and_index(layer, records, key, value, slots, **early)
        except ValueError as error:
            raise InvalidInputError(str(error)) from error
        self._stored = (layer.pages, slots)

    def run(
        self,
        query: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        *,
        scale: float,
        window_left: int = -1,
        window_right: int = -1,
        softcap: float = 0.0,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        lengths_known: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See ``AttentionBackend.run``. Page ids are trusted within the lengths.

        Args:
            lengths_known: of a list of pages a KV head: a kernel ahead of the last one wrote
                ``cache_seqlens``, so that only the lists are waited for.
        """
        check_no_grad("query", query)
        if query.ndim != 3:
            raise InvalidInputError(
                f"query must have shape [T, num_q_heads, head_dim], got {list(query.shape)}"
            )
        num_tokens, num_q_heads, head_dim = query.shape
        if odd := head_dim % CHUNK:
            # The pages' columns past head_dim are zero.
            wide = self.run(
                torch.nn.functional.pad(query, (0, CHUNK - odd)),
                layer,
                meta,
                scale=scale,
                window_left=window_left,
                window_right=window_right,
                softcap=softcap,
                return_lse=return_lse,
                lengths_known=lengths_known,
            )
            return _narrowed(wide, head_dim, out)
        result = (
            torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
        )
        lse = (
            torch.empty(num_q_heads, num_tokens, dtype=torch.float32, device=query.device)
            if return_lse
            else None
        )
        try:
            if meta.max_q == 1 and num_tokens == meta.batch_size:
                # The last position sees nothing to its right: window_right and causal are idle.
                options = (scale, softcap, window_left)
                self._run_decode(result, lse, query, layer, meta, *options, lengths_known)
            else:
                self._run_prefill(
                    result, lse, query, layer, meta, scale, softcap, (window_left, window_right)
                )
        except BiclError:
            raise
        except ValueError as error:
            raise InvalidInputError(str(error)) from error
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # out of memory and others have their own types
                raise
            raise BackendError(str(error)) from error
        return result if lse is None else (result, lse)

    def _run_prefill(
        self,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        query: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        scale: float,
        softcap: float,
        window: tuple[int, int],
    ) -> None:
        if not _aligned(query):
            query = query.contiguous()
        left, right = window
        for part in self._widener.parts(query, layer, meta):
            heads = part.query_heads
            rows = query[:, heads]
            plan = self._prefill.plan_for(
                rows, part.layer, meta, window_left=left, window_right=right
            )
            prefill_attention(
                rows,
                part.layer,
                part.page_table,
                meta.cache_seqlens,
                plan,
                out=out[:, heads],
                lse=None if lse is None else lse[heads],
                scale=scale,
                softcap=softcap,
                pdl=self.pdl,
            )

    def _run_decode(
        self,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        query: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        scale: float,
        softcap: float,
        window_left: int,
        lengths_known: bool,
    ) -> None:
        batch, num_q_heads, _ = query.shape
        key = (id(layer), num_q_heads, scale, softcap, window_left)
        bound = self._bound.get(key)
        if bound is None or bound.layer() is not layer or batch > bound.max_batch:
            bound = self._bind(key, layer, num_q_heads, batch, scale, softcap, window_left)
        table = meta.page_table
        chosen = table.ndim == 3  # each layer has pages of its own
        plan, is_new = (None, False) if chosen else self._decode.plan_for(bound.kind, layer, meta)
        # Started early, it waits for the kernel ahead; behind the store, for new tokens only.
        behind_store = not (chosen or is_new) and self._follows_store(layer, meta)
        early = (1 if behind_store else 2 if chosen and lengths_known else 3) if self.pdl else 0
        rest = (table, meta.cache_seqlens, plan, early)
        try:
            bound.run(out, lse, query, *rest)
        except ValueError:  # asked after the fact: the question takes a tenth of a call's host time
            if _aligned(query):
                raise
            bound.run(out, lse, query.contiguous(), *rest)

    def _bind(
        self,
        key: tuple[object, ...],
        layer: LayerCache,
        num_q_heads: int,
        batch: int,
        scale: float,
        softcap: float,
        window_left: int,
    ) -> _Bound:
        """What calls with this key have in common, found once: it is most of a call's host time."""
        workspace = self._workspace(layer, num_q_heads, batch)

        def forget(gone: weakref.ref[LayerCache]) -> None:  # the id may be used again
            if key in self._bound and self._bound[key].layer is gone:
                del self._bound[key]

        bound = _Bound(
            workspace.decode_attention_on(layer, scale, softcap, window_left, self.deterministic),
            self._decode.kind_of(layer, num_q_heads, window_left),
            weakref.ref(layer, forget),
            workspace.max_pairs // max(num_q_heads, 1),
        )
        self._bound[key] = bound
        return bound

    def gather(
        self, layer: LayerCache, page_table: torch.Tensor, cache_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``AttentionBackend.gather``; waits for the lengths. fp8 comes as float32."""
        check_page_lists(layer, page_table, cache_seqlens)
        layout = layer.layout
        ends = torch.cumsum(cache_seqlens, 0, dtype=torch.int64)
        lengths = cache_seqlens.tolist()
        shape = (sum(lengths), layout.num_kv_heads, layout.head_dim)
        dtype = torch.float32 if layout.element_bytes == 1 else layout.dtype
        key = torch.empty(shape, dtype=dtype, device=layer.device)
        value = torch.empty(shape, dtype=dtype, device=layer.device)
        longest = max(lengths, default=0)
        gather(layer, page_table, cache_seqlens, ends - cache_seqlens, longest, key, value)
        return key, value

    def copy_pages(
        self, layers: list[LayerCache], source: torch.Tensor, target: torch.Tensor
    ) -> None:
        """See ``AttentionBackend.copy_pages``. No page may be both source and target."""
        device = layers[0].device
        check_tensor("source", source, (None,), (torch.int64,), device)
        check_tensor("target", target, (source.shape[0],), (torch.int64,), device)
        self._stored = None
        addresses = tuple(layer.pages.data_ptr() for layer in layers)
        lists = self._copy_lists.get(addresses)
        if lists is None:
            sizes = [layer.layout.page_bytes for layer in layers]
            lists = (
                torch.tensor(addresses, dtype=torch.int64, device=device),
                torch.tensor(sizes, dtype=torch.int64, device=device),
            )
            self._copy_lists[addresses] = lists
        copy_pages(*lists, source, target)

    def _follows_store(self, layer: LayerCache, meta: AttentionMetadata) -> bool:
        """Whether the last call stored this step's new tokens, one a sequence, in this layer."""
        stored = self._stored
        return stored is not None and stored[0] is layer.pages and stored[1] is meta.slot_mapping

    def _workspace(self, layer: LayerCache, num_q_heads: int, batch: int) -> Workspace:
        layout = layer.layout
        group, pairs = num_q_heads // layout.num_kv_heads, num_q_heads * batch
        device = layer.device
        found = self._workspaces.get(device)
        if found is not None and found.fits(layout.padded_head_dim, group, pairs):
            return found
        if torch.cuda.is_current_stream_capturing():
            raise BackendError(
                "the attention workspace must grow, which a CUDA graph capture does not allow; "
                "run one step of the largest batch before capturing"
            )
        if found is not None:
            self._outgrown.append(found)
            pairs = max(pairs, found.max_pairs)
            group = max(group, found.group)
        grown = Workspace(
            device,
            max(layout.padded_head_dim, found.padded_head_dim if found else 0),
            group,
            max(pairs, MIN_PAIRS),
            deterministic=self.deterministic,
        )
        self._workspaces[device] = grown
        return grown


class _Bound(NamedTuple):
    """The decode kernel, bound to a layer, its options and a workspace."""

    run: Callable[..., None]
    kind: PlanKind
    layer: weakref.ref[LayerCache]
    max_batch: int  # the workspace's


def _aligned(query: torch.Tensor) -> bool:
    """Whether rows start at 16 bytes, as the kernels read them."""
    stride = query.stride()
    return stride[-1] == 1 and (query.data_ptr() | stride[0] * 2 | stride[1] * 2) % 16 == 0


def _narrowed(
    wide: torch.Tensor | tuple[torch.Tensor, torch.Tensor], head_dim: int, out: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A result without the columns that padded its query, in ``out`` if there is one."""
    result, lse = wide if isinstance(wide, tuple) else (wide, None)
    narrow = result[..., :head_dim]
    narrow = narrow.contiguous() if out is None else out.copy_(narrow)
    return narrow if lse is None else (narrow, lse)
