"""The metaserver `trikv-meta`, and a daemon's way to it."""
