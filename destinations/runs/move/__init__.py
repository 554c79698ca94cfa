"""One stream: a source yields the records of a run, a sink takes them, and one report says what both saw.

`import` reads the logs of others, `send` a run folder, and both log to a `DestinationSink`. They go through
`move` run by run: if one run fails, the others are still written.
"""
