"""Telemetry: what Conveyor says of itself. `metrics.py` is the catalogue of all metrics, `seams.py` wraps each engine
once, `sampler.py` looks at queues and lateness, `exposition.py` writes it all for Prometheus; `traces.py` makes spans,
`redact.py` keeps secrets out of what is logged and shown.

Stages count where something was done, one call for each batch, as they log. Nothing here is needed for anything else.
"""
