"""Telemetry: metrics, logs and traces. `metrics.py` is the catalogue of all metrics, `seams.py` measures each engine,
`attempts.py` records attempts, `exposition.py` writes the metrics for Prometheus; `traces.py` creates spans; `logs.py`
configures the log; `redact.py` keeps secrets out of logs and output.

A stage counts where it does the work, with one call for each batch. Nothing else depends on this package.
"""
