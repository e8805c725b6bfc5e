"""CUDA operators: one thin function an operator, over the ahead-of-time library."""
