"""Ingest: a staged list becomes task rows and queue references, chunk by chunk, resumably, in constant memory."""
