"""One stream: a source yields the records of a run, a sink takes them, and one report says what both saw.

`import` reads the logs of others, `send` a run folder, and both log to a `DestinationSink`; `export` and
`compact` write tables. All go through `move`, run by run, so that one that fails does not keep back the
others.
"""
