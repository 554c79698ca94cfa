"""Which runs there are: the scan of folders, the index of what it found, filters, and edits of the user."""
