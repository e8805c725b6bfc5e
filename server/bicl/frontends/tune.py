"""``bicl hysparse tune``: the largest sparsity that the user's own texts and tasks allow.

Every setting runs through the serving engine itself: prompts are computed, then the text that
follows is fed token by token, as if it were generated, and its log-probabilities are noted. Ratios
are tried per request on one engine, which share their prompts' pages.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from bicl.errors import BiclError, ConfigError
from bicl.frontends.http.engine import Engine, EngineConfig
from bicl.frontends.http.loader import LoadedModel, load_model, resolve_model
from bicl.frontends.http.request import (
    GenerationParams,
    GenerationRequest,
    RequestDone,
    RequestFailed,
    SparseOptions,
    TokenEvent,
)
from bicl.frontends.tune_report import Result, markdown, plot, table
from bicl.frontends.tune_samples import Samples, Task, read_samples
from bicl.sparse.config import HySparseConfig
from bicl.sparse.gate_file import load_gate, with_gate
from bicl.sparse.guard import GuardBounds
from bicl.sparse.settings import write_config_file

__all__ = ["Grid", "best_result", "engine_for", "run_tune", "tune"]

# A search measures a setting as it is: nothing may go back to the full cache meanwhile.
UNGUARDED = GuardBounds(shadow_interval=1 << 30, min_mass_kept=0.0, min_sparsity_share=0.0)
RESULTS, CONFIG_FILE, TABLE_FILE, PLOT_FILE = (
    "tune.jsonl",
    "hysparse.json",
    "tune.md",
    "tune.png",
)


@dataclass(frozen=True)
class Grid:
    """Settings to try; all combinations."""

    ratios: tuple[float, ...] = (0.3, 0.5, 0.6, 0.65, 0.7, 0.8, 0.9)
    layers: tuple[str, ...] = ("10-28", "8-23")
    modes: tuple[str, ...] = ("select",)
    max_ks: tuple[int, ...] = (512,)

    def engines(self, base: HySparseConfig) -> Iterator[HySparseConfig]:
        """One config an engine; ratios are the requests' affair in ``select`` mode."""
        for mode, layers, max_k in itertools.product(self.modes, self.layers, self.max_ks):
            yield replace(base, mode=mode, layers=layers, max_k=max_k)


def tune(
    loaded: LoadedModel,
    samples: Samples,
    grid: Grid,
    output: Path,
    *,
    engine: EngineConfig,
    base: HySparseConfig,
    max_drop: float,
    console: Console | None = None,
) -> Result:
    """Try every setting that ``output`` does not hold yet, and write table, plot and config file.

    Args:
        engine: sizes, that of pages among them; see :func:`engine_for`.
        base: everything that the grid does not vary.
        max_drop: most accuracy that may be lost, as a share (0.003).

    Returns:
        The largest sparsity within ``max_drop``.

    Raises:
        ConfigError: nothing is within ``max_drop``, or no setting leaves anything out.
    """
    console = console or Console()
    output.mkdir(parents=True, exist_ok=True)
    store = _Store(output / RESULTS, _context(loaded, samples, base, engine.page_size))
    configs = list(grid.engines(base))
    with Progress(console=console) as progress:
        total = 1 + len(configs) * len(grid.ratios)
        task = progress.add_task(f"trying {total} settings", total=total)
        dense = _measure_missing(
            loaded, engine, samples, store, [replace(base, sparsity_ratio=0.0)]
        )[0]
        progress.advance(task)
        results: list[Result] = []
        for config in configs:
            wanted = [replace(config, sparsity_ratio=ratio) for ratio in grid.ratios]
            results += _measure_missing(loaded, engine, samples, store, wanted)
            progress.advance(task, len(wanted))
    console.print(table(results, dense, max_drop))
    (output / TABLE_FILE).write_text(markdown(results, dense, max_drop))
    plot(results, dense, max_drop, output / PLOT_FILE, console)
    best = best_result(results, dense, max_drop)
    facts = {
        "model_sha": loaded.sha,
        "samples": samples.digest,
        "page_size": engine.page_size,
        "accuracy_drop": best.drop(dense),
        "max_drop": max_drop,
        "tiles_left_out_of_all_layers": best.skipped,
    }
    write_config_file(output / CONFIG_FILE, best.config, **facts)
    flags = f"--enable-hysparse --hysparse-config {output / CONFIG_FILE}"
    console.print(f"serve with: {flags} --block-size {engine.page_size}")
    return best


