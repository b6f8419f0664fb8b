"""One rank's rounds: geometry, the native all-to-all object, views of what has come."""
