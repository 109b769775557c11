"""Join the rows of a csv with their results: python join.py companies.csv enriched.zip enriched.csv"""

import csv
import json
import sys
import zipfile

COLUMNS = ["domain", "secure", "initials"]


def main(table: str, archive: str, out: str) -> None:
    with zipfile.ZipFile(archive) as results:
        # The index of a task is the number of its row.
        tasks = {task["index"]: task for task in map(json.loads, results.read("manifest.jsonl").splitlines())}
        with open(table, newline="") as source, open(out, "w", newline="") as target:
            rows = csv.DictReader(source)
            joined = csv.DictWriter(target, [*(rows.fieldnames or []), *COLUMNS, "error"])
            joined.writeheader()
            for index, row in enumerate(rows):
                task = tasks[index]
                if task["status"] == "succeeded":
                    columns = json.loads(results.read(task["file"]))
                else:
                    columns = {"error": task["error"]["message"]}
                joined.writerow(row | columns)


if __name__ == "__main__":
    main(*sys.argv[1:])
