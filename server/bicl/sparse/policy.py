"""How much may be left out of which kind of text."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["RATIO_SHARES", "classify"]

RATIO_SHARES: Mapping[str, float] = {
    "chat": 1.0,
    "news": 1.0,
    "other": 1.0,
    "code": 0.85,
    "legal": 0.85,
}
"""Share of the configured ratio that a kind of text gets: never more than was configured. Code and
law are full of references whose target one token decides."""

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
