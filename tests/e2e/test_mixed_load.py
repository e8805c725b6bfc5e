"""The example of two deployments behind one gateway: chat is sparse, documents are not."""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from bicl.config import ServerConfig, settings

FOLDER = Path(__file__).parents[2] / "deploy" / "mixed"
CONF = (FOLDER / "nginx.conf").read_text()


def compose() -> dict:
    return yaml.safe_load((FOLDER / "docker-compose.yml").read_text())


def manifests() -> list[dict]:
    return list(yaml.safe_load_all((FOLDER / "k8s.yaml").read_text()))


def config_of(words: list[str]) -> ServerConfig:
    """What `bicl serve` makes of a command line."""
    known = {setting.flag: setting for setting in settings()}
    flags = {}
    for word in words:
        flag, _, value = word.partition("=")
        setting = known[flag]
        flags[setting.name] = setting.parse(value or "true")
    return ServerConfig.from_sources(flags, {})


def commands() -> list[dict[str, list[str]]]:
    services = compose()["services"]
    pods = {
        document["metadata"]["name"]: document["spec"]["template"]["spec"]["containers"][0]
        for document in manifests()
        if document["kind"] == "Deployment"
    }
    return [
        {name: services[name]["command"] for name in ("chat", "documents")},
        {name: pods[name]["args"] for name in ("chat", "documents")},
    ]


@pytest.mark.parametrize("which", [0, 1], ids=["compose", "kubernetes"])
def test_chat_is_sparse_and_documents_are_not(which: int) -> None:
    found = {name: config_of(words) for name, words in commands()[which].items()}
    hysparse = found["chat"].hysparse.resolve()
    assert hysparse is not None
    assert hysparse.sparsity_ratio == 0.7
    assert found["documents"].hysparse.resolve() is None
    assert found["documents"].cache.block_size == "64"


def test_the_gateway_knows_both_and_chooses_by_size_or_header() -> None:
    assert set(re.findall(r"server (\w+):8080", CONF)) == {"chat", "documents"}
    (pattern,) = re.findall(r'"~(\^\(\S+\$)"\s+documents;', CONF)
    chosen = {size: bool(re.match(pattern, size)) for size in ("0", "99999", "100000", "8000000")}
    assert chosen == {"0": False, "99999": False, "100000": True, "8000000": True}
    assert "map $http_x_workload $workload" in CONF


def test_manifests_fit_the_schemas_and_carry_the_same_gateway() -> None:
    for document in manifests():
        kubernetes_validate.validate(document, "1.30", strict=True)
    (config,) = [document for document in manifests() if document["kind"] == "ConfigMap"]
    assert config["data"]["nginx.conf"] == CONF
