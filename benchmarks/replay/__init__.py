"""Recorded sessions run again: to the same ids, or as load."""
