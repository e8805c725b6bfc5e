"""Whether bringing pages back is faster than computing them again."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TransferCosts"]

_SMOOTHING = 0.2


@dataclass(slots=True)
class TransferCosts:
    """What the machine does, measured. Zero means not known; then a fetch is always tried.

    Attributes:
        page_bytes: of one page in all layers; ``page_tokens`` tokens are in it.
        host_bytes_per_second: host to pool, in pages.
        disk_bytes_per_second: disk to host, all readers together, with the verification; follows
            what is seen.
        cached_bytes_per_second: the same of files that the kernel still has in memory.
        prefill_tokens_per_second: of the model alone, in chunks as the server makes them.
        overhead_seconds: of a fetch, however small.
    """

    page_bytes: int
    page_tokens: int
    host_bytes_per_second: float = 0.0
    disk_bytes_per_second: float = 0.0
    cached_bytes_per_second: float = 0.0
    prefill_tokens_per_second: float = 0.0
    overhead_seconds: float = 0.0

    def fetch_pays(self, num_pages: int, *, queued_pages: int = 0) -> bool:
        """Whether pages in host memory arrive sooner than they are computed.

        Args:
            queued_pages: that were asked for before and still have to come.
        """
        return self._pays(num_pages, self.host_bytes_per_second, queued_pages)

    def promotion_pays(
        self, num_pages: int, *, queued_pages: int = 0, in_memory: bool = False
    ) -> bool:
        """The same for pages on disk, which then still have to come from the host.

        Args:
            in_memory: the kernel has their files in memory.
        """
        rate = self.cached_bytes_per_second if in_memory else self.disk_bytes_per_second
        return self._pays(num_pages, rate, queued_pages)

    def patience_seconds(self, num_pages: int) -> float:
        """How long a request may wait for pages from disk before it computes them."""
        if not self.prefill_tokens_per_second:
            return 10.0
        return 0.05 + num_pages * self.page_tokens / self.prefill_tokens_per_second

    def saw_disk(self, num_bytes: int, seconds: float, *, in_memory: bool = False) -> None:
        """Reads from disk at the same time took so long."""
        if seconds <= 0:
            return
        rate, name = num_bytes / seconds, "disk_bytes_per_second"
        if in_memory:
            name = "cached_bytes_per_second"
        known = getattr(self, name) or rate
        setattr(self, name, known + _SMOOTHING * (rate - known))

    def _pays(self, num_pages: int, rate: float, queued_pages: int) -> bool:
        if not rate or not self.prefill_tokens_per_second:
            return True
        copying = self.overhead_seconds + (num_pages + queued_pages) * self.page_bytes / rate
        return copying < num_pages * self.page_tokens / self.prefill_tokens_per_second
