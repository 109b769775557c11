"""Python: the user's own functions, called in child processes or in the worker."""
