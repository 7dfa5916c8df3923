"""Helpers that depend on no other package of llmrl: loops, threads, failures, arguments, files, imports."""
