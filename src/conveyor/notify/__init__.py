"""Notify: dispatches outbox events to webhook endpoints and state machines; takes in jobs that arrive by queue."""
