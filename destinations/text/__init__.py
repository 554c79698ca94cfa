"""Destinations that people read: console, progress bar, text file."""
