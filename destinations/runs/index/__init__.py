"""Finds runs: the scan of folders, the index of the found runs, filters, and edits of the user."""
