"""The event loop of a worker and its threads.

`reactor` waits for messages, deadlines and wake-ups, `leader_followers` is the pool of threads that
execute what it finds, `eventfd` wakes a thread that polls, and `spin` polls before it sleeps.
"""
