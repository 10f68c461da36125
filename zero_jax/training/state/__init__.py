"""The train state: made sharded, its shardings, its checks."""
