"""A rank's memory: the workspace that peers write, and the native object behind it."""
