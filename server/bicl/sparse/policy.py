"""How much may be left out of which kind of text, and how much of its end is always read."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from bicl.errors import ConfigError

__all__ = ["KIND_RULES", "KindRule", "classify", "parse_kind_rules"]


@dataclass(frozen=True)
class KindRule:
    """What a kind of text gets, never less careful than was configured for all.

    Attributes:
        share: of the configured ratio.
        windows: newest windows of 64 tokens that are always read; 0: as many as of any text.
    """

    share: float = 1.0
    windows: int = 0


KIND_RULES: Mapping[str, KindRule] = {
    "chat": KindRule(),
    "news": KindRule(),
    "other": KindRule(),
    "code": KindRule(share=0.85),
    "legal": KindRule(share=0.85),
}
"""Code and law are full of references whose target one token decides. All have the same newest
windows, because none was found to gain by more (``python -m bench.hysparse.recent``)."""

_RULE = re.compile(r"(\w+)=(\d*\.?\d+)(?::(\d+))?")


@functools.cache
def parse_kind_rules(text: str) -> Mapping[str, KindRule]:
    """:data:`KIND_RULES` with changes such as ``code=0.8:4,chat=0.9``: a kind's share, and its
    windows if it is to have its own.

    Raises:
        ConfigError: naming the part, what is allowed and how to write it.
    """
    rules = dict(KIND_RULES)
    for part in text.replace(" ", "").split(",") if text else ():
        match = _RULE.fullmatch(part)
        if match is None or match[1] not in KIND_RULES:
            raise ConfigError(
                f"kind_rules {part!r} is not KIND=SHARE or KIND=SHARE:WINDOWS with a kind of "
                f"{', '.join(KIND_RULES)}; write code=0.85:4, say"
            )
        share = float(match[2])
        if share > 1.0:
            raise ConfigError(
                f"kind_rules {part!r}: a kind gets a share of 0 (dense) to 1 of the ratio, never "
                "more than was configured; raise sparsity_ratio instead"
            )
        rules[match[1]] = KindRule(share, int(match[3] or 0))
    return rules


SAMPLE_CHARACTERS = 20_000

_CODE = re.compile(
    r"^\s*(?:def |class |import |from \w+ import|#include|public |private |function |const |let |"
    r"var |return\b|if ?\(|for ?\(|while ?\(|fn |func |package |using |SELECT |</?\w+[^>]*>\s*$|"
    r"[\w.\[\]\"']+\s*=[^=].*|.*(?:[;{}]|\):|\(|\),)\s*$|self\.|//|/\*|\"\w+\":)",
    re.MULTILINE,
)
_LEGAL = re.compile(
    r"\b(?:hereby|herein\w*|hereto|thereof|thereto|whereas|pursuant to|notwithstanding|shall|"
    r"plaintiff|defendant|appellant|respondent|indemnif\w+|covenant\w*|jurisdiction|"
    r"the (?:Company|Parties|Court|Agreement|Licensee|Licensor)|U\.S\.C\.|§|"
    r"[Ll]icen[cs](?:es?|ed|ing|ors?|ees?)|[Ww]arrant(?:y|ies)|[Ll]iab(?:le|ility|ilities)|"
    r"[Cc]opyright\w*|[Tt]erms and [Cc]onditions)\b",
)
_CHAT = re.compile(
    r"<\|?(?:im_start|start_header_id|user|assistant|start_of_turn|eot)|\[/?INST\]|"
    r"^\s*(?:(?i:user|assistant|human|system):\s|[A-Z][a-z]+: .*\n+\s*[A-Z][a-z]+: )",
    re.MULTILINE,
)
_NEWS = re.compile(
    r"\b(?:said|told reporters|according to|announced|reported|spokes\w+|officials?|percent|"
    r"Reuters|AP|Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday)\b"
)


def classify(text: str) -> str:
    """``code``, ``legal``, ``chat``, ``news`` or ``other``, by counts of telling words and lines.

    A chat about code is code, because what it quotes decides.
    """
    sample = text[:SAMPLE_CHARACTERS]
    lines = [line for line in sample.splitlines() if line.strip()]
    words = len(sample.split())
    if not lines or not words:
        return "other"
    if sum(bool(_CODE.match(line)) for line in lines) >= 0.25 * len(lines) and len(lines) > 3:
        return "code"
    if len(_LEGAL.findall(sample)) >= 0.012 * words:
        return "legal"
    if _CHAT.search(sample):
        return "chat"
    return "news" if len(_NEWS.findall(sample)) >= 0.012 * words else "other"
