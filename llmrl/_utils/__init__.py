"""Helpers without dependencies on other packages of llmrl: loops, threads, failures, arguments, files, imports."""
