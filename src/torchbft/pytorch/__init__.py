"""The trainer's side of a peer: sessions for plain loops, replayable tasks, shards, references."""
