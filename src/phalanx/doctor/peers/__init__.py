"""Between hosts: does every pair reach each other, how late, and how fast?

- `wire`: one pair over TCP: who answers, and who measures. `memory`: two ranks of one host.
- `worker`: what a host does when it is asked. `agents`: how it is asked, here in a thread, in
  `ranks` through the store of a job, in `ssh` through a shell on another machine.
- `tournament`: who is measured with whom at the same time, so that no pair disturbs another.
- `links`: what came out, and what is wrong with it; `matrix` shows it.

Plain sockets measure rather than a process group: a group breaks as a whole when two of its ranks
don't reach each other, and the others would stay unknown.
"""
