"""Flush, pins, and what answers tell of cached tokens."""

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient


def test_flush_forgets_all_tiers_and_reports(client: TestClient, engine: FakeEngine) -> None:
    """(A18)"""
    response = client.post("/cache/flush")
    assert response.status_code == 200
    assert response.json() == {
        "freed_pages": 3,
        "held_pages": 1,
        "dropped_pins": 0,
        "tier_pages": 7,
    }
    assert engine.flushes == 1
    assert client.get("/cache/flush").status_code == 405


def test_prefix_is_pinned_for_its_tenant_and_unpinned(client: TestClient, engine) -> None:
    ids = tuple(client.post("/tokenize", json={"inputs": "good morning to you"}).json())
    salt = {"x-bicl-cache-salt": "a"}
    body = {"inputs": "good morning to you", "ttl_seconds": 60.0}
    answer = client.post("/cache/pin", json=body, headers=salt)
    assert answer.status_code == 200
    assert answer.json() == {"tokens": len(ids), "pinned_tokens": len(ids) // 2}
    ((pinned, whose), ttl) = engine.pins.copy().popitem()
    assert (len(pinned), whose, ttl) == (len(ids), "a", 60.0)
    assert client.post("/cache/unpin", json=body).json() == {"unpinned": False}
    assert client.post("/cache/unpin", json=body, headers=salt).json() == {"unpinned": True}
    assert not engine.pins


def test_pin_that_cannot_be_is_refused(client: TestClient) -> None:
    above = client.post("/cache/pin", json={"inputs": "a", "ttl_seconds": 13.0})
    assert (above.status_code, above.json()["error_type"]) == (422, "validation")
    assert "of at most 8" in above.json()["error"]
    assert client.post("/cache/pin", json={"inputs": "a", "ttl_seconds": -1.0}).status_code == 422


def test_flush_and_pin_need_the_api_key(make_client) -> None:
    client = make_client(api_key="sesame")
    assert client.post("/cache/flush").status_code == 401
    assert client.post("/cache/pin", json={"inputs": "a"}).status_code == 401
    headers = {"authorization": "Bearer sesame"}
    assert client.post("/cache/flush", headers=headers).status_code == 200


@pytest.mark.parametrize("host", [0, 128])
def test_cached_tokens_are_told_by_tier_where_they_left_the_device(
    client: TestClient, engine: FakeEngine, host: int
) -> None:
    engine.cached_tokens, engine.cached_host_tokens = 192, host
    by_tier = {"device": 192 - host, "host": host, "disk": 0} if host else None
    body = {"inputs": "hello", "parameters": {"details": True, "max_new_tokens": 2}}
    details = client.post("/generate", json=body).json()["details"]
    assert details["cached_tokens"] == 192
    assert details.get("cached_tokens_by_tier") == by_tier
    body = {"model": "m", "prompt": "hello", "max_tokens": 2}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"].get("cached_tokens_by_tier") == by_tier
