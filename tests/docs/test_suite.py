"""What `make test` does with tests that fail."""

from pathlib import Path

import pytest

from tests import suite

SETTINGS = '[tool.pytest.ini_options]\ncache_dir = ".cache/pytest"\naddopts = ["-q"]\n'
# A test that fails until it was run so often.
TEST = """
from pathlib import Path

def test_{name}():
    runs = Path(__file__).with_suffix(".{name}")
    runs.write_text((runs.read_text() if runs.exists() else "") + "x")
    assert len(runs.read_text()) > {failures}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failures", "code"),
    [((1, 1, 0), 0), ((2, 0), 1), ((1, 1, 1), 1)],
    ids=["two are unstable", "one fails alone", "three fail"],
)
def test_what_fails_is_run_again_alone(
    failures: tuple[int, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    tests = [TEST.format(name=f"number_{number}", failures=count) for number, count in enumerate(failures)]
    (tmp_path / "test_some.py").write_text("".join(tests))
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "FAILED", tmp_path / suite.FAILED.relative_to(Path(__file__).parents[2]))
    monkeypatch.setattr(suite, "TIMES_ALONE", 1)
    # The plugins of the other tests take seconds to import.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin")
    assert suite.main([]) == code
