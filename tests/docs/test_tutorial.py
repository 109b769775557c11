"""The tutorial, command by command, with a smaller million; and the how-tos that show what can be run in a moment."""

import gzip
import json
import re
import sys
import zipfile
from pathlib import Path

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from tests.docs.blocks import DOCS, ROOT, all_blocks
from tests.docs.terminal import terminal

MILLION = 3000


def test_the_tutorial(tmp_path: Path) -> None:
    demo = f"--pages 300 --data {tmp_path / 'demo-data'}"
    there = " ".join(f"-o {sys.prefix}/.installed-{name}" for name in ("run", "dev"))
    replaced = {
        # The environment is there already; the rest of it is as a reader types it.
        "make demo": f"make --no-print-directory -C {ROOT} {there} demo VENV={sys.prefix} ARGS='{demo}'",
        ". .venv/bin/activate": f". {sys.prefix}/bin/activate",
        "N=1000000": f"N={MILLION}",
    }
    page = DOCS / "tutorial.md"
    assert all(said in page.read_text() for said in replaced)
    with terminal(tmp_path, replaced) as here:
        printed = here.run_page(page)
    assert "Tasks      300" in printed
    assert "http_404" in printed
    assert f"million completed {MILLION} of {MILLION}" in printed
    with zipfile.ZipFile(tmp_path / "results.zip") as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) == 102
    assert len((tmp_path / "both.csv").read_text().splitlines()) == 102
    lines = gzip.decompress((tmp_path / "million.jsonl.gz").read_bytes()).splitlines()
    assert len(lines) == MILLION
    assert json.loads(lines[-1])["status"] == "succeeded"


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
