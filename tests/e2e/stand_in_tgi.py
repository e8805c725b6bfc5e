"""An image with the names of the official TGI image: its Python, file tree, launcher, entry point.

The steps of the Dockerfile's ``tgi`` target run on it where no registry can be reached. Its Python
is that of the embedded image, with torch and without us.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine import ROOT, run

sys.path.insert(0, str(ROOT / "tests" / "frontends" / "tgi"))
import fake_tgi

TAG = "bicl-test-tgi:official"
DOCKERFILE = r"""
FROM bicl-embedded
USER root
RUN mv /opt/bicl /usr/src/.venv \
 && sed -i 's|/opt/bicl|/usr/src/.venv|g' /usr/src/.venv/bin/* /usr/src/.venv/pyvenv.cfg \
 && /usr/src/.venv/bin/python -m pip uninstall -q -y bicl \
 && /usr/src/.venv/bin/python -m pip install -q --no-cache-dir uv \
 && mv /usr/src/.venv/bin/uv /bin/uv
COPY text_generation_server /usr/src/server/text_generation_server
RUN echo /usr/src/server > $(echo /usr/src/.venv/lib/python3*/site-packages)/tgi.pth
COPY --chmod=755 text-generation-launcher /usr/local/bin/
COPY --chmod=755 tgi-entrypoint.sh /tgi-entrypoint.sh
ENV VIRTUAL_ENV=/usr/src/.venv/ PATH=/usr/local/bin:/usr/bin:/bin:/usr/src/.venv/bin/ PORT=80 \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
WORKDIR /usr/src
ENTRYPOINT ["/tgi-entrypoint.sh"]
CMD []
"""
LAUNCHER = """#!/usr/src/.venv/bin/python
import json, os, signal, sys, time
if "--help" in sys.argv:
    print("Usage: text-generation-launcher [OPTIONS]")
    sys.exit(0)
print(json.dumps(dict(argv=sys.argv[1:], pid=os.getpid(), environ=dict(os.environ))), flush=True)
if "--stay" in sys.argv:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    time.sleep(120)
"""
ENTRY = "#!/bin/sh\nexec text-generation-launcher $@\n"


def build_official(client: str, folder: Path) -> str:
    """The stand-in image; its tag. ``bicl-embedded`` must have been built."""
    fake_tgi.make_tree(folder)
    for name, text in (
        ("Dockerfile", DOCKERFILE),
        ("text-generation-launcher", LAUNCHER),
        ("tgi-entrypoint.sh", ENTRY),
    ):
        (folder / name).write_text(text)
    run(client, "build", "--network", "host", "-t", TAG, str(folder))
    return TAG
