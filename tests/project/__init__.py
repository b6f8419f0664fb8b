"""Checks of the project itself: layering, packaging, file sizes."""
