"""Jobs: what the stages share about jobs. Idempotency, chunks, dead letters, deadlines, admission, events."""
