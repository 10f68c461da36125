"""The data of a run: text, or batches of the user's own. Both have the methods that the loop calls."""
