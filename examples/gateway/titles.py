"""Write the titles of the pages in an archive to a csv: python titles.py pages.zip titles.csv"""

import csv
import json
import re
import sys
import zipfile


def main(archive: str, out: str) -> None:
    with zipfile.ZipFile(archive) as pages, open(out, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["url", "attempts", "title"])
        for line in pages.read("manifest.jsonl").splitlines():
            task = json.loads(line)
            if task["status"] == "succeeded":
                title = re.search(rb"<title>(.*?)</title>", pages.read(task["file"]))
                rows.writerow([task["input"], task["attempts"], title[1].decode() if title else ""])


if __name__ == "__main__":
    main(*sys.argv[1:])
