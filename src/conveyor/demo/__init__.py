"""The target of `conveyor demo`: a small site on loopback, and the list of its pages."""
