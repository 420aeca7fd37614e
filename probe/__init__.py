"""What watches and what provokes: targets, collectors, store, alerts, load, replays, command line."""
