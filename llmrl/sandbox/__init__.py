"""Running untrusted Python: confinement, supervised interpreters, and the service that hands them out.

This package loads nothing by itself, so that a confined process starts in milliseconds.
"""
