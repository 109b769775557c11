"""Process: workers take chunks of references from per-run queues, run them and record one outcome for each."""
