"""What a run shows and records: metrics, console, writers, curves."""
