"""Fetch: requests made in child processes. The worker's side, the child's side, the frames between them."""
