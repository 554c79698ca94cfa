"""Callbacks that come with the package: timers, monitors, snapshots."""
