"""The door into text-generation-inference: our cache and attention under its names.

``patches/`` puts this package in place when TGI's server starts; see docs/tgi.md.
"""
