"""Launchers and initialization: `phalanx.launch(fn, nprocs)`, `phalanx run`, `phalanx.init()`.

- `launch` runs a function on several ranks of this machine and returns their results. `worker` is
  the program of each rank.
- `run` is `phalanx run` on one host. `arguments` parses and checks its command line without torch,
  and `options` makes the job's parameters. `elastic_agent` stands on PyTorch's elastic agent.
  `rank_replacement` replaces the lost ranks of an elastic job by processes of `newcomers`, which
  `spare` makes ready, as copies of a `spare_template`.
  `rank_bootstrap` ties a rank's lifetime to its parent's.
- For several hosts, `rendezvous` connects the launchers, `job_coordinator` exchanges failures
  between them, and `ssh` starts the hosts from one shell. `tunnel` authenticates the
  hosts and forwards connections between them, by `tunnel_encryption` encrypted.
- `output_forwarder` forwards the ranks' output and exits to the launcher. `failures` finds the
  first real error among several failures and reports it.
- `host_resources` checks this host, counts its cores, and gives each rank its share of them.
- `init` forms the group in a process, however it was started. `mpi` and `slurm` are the rendezvous
  of ranks that `mpirun` or `srun` has started. `store` hosts the ranks' store, makes the
  variables from which ranks find it, connects to it and reports on it.

The package imports neither torch nor the backend. The design note on launching gives
the reasons.
"""
