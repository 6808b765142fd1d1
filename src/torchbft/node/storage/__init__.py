"""What must survive a crash: append-only logs, payloads, checkpoints, and the folder's lock."""
