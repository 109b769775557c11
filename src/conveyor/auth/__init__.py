"""Auth: API keys, the signing key, sealed secrets and dashboard sessions."""
