"""Confined execution of untrusted Python; imports nothing, so that confined processes start in milliseconds."""
