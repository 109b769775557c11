"""A real server under troubles: killed, stopped, with a full disk, a wrong clock and engines that go away; with a
ledger outside of it. Part of `make soak`."""
