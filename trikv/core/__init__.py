"""Every decision of the daemon, pure: no I/O, no tasks, no clock."""
