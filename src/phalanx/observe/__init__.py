"""What ranks do and did: written always, read by whoever asks.

Every rank keeps a black box: a file in its job's directory (`directory`, on `files`) into which the
native core writes each operation, and which outlives the death of everything. `recording` makes it
and writes what the core doesn't know (training progress, how the process ends), with `last_words`;
`notes` is what a launcher writes. The backend and the launchers use these alone, and `escape`,
which makes texts fit for a terminal.

The rest reads: `finding` finds a job, `reading` turns its directory into the plain objects of
`model`, with `boxes`, `noted` and `processes` for the three kinds of sources. `culprit` finds out
who holds up whom, `explain` words it, `watch` shows it live, `trace` puts it on a timeline, both
with `shares`, whom a rank waits for and how long. Reading never disturbs the job, and believes
nothing that it finds.
"""
