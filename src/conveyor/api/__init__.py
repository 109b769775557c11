"""The HTTP API: reads requests, calls the packages below, and sends JSON, bodies and problems. It decides nothing
itself."""
