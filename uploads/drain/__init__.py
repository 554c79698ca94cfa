"""Empties a spool into a store: the schedule, retries, and the worker process."""
