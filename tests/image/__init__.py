"""The image: built for real from the Dockerfile, and started as a container would be. `make image` runs it."""
