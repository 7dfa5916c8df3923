"""What every package may use and that knows nothing of ours: loops, threads, failures, arguments, files, imports."""
