"""Lists: from a file, an upload or a request body to checked inputs of tasks. Formats, inputs, templates, uploads."""
