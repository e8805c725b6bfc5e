"""What ``bicl chaos`` does."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from bicl.errors import InvalidInputError
from bicl.frontends.http.chaos.cases import CASES
from bicl.frontends.http.chaos.runner import Result, run_case

__all__ = ["run"]


def run(names: Sequence[str], *, device: str, seed: int, as_json: bool) -> bool:
    """Run cases and print one line each; whether all held.

    Raises:
        InvalidInputError: there is no such case.
    """
    if unknown := [name for name in names if name not in CASES]:
        raise InvalidInputError(f"there is no case {', '.join(unknown)}; see bicl chaos --list")
    held = 0
    with _quiet_log():
        for name in names or CASES:
            result = run_case(name, device=device, seed=seed)
            held += not result.problem
            print(json.dumps(asdict(result)) if as_json else _line(result), flush=True)
    total = len(names or CASES)
    if not as_json:
        print(f"{held} of {total} cases held (seed {seed}, {device})")
    return held == total


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Every fault is logged as such; what counts here is what comes of it."""
    log = logging.getLogger("bicl")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _line(result: Result) -> str:
    seen = ", ".join(f"{name} {value:g}" for name, value in result.seen.items())
    line = (
        f"{'FAIL' if result.problem else 'ok':<5}{result.case:<28}{result.seconds:6.1f} s  {seen}"
    )
    return f"{line}\n{result.problem}" if result.problem else line
