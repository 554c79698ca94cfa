"""Destinations with human-readable output: console, progress bar, text file."""
