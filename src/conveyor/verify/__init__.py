"""Verify: checks that all stored data of an installation fits together."""
