"""The command line: bench, doctor, roofline and demo. Built on putget's public API only."""
