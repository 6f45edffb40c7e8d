"""Engines behind one port: runs, aborts and model loads in; tokens, ends and facts out.

`port` is the contract, `policy` the order inside an engine, `driver` performs the machine's effects, `choice` builds the configured engine.
"""
