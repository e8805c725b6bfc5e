"""Time from ``docker compose up`` to the first token of the embedded image, and image sizes.

::

    make image
    python -m bench.image --runs 3 --out bench/results/image.json
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import time
from pathlib import Path

import httpx

from bench.record import machine, save

ROOT = Path(__file__).parents[1]
BODY = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 5}}
SECONDS = 300


def compose(port: int, *arguments: str) -> None:
    program = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    command = [*program, "-p", "bicl-bench", "-f", str(ROOT / "docker-compose.yml"), *arguments]
    subprocess.run(
        command, check=True, capture_output=True, env=os.environ | {"PORT": str(port)}, cwd=ROOT
    )


def first_token(port: int) -> float:
    """Seconds from ``up`` on a stopped service to the first event of a stream."""
    start = time.monotonic()
    compose(port, "up", "-d", "--no-build", "embedded")
    url = f"http://127.0.0.1:{port}/generate_stream"
    try:
        while time.monotonic() - start < SECONDS:
            try:
                with httpx.stream("POST", url, json=BODY, timeout=60) as answer:
                    if any(line.startswith("data:") for line in answer.iter_lines()):
                        return time.monotonic() - start
            except httpx.TransportError:
                pass
            time.sleep(0.1)
    finally:
        compose(port, "down", "-v")
    raise SystemExit(f"no token within {SECONDS} s")


def size(image: str) -> int:
    """Bytes of an image."""
    command = ["docker", "image", "inspect", "-f", "{{.Size}}", image]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--port", type=int, default=18081)
    parser.add_argument("--tgi-base", help="what bicl-tgi was built from: tell what it adds")
    parser.add_argument("--out", type=Path, help="write results here, as JSON")
    options = parser.parse_args()
    rows: list[dict[str, object]] = [
        {"op": "first_token", "seconds": round(first_token(options.port), 1)}
        for _ in range(options.runs)
    ]
    rows.append({"op": "size", "image": "bicl-embedded", "bytes": size("bicl-embedded")})
    if options.tgi_base:
        added = size("bicl-tgi") - size(options.tgi_base)
        rows.append({"op": "size over its base", "image": "bicl-tgi", "bytes": added})
    for row in rows:
        print(row)
    if options.out:
        what = "docker compose up of the stopped service to the first token, the bundled model"
        save(options.out, machine(what=what), rows)


if __name__ == "__main__":
    main()
