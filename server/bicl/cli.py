"""The command line: ``bicl serve``, ``doctor``, ``chaos``, ``selftest``, ``--version``."""

from __future__ import annotations

import inspect
import os
import sys
from importlib.util import find_spec
from typing import Annotated, Any

import typer

import bicl
from bicl.cli_hysparse import app as hysparse
from bicl.config import ServerConfig, settings
from bicl.errors import BiclError, ConfigError
from bicl.settings import REFUSED_SETTINGS, Setting

__all__ = ["app", "main"]

app = typer.Typer(
    help="A KV cache of tensor-core-ready tiles: serve a model, or ask what this machine can run.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its table cuts long flag names off
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_VALUELESS = frozenset({"ngrok", "disable_custom_kernels"})


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bicl {bicl.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_show_version, is_eager=True, help="Show version."
        ),
    ] = False,
) -> None:
    pass


def _serve(**flags: object) -> None:
    """Serve a model over HTTP with text-generation-inference's API.

    Every flag can come from the environment, under the name in brackets; a flag wins.
    """
    config = ServerConfig.from_sources(flags)
    if config.huggingface_hub_cache is not None:
        os.environ["HF_HUB_CACHE"] = config.huggingface_hub_cache  # read when the hub is imported
    if config.json_output or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars are for people
    from bicl.frontends.http.serve import serve  # loads torch: not for --help

    serve(config)


def _option(setting: Setting) -> inspect.Parameter:
    shown = "" if setting.default in (None, "", False) else f" Default: {setting.default}."
    names = [setting.flag, *setting.aliases]
    if setting.type is bool and setting.default is True:
        names[0] = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
    option = typer.Option(
        *names,
        help=f"{setting.help}{shown} [{setting.env}]",
        show_default=False,
        metavar="|".join(setting.choices) if setting.choices else None,
    )
    return _parameter(setting.name, setting.type, option)


def _refused_option(name: str) -> inspect.Parameter:
    option = typer.Option("--" + name.replace("_", "-"), hidden=True)
    return _parameter(name, bool if name in _VALUELESS else str, option)


def _parameter(name: str, kind: type, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


# The settings are listed once, in bicl.config; the command's signature is made from that list.
_serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_option(setting) for setting in settings()]
    + [_refused_option(name) for name in REFUSED_SETTINGS]
)
app.command("serve")(_serve)


app.add_typer(hysparse, name="hysparse")


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this machine can run, and why not. Exits 1 if it cannot serve."""
    from bicl.doctor import examine, print_report

    report = examine()
    print_report(report, as_json=json)
    raise typer.Exit(0 if report.usable else 1)


@app.command()
def chaos(
    cases: Annotated[
        list[str] | None, typer.Argument(help="Names of cases; default: all.", show_default=False)
    ] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Name the cases, run none.")] = False,
    device: Annotated[str, typer.Option(help="cpu, where equal tokens are asked for.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of prompts and of random faults.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a case.")] = False,
) -> None:
    """Break the embedded server on purpose and hold its answers against cold runs: tiers that are
    late, short or corrupt, kills, cancels, other tenants and weights. Exits 1 if a case fails."""
    from bicl.frontends.http.chaos.cases import CASES  # loads torch: not for --help
    from bicl.frontends.http.chaos.command import run

    if list_cases:
        typer.echo("\n".join(CASES))
    elif not run(cases or [], device=device, seed=seed, as_json=json):
        raise typer.Exit(1)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def selftest(context: typer.Context) -> None:
    """Drive TGI's real shard with our cache in place, where TGI is installed (in its image)."""
    if find_spec("text_generation_server") is None:
        raise ConfigError(
            "text_generation_server cannot be imported here; the self-test belongs into an image "
            "of text-generation-inference"
        )
    command = [sys.executable, "-m", "bicl.frontends.tgi.selftest", *context.args]
    os.execv(sys.executable, command)


def main() -> None:
    """Entry point; errors that we raise on purpose are one line, not a traceback."""
    try:
        app()
    except BiclError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise SystemExit(1) from None
