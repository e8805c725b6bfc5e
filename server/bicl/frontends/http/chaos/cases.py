"""The cases. Each takes a :class:`Lab` and returns what it saw, as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bicl.frontends.http.chaos import isolation, load, tier_faults
from bicl.frontends.http.chaos.rig import Lab

__all__ = ["CASES", "Case"]

Case = Callable[[Lab], Mapping[str, float]]

CASES: dict[str, Case] = {
    "oracle-sees-a-wrong-page": load.oracle_sees_a_wrong_page,
    "disk-read-short": tier_faults.disk_read_short,
    "disk-read-empty": tier_faults.disk_read_empty,
    "disk-read-corrupt": tier_faults.disk_read_corrupt,
    "disk-read-missing": tier_faults.disk_read_missing,
    "disk-read-foreign": tier_faults.disk_read_foreign,
    "disk-read-late": tier_faults.disk_read_late,
    "disk-full": tier_faults.disk_full,
    "disk-in-use": tier_faults.disk_in_use,
    "host-copy-fails": tier_faults.host_copy_fails,
    "host-copy-late": tier_faults.host_copy_late,
    "host-slot-stale": tier_faults.host_slot_stale,
    "save-fails": tier_faults.save_fails,
    "host-exhausted": tier_faults.host_exhausted,
    "kill-during-write-back": tier_faults.kill_during_write_back,
    "page-without-its-tag": load.page_without_its_tag,
    "pool-exhausted": load.pool_exhausted,
    "step-fails": load.step_fails,
    "cancel-at-every-stage": load.cancel_at_every_stage,
    "adapter-swap": isolation.adapter_swap,
    "tenant-salts": isolation.tenant_salts,
    "weights-changed": isolation.weights_changed,
    "tenants-timing-each-other": isolation.tenants_timing_each_other,
    "everything-at-once": load.everything_at_once,
}
"""In the order of the documentation (``docs/chaos.md``)."""
