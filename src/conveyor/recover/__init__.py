"""Recover: what was missed elsewhere is found from the rows and put right."""
