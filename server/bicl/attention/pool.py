"""Device memory of the cache: one tensor of pages a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bicl.cache.layout import PageLayout
from bicl.errors import ConfigError

__all__ = ["KVPool", "LayerCache"]


@dataclass(frozen=True)
class LayerCache:
    """One layer's pages: the handle that models and interfaces pass around.

    Attributes:
        pages: ``layout.shape(num_pages)``, dtype ``layout.dtype``.
        layout: how elements lie in it.
        k_scale, v_scale: multiply a stored value to recover the original; 1.0 unless fp8.
    """

    pages: torch.Tensor
    layout: PageLayout
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def device(self) -> torch.device:
        return self.pages.device


class KVPool:
    """Owns the pages of every layer. Page ids mean the same page in all layers.

    Args:
        layouts: one layout a layer; all must share ``page_size``.
        num_pages: pages of each layer.
        device: where the pages live.
        group_pages: layers of a second page group, and how many pages those have; their page ids
            are their own.
        fill: initial value. ``None`` leaves memory as it comes; tests pass NaN so that a read of
            a slot nobody wrote shows.

    Raises:
        ConfigError: page sizes differ, or no pages.
    """

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        num_pages: int,
        device: torch.device | str,
        *,
        group_pages: Mapping[int, int] | None = None,
        fill: float | None = None,
    ) -> None:
        group = group_pages or {}
        fewest = min(num_pages, *group.values()) if group else num_pages
        if fewest < 1:
            raise ConfigError(f"num_pages is {fewest}; the cache needs at least one page")
        if len({layout.page_size for layout in layouts}) != 1:
            raise ConfigError("all layers must share one page_size; tiles may differ")
        self.num_pages = num_pages
        self.page_size = layouts[0].page_size
        self.layers = [
            LayerCache(_allocate(layout, group.get(number, num_pages), device, fill), layout)
            for number, layout in enumerate(layouts)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(layer.layout.page_bytes * layer.num_pages for layer in self.layers)


def _allocate(
    layout: PageLayout, num_pages: int, device: torch.device | str, fill: float | None
) -> torch.Tensor:
    pages = torch.empty(layout.shape(num_pages), dtype=layout.dtype, device=device)
    if fill is not None:
        pages.fill_(fill)
    return pages
