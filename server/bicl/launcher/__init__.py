"""``text-generation-launcher`` in the image: our flags and checks, then the real launcher."""

from bicl.launcher.main import main

__all__ = ["main"]
