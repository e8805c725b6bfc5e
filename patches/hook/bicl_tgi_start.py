"""Runs at the start of every Python process: from a .pth file in TGI's image, from PYTHONPATH in
tests. Standard library only, because nothing else is certain to be there yet.

It waits until text_generation_server is imported and then puts BICL in. TGI swallows an ImportError
of its attention modules and serves slowly without saying so; therefore whatever goes wrong here
ends the process.
"""

import os
import sys
from pathlib import Path

_PACKAGE = "text_generation_server"
_HERE = Path(__file__).resolve().parent
_SWITCH = os.environ.get("BICL_DISABLE", "").lower()
_ON, _OFF = ("1", "true"), ("", "0", "false")


class _Trigger:
    """Passes every import on; the first one of TGI's package installs the hook."""

    waiting = True

    def find_spec(self, name, path=None, target=None):
        if name == _PACKAGE and self.waiting:
            self.waiting = False
            _install()
        return


def _install() -> None:
    try:
        if _SWITCH not in _OFF:
            raise ValueError(f"BICL_DISABLE is {_SWITCH!r}; use 1 or 0")
        from bicl.frontends.tgi.hook import install

        install(_patches())
    except BaseException as error:
        print(
            f"bicl: the KV cache could not be put into text-generation-inference: "
            f"{type(error).__name__}: {error}; BICL_DISABLE=1 starts it without BICL",
            file=sys.stderr,
            flush=True,
        )
        os._exit(78)  # EX_CONFIG


def _patches() -> Path:
    """The installed copy beside this file, or the source tree's patches/."""
    installed = _HERE / "bicl_tgi_patches"
    return installed if installed.is_dir() else _HERE.parent


if _SWITCH not in _ON:
    sys.meta_path.insert(0, _Trigger())
