"""Rows of a later run beside those of an earlier one that it need not measure again.

    python -m bench.hysparse.join EARLIER.jsonl [--later LATER.jsonl] [--rename OLD=NEW ...]
        [--add RUN.jsonl ...] --output FILE.json

Presses and the choice by true attention do not change with our index. With ``--later`` the rows of
our own variant, which do, are taken from a later run of the same contexts, and only from there; in
every context both runs must have found the same for dense decoding, to the last digit, or nothing
is written. ``--add`` takes configurations that the others have not from further runs, at the
lengths at which these have all contexts; what both have must be the same. ``--rename`` gives
variants of an earlier run the names that they have now. What was joined, added and renamed is told
in the result's ``meta``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.hysparse.report import read_items, read_metas, write_report
from bicl.sparse.config import HySparseConfig

__all__ = ["add", "join", "main", "rename"]

Items = Sequence[dict[str, Any]]

_CONTEXT = ("measure", "kind", "piece", "task", "aware", "sample", "tokens")
_TOLD = ("date", "commit", "sources", "command", "study", "gates", "configurations")


def join(earlier: Items, later: Items) -> list[dict[str, Any]]:
    """``earlier``, with our own variant's rows as ``later`` has them of the same contexts; where it
    has not, only those in which nothing was left out, which no index changes.

    Raises:
        ValueError: dense decoding gave something else in ``later``.
    """
    found = {_context(record): record["results"] for item in later for record in item["records"]}
    joined = []
    for item in earlier:
        records = []
        for record in item["records"]:
            others = found.get(_context(record), [])
            kept = [
                row
                for row in record["results"]
                if not _own(row[0]) or (not others and row[2] == 1.0)
            ]
            dense = [row[3] for rows in (kept, others) for row in rows if row[0] == "dense"]
            if any(value != dense[0] for value in dense):
                raise ValueError(f"dense differs in {_context(record)}: {dense}")
            ours = [row for row in others if _own(row[0])]
            records.append(record | {"results": kept[:1] + ours + kept[1:]})
        joined.append(item | {"records": records})
    return joined


def add(items: Items, others: Items) -> list[dict[str, Any]]:
    """``items`` with the configurations that only ``others`` have, at each length at which these
    have them of all contexts.

    Raises:
        ValueError: what both have of a context differs.
    """
    found: dict[tuple[Any, ...], dict[tuple[str, float], Any]] = {}
    for record in (record for item in others for record in item["records"]):
        own = found.setdefault(_context(record), {})
        own |= {(row[0], row[1]): row for row in record["results"]}
    whole: dict[tuple[str, int], set[tuple[str, float]]] = {}
    for record in (record for item in items for record in item["records"]):
        here = found.get(_context(record), {})
        for row in record["results"]:
            other = here.get((row[0], row[1]), row)
            if other[3] != row[3]:
                raise ValueError(f"{row[0]} differs in {_context(record)}: {row[3]}, {other[3]}")
        length = (record["measure"], record["tokens"])
        whole[length] = whole.get(length, set(here)) & set(here)

    def added(record: dict[str, Any]) -> dict[str, Any]:
        has = {(row[0], row[1]) for row in record["results"]}
        names = whole[record["measure"], record["tokens"]] - has
        here = found.get(_context(record), {})
        return record | {"results": record["results"] + [here[name] for name in sorted(names)]}

    return [item | {"records": [added(record) for record in item["records"]]} for item in items]


def rename(items: Items, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """``items`` whose variants have other names; words behind a name (``served``) stay."""
    return [
        item
        | {
            "records": [
                record | {"results": [[_renamed(row[0], names), *row[1:]] for row in rows]}
                for record in item["records"]
                for rows in (record["results"],)
            ]
        }
        for item in items
    ]


def _context(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(label) for label in _CONTEXT)


def _own(name: str) -> bool:
    return name.split(" ")[0].split("-")[0] == HySparseConfig.variant


def _renamed(name: str, names: Mapping[str, str]) -> str:
    variant, *words = name.split(" ")
    return " ".join((names.get(variant, variant), *words))


def _facts(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for meta in read_metas([path]):
        facts |= meta
    return facts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("earlier", type=Path)
    parser.add_argument("--later", type=Path)
    parser.add_argument("--add", type=Path, nargs="+", default=[])
    parser.add_argument("--rename", nargs="+", default=[], metavar="OLD=NEW")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    items, meta = read_items([options.earlier]), _facts(options.earlier)
    if options.rename:
        names = dict(pair.split("=") for pair in options.rename)
        items = rename(items, names)
        meta["configurations"] = [_renamed(name, names) for name in meta["configurations"]]
        meta["renamed"] = names
    if options.later:
        items = join(items, read_items([options.later]))
        later = _facts(options.later)
        dense, *others = (name for name in meta["configurations"] if not _own(name))
        ours = [name for name in later["configurations"] if _own(name)]
        meta["configurations"] = [dense, *ours, *others]
        meta["joined"] = {key: later[key] for key in _TOLD} | {"configurations": ours}
    if options.add:
        items = add(items, [item for path in options.add for item in read_items([path])])
        names = {
            f"{row[0]} {row[1]}" for item in items for x in item["records"] for row in x["results"]
        }
        meta["configurations"] += sorted(names - set(meta["configurations"]))
        meta["added"] = [{key: _facts(path)[key] for key in _TOLD} for path in options.add]
    lines = [json.dumps(line, separators=(",", ":")) for line in ({"meta": meta}, *items)]
    path = options.output.with_suffix(".jsonl")
    path.write_text("\n".join(lines) + "\n")
    write_report([path], options.output)


if __name__ == "__main__":
    main()
