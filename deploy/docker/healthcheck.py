"""Exits 0 if the Conveyor process of this container is healthy: /healthz on its metrics port answers 200."""

import http.client
import os
import sys


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(not is_healthy(int(os.environ["CONVEYOR_METRICS_PORT"])))
