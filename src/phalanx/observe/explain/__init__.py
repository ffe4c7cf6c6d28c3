"""The explanation of a job: the diagnosis in sentences, a table of the ranks, and suggested fixes.

`formatting` formats ranks, operations and times, and escapes text from the job. `phrases` and
`sentences` put the diagnosis of `phalanx.observe.diagnosis` into words, `pending_calls` describes
remote calls, `table` shows the ranks, and `advice` suggests fixes. `report` combines them for a
terminal, as plain text or as JSON.
"""

from phalanx.observe.explain.report import as_json, as_text, explain

__all__ = ["as_json", "as_text", "explain"]
