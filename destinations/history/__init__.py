"""The history of a run: its sessions, what each one continues, and which records belong to the run.

Writers and readers use it. Importing it imports neither torch nor numpy.
"""
