"""The dashboard: files that a browser is given, and the sessions that it acts under. All else it asks of the API."""
