"""A shard that came up without our cache is noticed and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bicl.launcher import watch
from bicl.launcher.watch import Info

OURS, STOCK = Info(64, "flashdecoding"), Info(1, "flashinfer")
LISTEN = """
import socket, sys, time
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.01)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process behind a socket."""
    path = str(tmp_path / "socket-0")
    command = [sys.executable, "-c", LISTEN, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield path, process
        process.kill()


def test_shard_with_our_pages_is_left_alone(
    shard: tuple[str, subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, process = shard
    assert watch.watch(path, 64, lambda path: OURS, os.getppid()) == 0
    assert process.poll() is None
    assert "answers with pages of 64 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [STOCK, Info(64, "paged"), Info(32, "flashdecoding")])
def test_shard_without_us_is_killed_and_it_is_said(
    shard: tuple[str, subprocess.Popen[str]], capsys: pytest.CaptureFixture[str], answer: Info
) -> None:
    """The launcher fails when a shard dies, and so does the container."""
    path, process = shard
    assert watch.watch(path, 64, lambda path: answer, os.getppid()) == 1
    assert process.wait(10) == -signal.SIGKILL
    told = capsys.readouterr().err
    assert f"pages of {answer.block_size} tokens and {answer.attention} attention" in told
    assert "--verify" in told


def test_shard_that_warms_up_is_asked_again(shard: tuple[str, subprocess.Popen[str]]) -> None:
    answers: list[Info | None] = [None, None, OURS]

    def ask(path: str) -> Info:
        answer = answers.pop(0)
        if answer is None:
            raise RuntimeError("deadline exceeded")
        return answer

    assert watch.watch(shard[0], 64, ask, os.getppid()) == 0
    assert answers == []


def test_silence_is_told_once_and_stops_nothing(
    shard: tuple[str, subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [RuntimeError("no answer")] * 25 + [OURS]

    def ask(path: str) -> Info:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert watch.watch(shard[0], 64, ask, os.getppid()) == 0
    assert shard[1].poll() is None
    assert capsys.readouterr().err.count("could not be asked for its page size yet") == 1


def test_it_ends_with_the_launcher(tmp_path: Path) -> None:
    no_parent = 2**22  # no process has this id
    assert watch.watch(str(tmp_path / "none"), 64, lambda path: OURS, no_parent) == 0
