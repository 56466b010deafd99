"""Processes of a parallel run: rendezvous, process group and heartbeat, launcher, and ranks that are
replaced."""
