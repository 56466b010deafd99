"""Processes of a parallel run: rendezvous, group, heartbeat, launcher, and ranks that are replaced."""
