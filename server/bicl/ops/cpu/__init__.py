"""CPU operators in vectorised torch, right for every layout and dtype of the cache."""

from bicl.ops.cpu.copy_pages import copy_pages
from bicl.ops.cpu.gather import gather_kv
from bicl.ops.cpu.paged_attention import AttentionOptions, paged_attention
from bicl.ops.cpu.rotary import rotate
from bicl.ops.cpu.schedule import StepSchedule
from bicl.ops.cpu.store_kv import StoreIndex, store_kv

__all__ = [
    "AttentionOptions",
    "StepSchedule",
    "StoreIndex",
    "copy_pages",
    "gather_kv",
    "paged_attention",
    "rotate",
    "store_kv",
]
