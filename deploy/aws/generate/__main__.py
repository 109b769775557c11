"""Writes every generated file."""

from deploy.aws.generate.template import files

for path, text in files().items():
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(path.name, len(text))
