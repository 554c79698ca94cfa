"""What belongs to a run: its sessions, what each continues from, and how to ask.

Writers and readers stand on it. Importing it imports neither torch nor numpy.
"""
