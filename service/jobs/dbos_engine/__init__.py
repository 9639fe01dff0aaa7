"""Durable jobs on DBOS. Only this room imports DBOS, so its use can be understood from here alone.

`Jobs` starts, watches and steers jobs; a `Worker` executes them, in the same process or in another.
A job's operation id is DBOS's workflow id, its progress is a workflow event, and its steps are DBOS
steps, so finished steps are not repeated after a crash.
"""
