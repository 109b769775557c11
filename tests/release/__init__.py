"""A release: wheel, sdist, bill of materials and checksums, tried on every Python here. `make release` runs it."""
