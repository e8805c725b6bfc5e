from . import functional, modules

__all__ = ["functional", "modules"]
