"""The durable queue on disk: entries, their states, how files get in, and who owns the folder."""
