"""Durable jobs on DBOS. Only this room imports DBOS.

`Jobs` starts, watches and controls jobs; a `Worker` executes them, in the same process or in
another. A job's operation id is DBOS's workflow id, its progress is a workflow event, and its steps
are DBOS steps, so finished steps are not repeated after a crash.
"""
