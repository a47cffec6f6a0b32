"""The version, in a module of its own so that the command line can tell it without importing torch."""

__version__ = "0.1.0"
