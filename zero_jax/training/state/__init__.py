"""The train state: sharded initialization, shardings, checks."""
