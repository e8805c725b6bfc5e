"""What ``bicl hysparse tune`` measures: pieces of the user's texts, and tasks with answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bicl.errors import ConfigError
from bicl.frontends.http.loader import LoadedModel

__all__ = ["Samples", "Task", "read_samples"]


@dataclass(frozen=True)
class Task:
    """A prompt, and a text that the answer must contain."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Samples:
    """What is measured.

    Attributes:
        texts: token ids; the last ``predicted`` of each are predicted one by one.
        predicted: that many.
        tasks: answered greedily.
    """

    texts: tuple[tuple[int, ...], ...]
    predicted: int
    tasks: tuple[Task, ...] = ()

    @property
    def digest(self) -> str:
        """Names them, so that results are never taken for other samples'."""
        told = json.dumps([self.texts, self.predicted, [asdict(task) for task in self.tasks]])
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def read_samples(
    loaded: LoadedModel,
    texts: Sequence[Path],
    tasks: Path | None,
    *,
    pieces: int,
    context: int,
    predicted: int,
) -> Samples:
    """Cut texts into pieces and read tasks (JSON lines with ``prompt`` and ``answer``).

    Raises:
        ConfigError: a file cannot be read, or the texts are too short.
    """
    try:
        ids = [loaded.tokenizer(path.read_text()).input_ids for path in texts]
        lines = tasks.read_text().splitlines() if tasks else []
        found = tuple(Task(**json.loads(line)) for line in lines if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{error}; give readable text files") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f'--tasks {tasks}: {error}; each line is {{"prompt": "...", "answer": "..."}}'
        ) from None
    size = context + predicted
    cut = [
        tuple(own[start : start + size])
        for own in ids
        for start in range(0, len(own) - size + 1, size)
    ]
    if not cut:
        longest = max(map(len, ids), default=0)
        raise ConfigError(
            f"the longest text has {longest} tokens, one piece needs {size}; give longer texts or "
            "a smaller --context-tokens"
        )
    step = max(1, len(cut) // pieces)
    return Samples(tuple(cut[::step][:pieces]), predicted, found)
