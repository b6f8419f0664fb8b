"""Plug-ins for engines that need `putget_transfer` alone."""
