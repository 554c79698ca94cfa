"""Callbacks that come with the package: timers, monitors and a snapshot of the code."""
