"""The command line: help, versions, errors, and flags on their way to the server."""

import sys

import pytest
from typer.testing import CliRunner

import bicl
from bicl import cli
from bicl.config import ServerConfig, settings
from bicl.settings import REFUSED_SETTINGS


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """What `serve` would have been called with."""
    calls: list[ServerConfig] = []
    monkeypatch.setattr("bicl.frontends.http.serve.serve", calls.append)
    for each in settings():
        monkeypatch.delenv(each.env, raising=False)
    return calls


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.output


def test_version() -> None:
    assert run("--version") == (0, f"bicl {bicl.__version__}\n")


def test_help_shows_every_flag_with_its_variable() -> None:
    code, text = run("serve", "--help")
    assert code == 0
    joined = "".join(text.split())
    for each in settings():
        assert each.flag in text
        assert f"[{each.env}]" in joined
    assert "--num-shard" not in text


def test_every_setting_can_be_given_as_a_flag(served: list[ServerConfig]) -> None:
    code, text = run(
        "serve",
        "--model-id=m",
        "-p",
        "81",
        "-g",
        "5",
        "--block-size=32",
        "--kv-cache-dtype=fp8_e4m3fn",
        "--trust-remote-code",
        "--no-enable-prefill-logprobs",
        "--disable-prefix-caching",
        "--max-total-tokens=100",
    )
    assert code == 0, text
    (config,) = served
    assert (config.port, config.graceful_termination_timeout) == (81, 5)
    assert (config.cache.block_size, config.cache.kv_cache_dtype) == ("32", "fp8_e4m3fn")
    assert config.trust_remote_code
    assert not config.enable_prefill_logprobs
    assert config.cache.disable_prefix_caching
    assert config.max_total_tokens == 100


def test_flags_come_from_the_environment_too(
    served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_ID", "from-env")
    monkeypatch.setenv("MAX_CONCURRENT_REQUESTS", "9")
    assert run("serve")[0] == 0
    assert (served[0].model_id, served[0].max_concurrent_requests) == ("from-env", 9)


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bicl", *arguments])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    return int(raised.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve"], "no model: give --model-id"),
        (["serve", "--model-id=m", "--block-size=48"], "use one of 32, 64, auto"),
        (["serve", "--model-id=m", "--quantize=awq"], "--quantize=awq cannot be honoured"),
        (["serve", "--model-id=m", "--ngrok"], "--ngrok=True cannot be honoured"),
    ],
)
def test_our_errors_are_one_line_on_stderr_and_status_1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: list[ServerConfig],
    arguments: list[str],
    text: str,
) -> None:
    assert main(monkeypatch, *arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert text in captured.err
    assert served == []


@pytest.mark.parametrize("flag", sorted(REFUSED_SETTINGS))
def test_every_refused_flag_is_known_and_refused(served: list[ServerConfig], flag: str) -> None:
    arguments = ["--" + flag.replace("_", "-")]
    if flag not in ("ngrok", "disable_custom_kernels"):
        arguments.append("something")
    code, _ = run("serve", "--model-id=m", *arguments)
    assert code == 1
    assert served == []


def test_a_flag_that_does_not_exist_is_a_usage_error() -> None:
    code, text = run("serve", "--model-id=m", "--no-such-flag")
    assert code == 2
    assert "--no-such-flag" in text


def test_the_hub_cache_reaches_the_library_before_it_is_imported(
    served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    import os

    monkeypatch.setenv("HF_HUB_CACHE", "before")
    run("serve", "--model-id=m", f"--huggingface-hub-cache={tmp_path}")
    assert os.environ["HF_HUB_CACHE"] == str(tmp_path)