def best_result(results: Sequence[Result], dense: Result, max_drop: float) -> Result:
    """The most left out of all layers within ``max_drop``.

    Raises:
        ConfigError: none is, or none leaves anything out.
    """
    exercised = [each for each in results if each.skipped > 0.0]
    if not exercised:
        raise ConfigError(
            "no setting left anything out: the samples are not longer than floor_tokens "
            f"({results[0].config.floor_tokens}); use longer texts (--context-tokens)"
        )
    allowed = [each for each in exercised if each.drop(dense) <= max_drop]
    if not allowed:
        least = min(exercised, key=lambda each: each.drop(dense))
        raise ConfigError(
            f"no setting stays within a drop of {max_drop:.2%}; the best, ratio "
            f"{least.config.sparsity_ratio} in layers {least.config.layers}, loses "
            f"{least.drop(dense):.2%}. Try smaller --ratios, fewer --layers, or `bicl hysparse fit`"
        )
    return max(allowed, key=lambda each: (each.skipped, -each.drop(dense)))


def run_tune(
    model_id: str,
    texts: Sequence[Path],
    tasks: Path | None,
    grid: Grid,
    output: Path,
    *,
    base: HySparseConfig,
    max_drop: float,
    pieces: int,
    context: int,
    predicted: int,
    device: str,
    page_size: int,
) -> Result:
    """Load a model and its samples, then :func:`tune`.

    Raises:
        ConfigError: a value that cannot work, before anything is loaded where that is possible.
    """
    for config in grid.engines(base):
        for ratio in grid.ratios:
            replace(config, sparsity_ratio=ratio)
    path = resolve_model(model_id)
    base = with_gate(base, path)
    loaded = load_model(path, device=device)
    samples = read_samples(
        loaded, texts, tasks, pieces=pieces, context=context, predicted=predicted
    )
    engine = engine_for(samples, loaded, page_size)
    return tune(loaded, samples, grid, output, engine=engine, base=base, max_drop=max_drop)


def engine_for(samples: Samples, loaded: LoadedModel, page_size: int) -> EngineConfig:
    """An engine for all samples at once, of what fits into its share of the memory.

    Args:
        page_size: tokens a page, 64 or 32.

    Raises:
        ConfigError: a sample is longer than the model takes.
    """
    longest = max(map(len, samples.texts))
    for task in samples.tasks:
        own = len(loaded.tokenizer(task.prompt).input_ids)
        longest = max(longest, own + len(loaded.tokenizer(task.answer).input_ids) + 8)
    if longest > loaded.max_position:
        raise ConfigError(
            f"a sample has {longest} tokens, the model was made for {loaded.max_position}; use a "
            "smaller --context-tokens or shorter tasks"
        )
    count = len(samples.texts) + len(samples.tasks)
    return EngineConfig(
        max_total_tokens=longest + 1,
        max_batch_size=min(count, 8),
        max_waiting=count,
        page_size=page_size,
    )


# --- measuring ---------------------------------------------------------------------------------
def _context(loaded: LoadedModel, samples: Samples, base: HySparseConfig, page_size: int) -> str:
    """What results are of, beside the settings: model, samples, pages, and what stands in the gate.

    Raises:
        ConfigError: the gate's file cannot be used.
    """
    own = [loaded.sha, samples.digest, f"pages of {page_size}"]
    if base.gate_path is not None:
        gate = load_gate(base.gate_path).state_dict()
        told = hashlib.sha256()
        for name in sorted(gate):
            told.update(name.encode() + gate[name].numpy().tobytes())
        own.append(told.hexdigest()[:16])
    return " ".join(own)


