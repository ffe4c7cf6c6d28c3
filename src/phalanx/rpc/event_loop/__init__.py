"""The event loop of a worker and its threads.

`reactor` waits for messages, deadlines and wake-ups, in a pool of threads that execute what it
finds. `spin` polls before it sleeps.
"""
