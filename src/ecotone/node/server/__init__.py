"""The shared node: one process that serves the engines of a host, and the clients' ends of it."""
