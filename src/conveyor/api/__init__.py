"""The HTTP API: gets requests, asks accept and serve, hands back JSON, bodies and problems. Decides nothing itself."""
