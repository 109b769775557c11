"""The tutorial, command by command, with a smaller million; and the how-tos that show what can be run in a moment."""

import json
import re
import sys
from pathlib import Path

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from tests.docs.blocks import DOCS, ROOT, all_blocks
from tests.docs.terminal import terminal
from tests.docs.tutorial_page import PAGES, run_tutorial


def test_the_tutorial(tmp_path: Path) -> None:
    demo = f"--pages {PAGES} --data {tmp_path / 'demo-data'}"
    there = " ".join(f"-o {sys.prefix}/.installed-{name}" for name in ("run", "dev"))
    # The environment is there already; the rest of it is as a reader types it.
    make = f"make --no-print-directory -C {ROOT} {there} demo VENV={sys.prefix} ARGS='{demo}'"
    run_tutorial(tmp_path, Path(sys.prefix), make)


def test_from_a_csv_to_a_parquet_file_in_five_commands(tmp_path: Path) -> None:
    page = DOCS / "how-to" / "csv.md"
    assert re.findall(r"^(\d)\\\. ", page.read_text(), re.M) == ["1", "2", "3", "4", "5"]
    replaced = {
        # The environment is there already.
        "make demo": "true",
        ". .venv/bin/activate": f". {sys.prefix}/bin/activate",
        "pip install --quiet -r requirements/parquet.txt": f"test -s {ROOT}/requirements/parquet.txt",
    }
    assert all(said in page.read_text() for said in replaced)
    with terminal(tmp_path, replaced) as here:
        printed = here.run_page(page)
    assert "Skipped    1 invalid line" in printed
    assert "{'SKU': 'A-1', 'Price': '9.50', 'http_status': 200" in printed
    assert "'Price': '7', 'http_status': 404" in printed


def test_the_signature_is_verified_as_the_page_says() -> None:
    [block] = [block for block in all_blocks("python") if block.page.name == "webhooks.md"]
    names: dict[str, object] = {}
    exec(compile(block.code, block.place, "exec"), names)
    receive = names["receive"]
    assert callable(receive)

    from conveyor.clock import SystemClock
    from conveyor.model import TenantId
    from conveyor.notify.signatures import signed_headers, tenant_secret

    secret = tenant_secret(b"x" * 32, TenantId("acme"))
    body = json.dumps({"type": "run.completed", "data": {}}).encode()
    headers = dict(signed_headers([secret], "evt_1", int(SystemClock().now()), body))
    assert receive(body, headers, secret)["type"] == "run.completed"
    assert Webhook(secret).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        receive(body + b" ", headers, secret)
