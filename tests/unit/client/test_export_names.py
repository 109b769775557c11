"""What the name of a file says about an export."""

from pathlib import Path

import pytest

from conveyor.client.export_files import named_form
from conveyor.errors import BadInput


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.zip", {"format": "zip"}),
        ("a.b.CSV", {"format": "csv"}),
        ("a.jsonl.gz", {"format": "jsonl", "compression": "gzip"}),
        ("a.ndjson.zst", {"format": "jsonl", "compression": "zstd"}),
        ("a.gz", {"compression": "gzip"}),
        ("a", {}),
    ],
)
def test_names(name: str, form: dict[str, str]) -> None:
    assert named_form(Path(name)) == form


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.zip.zst"])
def test_what_is_compressed_inside_gets_no_further_ending(name: str) -> None:
    with pytest.raises(BadInput, match="compressed inside"):
        named_form(Path(name))
