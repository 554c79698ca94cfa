"""Moves runs: a source yields the records of a run, a sink writes them, and one report counts both.

`import` reads the logs of other tools and `send` reads a run folder; both write to a `DestinationSink`.
`move` takes one run after the other: if one fails, the others are still written.
"""
