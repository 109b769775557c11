"""The function that tasks call, registered as `enrich`."""

from urllib.parse import urlsplit

from conveyor import Context, task


@task("enrich")
def enrich(row: dict[str, str], context: Context) -> dict[str, str | bool]:
    parts = urlsplit(row["website"])
    if not parts.hostname:
        raise ValueError(f"{row['website']!r} is not a website (attempt {context.attempt})")
    return {
        "domain": ".".join(parts.hostname.split(".")[-2:]),
        "secure": parts.scheme == "https",
        "initials": "".join(word[0] for word in row["name"].split() if word[0].isalpha()),
    }
