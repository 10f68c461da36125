"""Files that anything may have written, locks of folders, records of runs, and the cache folder of the user."""
