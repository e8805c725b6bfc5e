"""HySparse: decode reads only the pages that its query needs.

Score (a small index vector a page and KV head) -> select -> dense decode over the chosen pages.
``SparseBackend`` wraps any attention backend; nothing above or below it changes.
"""
