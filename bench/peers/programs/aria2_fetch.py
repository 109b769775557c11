"""aria2c over the list, a file for each body; it runs at most 100 downloads at once over kept-alive connections."""

import subprocess
import time
from pathlib import Path

from marks import arguments, report


def main() -> None:
    asked = arguments()
    bodies, listed = Path(asked["place"]) / "bodies", Path(asked["place"]) / "list.txt"
    bodies.mkdir()
    with listed.open("w") as file:
        file.writelines(f"{asked['url']}/{number}\n  out={number}\n" for number in range(asked["count"]))
    started = time.perf_counter()
    subprocess.run(
        [
            *("aria2c", "--quiet", "--input-file", str(listed), "--dir", str(bodies)),
            *("--max-concurrent-downloads", str(asked["concurrency"]), "--max-connection-per-server", "1"),
            *("--file-allocation", "none", "--deferred-input=true", "--summary-interval=0"),
        ],
        check=True,
    )
    report(seconds=time.perf_counter() - started)


if __name__ == "__main__":
    main()
