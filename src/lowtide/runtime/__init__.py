"""One training step, in reading order: hooks, engine, residency, saved, grads, norm, update."""
