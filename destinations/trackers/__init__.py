"""Destinations for programs that others look at: each needs a package of its own, and is imported where it is asked for."""
