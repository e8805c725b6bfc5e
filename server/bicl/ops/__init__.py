"""One thin function an operator, for each backend."""
