"""What `conveyor demo` runs against: a small target site on loopback, and the list of its pages."""
