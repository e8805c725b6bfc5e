"""Benchmarks. Nothing in the package imports them."""
