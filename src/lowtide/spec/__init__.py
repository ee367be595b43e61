"""What exists: parameters, units and where units are cut. Pure arithmetic: no process group, no tensor's bytes."""
