"""Egress: the one HTTP stack for requests that leave Conveyor. Target guard, clients, routes, redirects, responses."""
