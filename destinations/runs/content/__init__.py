"""What is in one run: series, records, media, checkpoints, ranks and flight records."""