class _Store:
    """Results on disk, one JSON object a line; what is there is not measured again."""

    def __init__(self, path: Path, context: str) -> None:
        self._path = path
        self._context = context
        self._found: dict[str, Result] = {}
        text = path.read_text() if path.exists() else ""
        self._before = "\n" if text and not text.endswith("\n") else ""  # after a line cut off
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                if entry["context"] == context:
                    config = HySparseConfig(**entry.pop("config"))
                    del entry["context"]
                    self._found[_key(config)] = Result(config, **entry)
            except (ValueError, TypeError, KeyError):
                continue  # a line that an interruption cut off

    def get(self, config: HySparseConfig) -> Result | None:
        return self._found.get(_key(config))

    def add(self, result: Result) -> None:
        self._found[_key(result.config)] = result
        line = json.dumps({"context": self._context, **asdict(result)})
        with self._path.open("a") as file:
            file.write(self._before + line + "\n")
        self._before = ""


def _key(config: HySparseConfig) -> str:
    return json.dumps(asdict(config), sort_keys=True)


def _measure_missing(
    loaded: LoadedModel,
    sizes: EngineConfig,
    samples: Samples,
    store: _Store,
    wanted: Sequence[HySparseConfig],
) -> list[Result]:
    """Results of settings that differ in their ratio only."""
    missing = [config for config in wanted if store.get(config) is None]
    # A compact engine's pools are made for its ratio; a selecting one serves them all.
    groups = [[one] for one in missing] if wanted[0].mode == "compact" else [missing]
    for group in groups:
        if group:
            # Quality is what counts here, so tiles are left out whether that pays or not.
            tried = replace(group[0], min_skipped_mb=0)
            with _running(loaded, replace(sizes, hysparse=tried, guard=UNGUARDED)) as engine:
                for config in group:
                    store.add(_measure(loaded, engine, samples, config))
    found = [store.get(config) for config in wanted]
    return [each for each in found if each is not None]


@contextmanager
def _running(loaded: LoadedModel, config: EngineConfig) -> Iterator[Engine]:
    engine = Engine(loaded, config).start()
    try:
        yield engine
    finally:
        engine.stop()


def _measure(
    loaded: LoadedModel, engine: Engine, samples: Samples, config: HySparseConfig
) -> Result:
    wish = SparseOptions(sparsity_ratio=config.sparsity_ratio)
    requests = []
    for ids in samples.texts:
        prompt, forced = ids[: -samples.predicted], ids[-samples.predicted :]
        params = GenerationParams(
            len(forced), ignore_eos=True, top_n_tokens=1, forced_ids=forced, sparse=wish
        )
        requests.append((tuple(prompt), params))
    answers = _run(engine, requests)
    events = [event for tokens, _ in answers for event in tokens]
    mean = sum(event.token.logprob for event in events) / len(events)
    first = sum(event.token.id in {top.id for top in event.top_tokens} for event in events)
    told = [done.usage.sparse for _, done in answers]
    read = sum(each.tiles_read for each in told if each)
    total = sum(each.tiles_total for each in told if each)
    depth = len(loaded.geometry.layers)
    sparse = len(config.sparse_layers(depth))
    return Result(
        config,
        perplexity=math.exp(-mean),
        top1=first / len(events),
        tasks=_answered(loaded, engine, samples.tasks, wish),
        skipped=(1.0 - read / total) * sparse / depth if total else 0.0,
    )


def _answered(
    loaded: LoadedModel, engine: Engine, tasks: Sequence[Task], wish: SparseOptions
) -> float | None:
    if not tasks:
        return None
    requests = []
    for task in tasks:
        room = len(loaded.tokenizer(task.answer).input_ids) + 8
        ids = tuple(loaded.tokenizer(task.prompt).input_ids)
        requests.append((ids, GenerationParams(room, sparse=wish)))
    answers = _run(engine, requests)
    pairs = zip(tasks, answers, strict=True)
    return sum(task.answer in done.generated_text for task, (_, done) in pairs) / len(tasks)


def _run(
    engine: Engine, requests: Sequence[tuple[tuple[int, ...], GenerationParams]]
) -> list[tuple[list[TokenEvent], RequestDone]]:
    streams = [
        engine.submit(GenerationRequest(f"tune-{number}", ids, params))
        for number, (ids, params) in enumerate(requests)
    ]
    answers = []
    for stream in streams:
        events = list(stream)
        last = events[-1]
        if isinstance(last, RequestFailed):
            raise BiclError(f"a sample could not be computed: {last.error}") from last.error
        assert isinstance(last, RequestDone)
        answers.append(([e for e in events if isinstance(e, TokenEvent)], last))
    return answers
