"""Checkpoints: copied in the training thread, written in the background, found and read again."""
