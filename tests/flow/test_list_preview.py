"""A list is previewed as an ingest reads it, and nothing is stored."""

from typing import Any

import pytest

from conveyor.system import System
from tests.support.api import Api


async def preview(server: Api, text: str, **spec: Any) -> dict[str, Any]:
    shown = await server.post("/v1/lists/preview", {"text": text, **spec})
    assert shown.status == 200, shown.body
    found: dict[str, Any] = shown.json
    return found


async def test_tasks_and_invalid_lines_are_shown(server: Api, system: System) -> None:
    shown = await preview(server, "https://a.example/\n\nexample.com/b\nhttps://c.example/\n")
    assert (shown["format"], shown["task_count"], shown["invalid_count"]) == ("text", 2, 1)
    assert shown["tasks"] == [
        {"index": 0, "input": "https://a.example/"},
        {"index": 3, "input": "https://c.example/"},
    ]
    assert (shown["invalid"][0]["line"], "https://" in shown["invalid"][0]["reason"]) == (3, True)
    assert (await server.get("/v1/jobs")).json["items"] == []


async def test_a_csv_keeps_its_columns(server: Api) -> None:
    shown = await preview(server, "sku;Link\n7;https://a.example/\n", url_column="Link")
    assert shown["format"] == "csv"
    assert shown["tasks"][0]["input"] == {"url": "https://a.example/", "data": {"sku": "7"}}


async def test_the_last_line_of_a_cut_text_is_left_out(server: Api) -> None:
    text = "".join(f"https://a.example/{number}\n" for number in range(30)) + "https://a.exa"
    shown = await preview(server, text, is_cut=True)
    assert (len(shown["tasks"]), shown["task_count"], shown["invalid_count"]) == (20, 30, 0)


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ({"text": "PK\x03\x04rest"}, "list_unreadable"),
        ({"text": "a;b\n1;2\n", "url_column": "link"}, "list_unreadable"),
        ({"text": "x" * 70_000}, "invalid_field"),
        ({"text": "", "speed": 1}, "unknown_field"),
        ({}, "invalid_field"),
    ],
)
async def test_what_is_wrong_is_named(server: Api, spec: dict[str, Any], code: str) -> None:
    refused = await server.post("/v1/lists/preview", spec)
    assert (refused.status, refused.json["code"]) == (400, code), refused.body


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
async def test_a_list_without_tasks_has_none(server: Api, text: str) -> None:
    assert (await preview(server, text))["tasks"] == []
