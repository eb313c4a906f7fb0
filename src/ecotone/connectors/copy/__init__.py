"""Copy engines: they move bytes between the encoder cache and the region, and say when they really have."""
