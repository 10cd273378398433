"""What a process needs from its machine: other processes, files, locks, a terminal, devices."""
