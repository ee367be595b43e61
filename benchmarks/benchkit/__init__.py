"""What benchmarks share: processes that run one step when told to, peers' environments, machine facts, statistics."""
