"""HEALTHCHECK of both images, ``python -m bicl.healthcheck``: exits 1 unless ``/health`` is well.

It asks the port that the container's first process was given, by flag or by ``PORT``. Standard
library only: it runs every few seconds.
"""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path

__all__ = ["main", "port_of"]

TIMEOUT_SECONDS = 4.0


def port_of(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Where a server with this command line listens; a flag wins over the environment."""
    for i, word in enumerate(command):
        name, has_value, value = word.partition("=")
        if name in ("--port", "-p"):
            return value if has_value else "".join(command[i + 1 : i + 2])
        if word.startswith("-p") and word[2:].isdecimal():
            return word[2:]
    return environ.get("PORT") or "80"


def main() -> int:
    """Returns the exit code; why it is 1 goes to stderr, where ``docker inspect`` shows it."""
    command = Path("/proc/1/cmdline").read_text().rstrip("\0").split("\0")
    url = f"http://127.0.0.1:{port_of(command, os.environ)}/health"
    try:
        urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS).close()
    except (OSError, HTTPException) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
