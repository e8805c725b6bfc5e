"""Checks first, then becomes the real launcher: same process, same signals, same exit codes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from bicl.errors import BiclError, ConfigError
from bicl.hardware import find_gpus, is_jetson, judge
from bicl.launcher import watch
from bicl.launcher.flags import CommandLine, describe_flags, split
from bicl.launcher.hysparse import enables_hysparse
from bicl.launcher.installed import check_kernels, check_overlay, note_on_shared_memory
from bicl.launcher.model_config import ModelConfig, read_chat_template, read_model_config
from bicl.launcher.plan import plan_launch

__all__ = ["main"]

UPSTREAM = "text-generation-launcher-upstream"
NAME = "text-generation-launcher"
EXIT_USAGE = 2
PASSED_THROUGH = {"-V", "--version", "-e", "--env"}


def main() -> NoReturn:
    """Entry point of ``text-generation-launcher`` in the image."""
    try:
        _launch(sys.argv[1:], dict(os.environ))
    except (BiclError, OSError) as error:
        _say(str(error))
        sys.exit(EXIT_USAGE)


def _launch(arguments: list[str], environ: dict[str, str]) -> NoReturn:
    program = _find_launcher(environ)
    if {"-h", "--help"} & set(arguments):
        code = subprocess.run([program, "--help"], check=False).returncode
        print(f"\n{describe_flags()}", flush=True)
        sys.exit(code)
    if PASSED_THROUGH & set(arguments):
        os.execve(program, [NAME, *arguments], environ)
    line = split(arguments, environ)
    gpus = find_gpus(environ)
    launch = plan_launch(line, _model(line), judge(gpus, jetson=is_jetson()))
    if "BICL_DISABLE" not in launch.environment:
        check_kernels()
        check_overlay(environ)
    for note in (*launch.notes, note_on_shared_memory(line, len(gpus))):
        if note:
            _say(note)
    if "BICL_DISABLE" not in launch.environment:
        socket = line.their("--shard-uds-path") or watch.DEFAULT_SOCKET
        watch.start(socket, int(launch.environment["BICL_BLOCK_SIZE"]), environ)
    os.execve(program, [NAME, *launch.arguments], environ | launch.environment)


def _find_launcher(environ: Mapping[str, str]) -> str:
    """The real launcher: under its new name, or the first of its old name that is not us."""
    path = environ.get("PATH", os.defpath)
    if found := shutil.which(UPSTREAM, path=path):
        return found
    ourselves = os.path.realpath(sys.argv[0])
    for folder in path.split(os.pathsep):
        found = shutil.which(NAME, path=folder)
        if found and os.path.realpath(found) != ourselves:
            return found
    raise ConfigError(
        f"neither {UPSTREAM} nor another {NAME} is on PATH; this command belongs into an image of "
        "text-generation-inference (without one, use `bicl serve`)"
    )


def _model(line: CommandLine) -> ModelConfig | None:
    model_id = line.their("--model-id")
    if not model_id:
        return None
    cache, revision = line.their("--huggingface-hub-cache"), line.their("--revision")
    try:
        model = read_model_config(model_id, revision, cache)
        if not enables_hysparse(line):
            return model
        return replace(model, chat_template=read_chat_template(model_id, revision, cache))
    except (OSError, ValueError, ImportError) as error:
        _say(f"config.json of {model_id} could not be read ({error}); the shard checks the model")
        return None


def _say(text: str) -> None:
    print(f"bicl: {text}", file=sys.stderr, flush=True)
