"""The whole protocol in one process and virtual time, and everything that can go wrong: see docs/simulator.md."""
