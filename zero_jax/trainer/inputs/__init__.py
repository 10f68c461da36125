"""What a run trains on: text, or batches of the user's own. The loop knows both by the same methods."""
