"""Drives TGI's real shard over gRPC as its router does, with the overlay in place, on the CPU.

``python -m bicl.frontends.tgi.selftest`` in an environment where ``text_generation_server`` can be
imported, such as the image's. Tokens must equal those of plain transformers in float32.
"""
