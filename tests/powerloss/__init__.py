"""Power-loss replay: what is left of an installation when the power fails at any moment."""
