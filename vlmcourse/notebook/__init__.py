"""Ranks in a notebook: `%%torchrun` runs a cell on several processes, shows what they print, and leaves none behind.

Where to look, from the person to the rank:

- what is typed: `magic`, `options` (flags), `completion`, `subcommands` (`%torchrun ...`), `cell` (its text as Python)
- what is run: `cell_run` (one cell on ranks of its own), `session` and `session_commands` (ranks that stay), `script`
  (`--save` and `--show`), `elastic` and `torchrun_command` (the real `torchrun`)
- how ranks are started and ended: `launcher`, `rank_group`, `starting`, `fork_server`, `guard`, `interrupts`
- what is seen: `output_reader`, `streams` (bytes to lines), `rank_names` (`[0-3]`), `folding` (equal lines once),
  `flood` and `kept_output` (very many lines), `failure` (which rank failed first, and why), `hang` (who waits for whom)
- what a rank runs: `worker`, `session_worker`, `elastic_worker`, `process_group`, `rank_shell`, `figures`, `spawning`
- what travels between: `jobs` (files in a private folder), `variables`

This side of the package imports no torch; only the ranks do.
"""
