"""Flags and environment to settings."""

import pytest

from bicl.cache.settings import BLOCK_SIZES, KVCacheConfig, parse_memory
from bicl.config import ServerConfig, settings
from bicl.errors import ConfigError
from bicl.settings import REFUSED_SETTINGS

MODEL = {"model_id": "m"}


def from_sources(flags: dict | None = None, environ: dict | None = None) -> ServerConfig:
    return ServerConfig.from_sources(MODEL | (flags or {}), environ or {})


def test_defaults_are_tgis() -> None:
    config = from_sources()
    assert (config.port, config.hostname) == (3000, "0.0.0.0")
    assert config.max_concurrent_requests == 128
    assert (config.max_best_of, config.max_stop_sequences, config.max_top_n_tokens) == (2, 4, 5)
    assert (config.max_client_batch_size, config.payload_limit) == (4, 2_000_000)
    assert (config.validation_workers, config.graceful_termination_timeout) == (2, 90)


def test_a_flag_wins_over_the_environment_and_the_environment_over_the_default() -> None:
    environ = {"PORT": "81", "MAX_BEST_OF": "7", "TRUST_REMOTE_CODE": "true"}
    config = from_sources({"port": 82}, environ)
    assert (config.port, config.max_best_of, config.trust_remote_code) == (82, 7, True)
    assert from_sources({}, environ).port == 81


def test_an_empty_variable_is_none_at_all() -> None:
    assert from_sources({}, {"PORT": "", "DTYPE": "", "NUM_SHARD": ""}).port == 3000


@pytest.mark.parametrize(
    "environ", [{"PORT": "x"}, {"TRUST_REMOTE_CODE": "yes"}, {"WAITING_SERVED_RATIO": "a"}]
)
def test_a_variable_that_does_not_parse_is_named(environ: dict) -> None:
    (name,) = environ
    with pytest.raises(ConfigError, match=name):
        from_sources({}, environ)


def test_a_machine_name_in_hostname_is_not_an_address() -> None:
    assert from_sources({}, {"HOSTNAME": "pod-7f9c"}).hostname == "0.0.0.0"
    assert from_sources({}, {"HOSTNAME": "127.0.0.1"}).hostname == "127.0.0.1"
    assert from_sources({"hostname": "localhost"}).hostname == "localhost"


def test_unknown_variables_of_ours_are_errors_that_list_the_known() -> None:
    with pytest.raises(ConfigError, match=r"BICL_BLOKSIZE.*BICL_BLOCK_SIZE"):
        from_sources({}, {"BICL_BLOKSIZE": "64"})
    from_sources({}, {"BICL_BLOCK_SIZE": "32", "BICL_DISABLE": "1", "OTHER": "x"})


@pytest.mark.parametrize("size", ["16", "48", "100", "128", "256"])
def test_a_block_size_that_no_kernel_takes_is_refused_with_the_list(size: str) -> None:
    """(A47)"""
    with pytest.raises(ConfigError, match="use one of 32, 64, auto"):
        from_sources({"block_size": size})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("kv_cache_dtype", "int8"),
        ("dtype", "fp8"),
        ("device", "tpu"),
        ("cuda_graphs", "1,2,4"),
        ("port", 70_000),
        ("max_concurrent_requests", 0),
        ("max_stop_sequences", -1),
        ("num_threads", 0),
        ("cache_memory", "much"),
        ("cache_memory", "0"),
    ],
)
def test_a_value_out_of_range_is_refused_and_named(flag: str, value: object) -> None:
    with pytest.raises(ConfigError, match="--" + flag.replace("_", "-")):
        from_sources({flag: value})


@pytest.mark.parametrize("flag", sorted(REFUSED_SETTINGS))
def test_flags_that_make_no_sense_here_are_refused_with_a_reason(flag: str) -> None:
    with pytest.raises(ConfigError, match="cannot be honoured") as raised:
        from_sources({flag: "something"})
    assert REFUSED_SETTINGS[flag] in str(raised.value)


def test_refused_settings_count_from_the_environment_too_unless_neutral() -> None:
    with pytest.raises(ConfigError, match="QUANTIZE=awq"):
        from_sources({}, {"QUANTIZE": "awq"})
    from_sources({}, {"NUM_SHARD": "1", "SHARDED": "false", "MASTER_ADDR": "10.0.0.1"})


