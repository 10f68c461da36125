"""Metrics of a run, and where they are shown and recorded: console, writers, curves."""
