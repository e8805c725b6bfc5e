"""Dashboards and alerts ask only for metrics that the server has."""

import json
import re
from pathlib import Path

import pytest
import yaml

from bicl.frontends.http.engine.config import EngineStats
from bicl.frontends.tgi import prefixes
from bicl.metrics import CacheFacts, ServerMetrics

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def metric_names() -> set[str]:
    metrics = ServerMetrics(1024, 2048)
    metrics.attach(EngineStats, CacheFacts(2048, True, {"version": "x"}, ("some fall-back",)))
    served = set(re.findall(r"^([a-z_]+)[ {]", metrics.render().decode(), re.MULTILINE))
    return served | {f"{name}_total" for name in prefixes._read()}  # a TGI shard's own


def asked_for(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:tgi|bicl)_[a-z_]+", expression))


def test_dashboard_panels_ask_for_metrics_that_exist(metric_names: set[str]) -> None:
    board = json.loads((DEPLOY / "grafana/dashboards/bicl.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            names = asked_for(target["expr"])
            assert names, panel["title"]
            assert names <= metric_names, panel["title"]


def test_alerts_ask_for_metrics_that_exist(metric_names: set[str]) -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        assert asked_for(rule["expr"]), rule["alert"]
        assert asked_for(rule["expr"]) <= metric_names, rule["alert"]
