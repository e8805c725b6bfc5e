"""Grammars are not used here."""


class RegexGuide:
    pass
