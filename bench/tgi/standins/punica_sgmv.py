"""Imported by TGI's models; a dense text model calls nothing of it."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return
