"""Checkpoints: how they are written, found, checked and read. The format is specified in docs/checkpoints.md."""
