"""Read: status, results, search, statistics, events and streams. Gets a job and a cursor, hands on pages."""
