"""Kernel benchmarks: ours, the peers and the floor, in one run."""
