"""Our flags beside TGI's: what they are, and how a command line is divided between the two."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bicl.errors import ConfigError
from bicl.settings import Setting, settings_of
from bicl.sparse.settings import HySparseSettings

__all__ = ["OUR_FLAGS", "CommandLine", "Flag", "describe_flags", "is_set", "split"]


@dataclass(frozen=True)
class Flag:
    """One of our flags.

    Attributes:
        choices: allowed values; empty for a switch, and where ``metavar`` stands for any value.
        env: the variable that carries the value to the shards, and may set it.
        help: one sentence.
    """

    name: str
    help: str
    choices: tuple[str, ...] = ()
    env: str = ""
    metavar: str = ""

    @property
    def takes_value(self) -> bool:
        return bool(self.choices or self.metavar)


def _flag_of(setting: Setting) -> Flag:
    """A setting that the embedded server has, too: same name, variable and meaning."""
    metavar = "" if setting.choices or setting.type is bool else setting.type.__name__.upper()
    return Flag(setting.flag, setting.help, setting.choices, setting.env, metavar=metavar)


OUR_FLAGS = (
    Flag(
        "--flash-attn-version",
        "3: attention over BICL pages. 2: text-generation-inference's own, without BICL. "
        "Default: 3.",
        ("2", "3"),
    ),
    Flag(
        "--block-size",
        "Tokens a page. auto: 64; 32 where 64 would pad the head dimension and 32 would not, or "
        "for requests of at most 256 tokens. Default: auto.",
        ("32", "64", "auto"),
        "BICL_BLOCK_SIZE",
    ),
    Flag(
        "--deterministic",
        "Attention that does not depend on who shares the batch; a few percent slower.",
        env="BICL_DETERMINISTIC",
    ),
    *map(_flag_of, settings_of("hysparse", HySparseSettings)),
    Flag(
        "--host-cache-size",
        "Host memory for prefixes that leave the GPU, of all shards together: 64GiB, 50% of the "
        "free memory, 0 for none. Default: 0.",
        env="BICL_HOST_CACHE_SIZE",
        metavar="SIZE",
    ),
    Flag(
        "--disk-cache-dir",
        "Folder for prefixes on a local disk, below the host memory; found again after a restart.",
        env="BICL_DISK_CACHE_DIR",
        metavar="FOLDER",
    ),
    Flag(
        "--disk-cache-size",
        "Size of the prefixes in --disk-cache-dir: 500GiB, or 50% of the free space.",
        env="BICL_DISK_CACHE_SIZE",
        metavar="SIZE",
    ),
)
_BY_NAME = {flag.name: flag for flag in OUR_FLAGS}
VARIABLES = {
    "BICL_DISABLE=1": "Start text-generation-inference as it is, without BICL.",
    "BICL_METRICS_PORT=<PORT>": "Shard r serves its counters at PORT + r, /metrics.",
    "BICL_VERIFY_PREFIXES=0": "Trust the router's claims of cached prefixes.",
    "BICL_DEBUG_POISON=1": "Fill new pages with NaN, so that a read of an unwritten slot shows.",
    "BICL_SITE_PACKAGES=<FOLDER>": "Where the installed overlay is looked for.",
}
"""What no flag says."""


@dataclass(frozen=True)
class CommandLine:
    """A command line, divided.

    Attributes:
        ours: value of each of our flags that was given.
        theirs: what the real launcher gets, untouched and in order.
        environ: in which TGI's launcher finds what the command line does not say.
    """

    ours: Mapping[str, str]
    theirs: tuple[str, ...]
    environ: Mapping[str, str]

    def our(self, name: str, default: str = "") -> str:
        """A flag's value; the environment's where the command line is silent.

        Raises:
            ConfigError: the environment's is not allowed.
        """
        found = self.ours.get(name)
        if found is not None:
            return found
        flag = _BY_NAME[name]
        text = self.environ.get(flag.env, "")
        return _from_environment(flag, text) if text else default

    def their(self, name: str) -> str | None:
        """The value that TGI's launcher will see for one of its flags, by its own rules."""
        for i, word in enumerate(self.theirs):
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
            if word == name:
                following = self.theirs[i + 1 : i + 2]
                return following[0] if following and not following[0].startswith("-") else ""
        return self.environ.get(name.removeprefix("--").replace("-", "_").upper())


def split(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> CommandLine:
    """Take our flags out of a command line.

    Raises:
        ConfigError: a value is missing or not allowed.
    """
    ours: dict[str, str] = {}
    theirs: list[str] = []
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=")
        flag = _BY_NAME.get(name)
        if flag is None:
            theirs.append(word)
            continue
        if not has_value:
            value = next(words, "") if flag.takes_value else "true"
        ours[name] = _checked(flag, value)
    return CommandLine(ours, tuple(theirs), environ)


def _checked(flag: Flag, value: str) -> str:
    if flag.metavar:
        if not value:
            raise ConfigError(f"{flag.name} needs a value")
        return value
    allowed = flag.choices or ("true", "false")
    if value not in allowed:
        raise ConfigError(f"{flag.name} {value!r} is not supported; use one of {list(allowed)}")
    return value


def _from_environment(flag: Flag, text: str) -> str:
    if not flag.takes_value:
        return "true" if is_set(flag.env, text) else "false"
    if flag.choices and text not in flag.choices:
        raise ConfigError(f"{flag.env} is {text!r}; use one of {list(flag.choices)}")
    return text


def is_set(name: str, text: str) -> bool:
    """A switch in the environment; a word that is neither yes nor no is refused, not taken for
    one of them."""
    if text.lower() not in ("", "0", "1", "false", "true"):
        raise ConfigError(f"{name} is {text!r}; use 1 or 0")
    return text.lower() in ("1", "true")


def describe_flags() -> str:
    """Help text of our flags."""
    lines = ["BICL's own options (in front of text-generation-launcher):", ""]
    for flag in OUR_FLAGS:
        values = f" <{flag.metavar or '|'.join(flag.choices)}>" if flag.takes_value else ""
        env = f" [env: {flag.env}]" if flag.env else ""
        lines += [f"      {flag.name}{values}", f"          {flag.help}{env}", ""]
    lines += ["Only in the environment:", ""]
    for variable, text in VARIABLES.items():
        lines += [f"      {variable}", f"          {text}", ""]
    return "\n".join(lines).rstrip()
