"""The rows of a csv with what was found for each: python join.py companies.csv enriched.zip enriched.csv"""

import csv
import json
import sys
import zipfile

COLUMNS = ["domain", "secure", "initials"]


def main(table: str, archive: str, out: str) -> None:
    with zipfile.ZipFile(archive) as results:
        # A task's index is the number of its row.
        tasks = {task["index"]: task for task in map(json.loads, results.read("manifest.jsonl").splitlines())}
        with open(table, newline="") as source, open(out, "w", newline="") as target:
            rows = csv.DictReader(source)
            joined = csv.DictWriter(target, [*(rows.fieldnames or []), *COLUMNS, "error"])
            joined.writeheader()
            for index, row in enumerate(rows):
                task = tasks[index]
                if task["status"] == "succeeded":
                    found = json.loads(results.read(task["file"]))
                else:
                    found = {"error": task["error"]["message"]}
                joined.writerow(row | found)


if __name__ == "__main__":
    main(*sys.argv[1:])
