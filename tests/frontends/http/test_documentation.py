"""``docs/http.md`` lists what the code has: unsupported fields, metrics, routes, flags."""

import re
from pathlib import Path

from fake_engine import FakeEngine
from starlette.testclient import TestClient

from bicl.config import settings
from bicl.frontends.http.unsupported import UNSUPPORTED
from bicl.settings import Setting

TEXT = (Path(__file__).parents[3] / "docs" / "http.md").read_text()


def test_every_unsupported_field_is_listed_with_its_routes() -> None:
    table = TEXT.split("## What is not supported")[1].split("## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE))
    for item in UNSUPPORTED:
        assert set(re.findall(r"`(.+?)`", rows.pop(item.field))) == set(item.routes)
    assert set(rows) == {"suffix", "image_url"}  # refused elsewhere, tested there


def test_every_metric_of_ours_is_listed_and_no_other(
    client: TestClient, engine: FakeEngine
) -> None:
    listed = set(re.findall(r"\bbicl_[a-z_]+", TEXT))
    names = re.findall(r"^# TYPE (bicl_\w+) ", client.get("/metrics").text, re.MULTILINE)
    assert listed == set(names)


def test_every_route_is_listed(client: TestClient) -> None:
    table = TEXT.split("## Routes")[1].split("Errors are")[0]
    listed = set(re.findall(r"`(?:POST |GET )?(/[\w/]*)`", table)) | {"/ping"}
    paths = set(client.get("/api-doc/openapi.json").json()["paths"])
    assert paths <= listed
    assert listed - paths == {"/ping"}


def row(setting: Setting) -> str:
    names = ", ".join(f"`{name}`" for name in (setting.flag, *setting.aliases))
    default = str(setting.default).lower() if setting.type is bool else setting.default
    shown = "" if default in (None, "") else f" `{default}`"
    return f"| {names} | `{setting.env}` |{shown} | {setting.help} |"


def test_every_flag_is_listed_as_help_has_it() -> None:
    """Those of HySparse are in ``docs/hysparse.md``."""
    table = TEXT.split("## Flags")[1].split("\n## ")[0]
    rows = [row(setting) for setting in settings() if setting.owner != "hysparse"]
    assert [line for line in table.splitlines() if line.startswith("| `")] == rows
