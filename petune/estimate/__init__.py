"""Estimates made before a run: memory, time, communication, and shares of unequal devices."""
