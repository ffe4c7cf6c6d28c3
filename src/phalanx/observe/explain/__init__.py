"""The explanation of a job: the verdict in words, the ranks in a table, and what to try.

`words` names ranks, operations and times and escapes what the job wrote; `phrases` and `sentences`
word the verdict of `phalanx.observe.culprit`, `table` shows the ranks, `advice` says what to try,
`report` puts it all together: for a terminal, as plain text, as JSON.
"""

from phalanx.observe.explain.report import as_json, as_text, explain

__all__ = ["as_json", "as_text", "explain"]
