"""What will happen: pure arithmetic, no bytes."""