def test_no_model_says_how_to_name_one() -> None:
    with pytest.raises(ConfigError, match="--model-id bundled"):
        ServerConfig.from_sources({}, {})


@pytest.mark.parametrize(
    "flags",
    [
        {"max_input_tokens": 100, "max_total_tokens": 100},
        {"max_input_tokens": 10, "max_input_length": 10},
        {"max_total_tokens": 100, "max_batch_total_tokens": 99},
        {"max_batch_total_tokens": 99, "cache_memory": "1GiB"},
    ],
)
def test_limits_that_contradict_each_other_are_refused(flags: dict) -> None:
    with pytest.raises(ConfigError):
        from_sources(flags)


def test_limits_are_filled_in_from_the_model_into_a_new_object() -> None:
    config = from_sources()
    resolved = config.resolve(max_position=2048)
    assert config.max_total_tokens is None
    assert (resolved.max_input_tokens, resolved.max_total_tokens) == (2047, 2048)
    assert resolved.max_batch_prefill_tokens == 2097
    assert resolved.resolve(2048) == resolved
    long = from_sources().resolve(max_position=131_072)
    assert long.max_batch_prefill_tokens == 4096


def test_the_older_name_of_max_input_tokens_works() -> None:
    resolved = from_sources({"max_input_length": 17}).resolve(64)
    assert (resolved.max_input_tokens, resolved.max_input_length) == (17, None)


@pytest.mark.parametrize("flags", [{"max_total_tokens": 65}, {"max_input_tokens": 64}])
def test_limits_beyond_the_models_positions_are_refused(flags: dict) -> None:
    with pytest.raises(ConfigError, match="64"):
        from_sources(flags).resolve(max_position=64)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "total", "expected"),
    [
        ("auto", 64, 8192, 64),
        ("auto", 128, 8192, 64),
        ("auto", 96, 8192, 32),
        ("auto", 160, 8192, 32),
        ("auto", 224, 8192, 64),
        ("auto", 80, 8192, 64),
        ("auto", 64, 256, 32),
        ("32", 128, 8192, 32),
        ("64", 96, 8192, 64),
    ],
)
def test_auto_block_size_follows_head_dim_and_length(
    block_size: str, head_dim: int, total: int, expected: int
) -> None:
    assert KVCacheConfig(block_size=block_size).page_size(head_dim, total) == expected


@pytest.mark.parametrize(
    ("block_size", "head_dim", "expected"),
    [
        ("auto", 64, 32),
        ("auto", 128, 32),
        ("auto", 80, 32),
        ("auto", 256, 32),
        ("auto", 224, 64),  # no kernel for seven tiles of 32
        ("64", 128, 64),
        ("32", 128, 32),
    ],
)
def test_auto_takes_small_pages_where_they_are_chosen(
    block_size: str, head_dim: int, expected: int
) -> None:
    config = KVCacheConfig(block_size=block_size)
    assert config.page_size(head_dim, 8192, chooses_pages=True) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1024", 1024),
        ("1k", 1000),
        ("2KiB", 2048),
        ("1.5GiB", 3 * 2**29),
        ("3 MB", 3_000_000),
        ("10%", 10**9),
    ],
)
def test_memory_is_read_with_units_or_as_a_share(text: str, expected: int) -> None:
    assert parse_memory(text, free_bytes=10**10) == expected


def test_more_memory_than_is_free_is_refused_with_both_numbers() -> None:
    """(A36)"""
    with pytest.raises(ConfigError, match=r"needs 2048 bytes.*1000 are free.*fits is 1000"):
        parse_memory("2KiB", free_bytes=1000)


def test_flags_without_effect_are_reported() -> None:
    config = from_sources({"max_waiting_tokens": 20})
    assert config.settings_without_effect == ("--max-waiting-tokens",)
    assert from_sources().settings_without_effect == ()


def test_every_setting_has_help_a_variable_and_a_plain_type() -> None:
    every = list(settings())
    assert len({each.env for each in every}) == len(every)
    for each in every:
        assert each.help.endswith((".", "`."))
        assert each.type in (str, int, float, bool)
        assert not set(REFUSED_SETTINGS) & {each.name}
    assert next(each for each in every if each.name == "block_size").choices == BLOCK_SIZES
