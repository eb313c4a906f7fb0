"""Requests, their scheduling, the step loop, and the public ``Engine``."""
