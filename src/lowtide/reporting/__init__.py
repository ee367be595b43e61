"""What a run did: timelines that every sharded model can write, and what reads them."""
