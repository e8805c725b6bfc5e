"""Beside the launcher: does the shard that came up run our cache?

The shim has become the real launcher by then, so this runs beside it: it waits for the first
shard, asks it what the router asks it, and ends. A shard whose page size or attention is not ours
(its Python did not find the hook) is killed: the launcher then fails, and nobody serves without
noticing.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

__all__ = ["Info", "ask_shard", "main", "start", "watch"]

DEFAULT_SOCKET = "/tmp/text-generation-server"
ATTENTION = "flashdecoding"
POLL_SECONDS = 0.5
ASK_SECONDS = 60.0  # a shard that warms up answers late
PATIENT_TRIES = 10  # before it is said that there is no answer


class Info(NamedTuple):
    """Of a shard's answer, what is looked at."""

    block_size: int
    attention: str


def start(socket_path: str, block_size: int, environ: Mapping[str, str]) -> None:
    """Begin to watch beside this process, which goes on to become the launcher."""
    command = [sys.executable, "-c", "from bicl.launcher.watch import main; main()"]
    subprocess.Popen(
        [*command, f"{socket_path}-0", str(block_size), str(os.getpid())],
        env={**environ, "BICL_DISABLE": "1"},  # this one needs no cache
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # the terminal's and Docker's signals are for the launcher
    )


def watch(path: str, block_size: int, ask: Callable[[str], Info], parent: int) -> int:
    """Wait for the shard behind a socket and check it. Returns the exit code.

    Args:
        ask: gets a shard's answer; raises OSError or RuntimeError while there is none.
        parent: process without which there is nothing left to watch.
    """
    tries = 0
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
        if not os.path.exists(path):
            continue
        try:
            info = ask(path)
        except (OSError, RuntimeError) as error:  # a stale socket, or it warms up
            tries += 1
            if tries == PATIENT_TRIES:
                _say(f"the shard could not be asked for its page size yet: {error}")
            continue
        if info == Info(block_size, ATTENTION):
            _say(f"the shard answers with pages of {block_size} tokens")
            return 0
        _say(
            f"the shard answers with pages of {info.block_size} tokens and {info.attention} "
            f"attention instead of {block_size} and {ATTENTION}: it runs without BICL, so it is "
            "stopped; its Python does not find the overlay (python -m bicl.frontends.tgi.install "
            "--verify), or BICL_DISABLE=1 starts it without BICL on purpose"
        )
        os.kill(_process_behind(path), signal.SIGKILL)
        return 1
    return 0


def _process_behind(path: str) -> int:
    """Who listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
        size = struct.calcsize("3i")
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def ask_shard(path: str) -> Info:
    """TGI's own protocol and client code."""
    import grpc
    from text_generation_server.pb import generate_pb2, generate_pb2_grpc

    with grpc.insecure_channel(f"unix://{path}") as channel:
        stub = generate_pb2_grpc.TextGenerationServiceStub(channel)
        try:
            answer = stub.Info(generate_pb2.InfoRequest(), timeout=ASK_SECONDS)
        except grpc.RpcError as error:
            raise RuntimeError(str(error)) from error
    return Info(answer.block_size, answer.attention_impl)


def _say(text: str) -> None:
    print(f"bicl: {text}", file=sys.stderr, flush=True)


def main() -> NoReturn:
    """Arguments: the socket, the page size, the launcher's process id."""
    path, block_size, parent = sys.argv[1:]
    sys.exit(watch(path, int(block_size), ask_shard, int(parent)))
